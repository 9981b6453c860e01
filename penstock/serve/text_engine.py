"""Turns a parsed request into a stream of deltas: template, grammar, tokens, engine.

Owns the tokenizer and the chat template, and derives the model's dialect from the template. Knows
no HTTP and no schema: the APIs call it, and text_stream.py turns tokens into text.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ContextLengthError, RequestError
from penstock.serve.admission import require_priority
from penstock.serve.fleet import Fleet
from penstock.serve.intake import Place
from penstock.serve.metrics import Metrics, TokenTimer
from penstock.serve.requests import (
    MAX_CHARS_ASKED,
    ChatRequest,
    CompletionRequest,
    TextRequest,
    TokenizeRequest,
)
from penstock.serve.response_grammar import chat_grammar, form_grammar, form_param
from penstock.serve.system_prompt import with_system_prompt
from penstock.serve.text_stream import Deliver, Parser, PlainText, Reply, TextStream, Thought
from penstock.serve.vectors import VectorEngine
from penstock.text.chat_prompt import ChatEncoder, RenderedChat, without_oldest
from penstock.text.dialects import StreamParser, ThoughtsInContent, dialect_of
from penstock.text.length import roles_written, words_written
from penstock.text.loop_guard import LoopGuard
from penstock.text.pooling import VectorText
from penstock.text.prompt import (
    SHORTEN,
    build_requests,
    check_ids,
    limit_scores,
    prompt_too_long,
    truncated,
)
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.text.turns import Preparation
from penstock.types import EngineInfo, Request, SamplingParams

LONG_TOKEN = 16  # characters; few tokens of a text are longer
MAX_ECHO_CHARS = 2**24  # per request, in all its replies
MIN_THOUGHT_TOKENS = 16  # the smallest budget that the server itself sets
TRUNCATED_REPLY_SHARE = 8  # one eighth of the context is kept for the reply to a truncated chat
MAX_COUNTS = 2  # concurrent requests that only count: threads are for replies first


@dataclass(frozen=True, slots=True)
class _ChatPrompt:
    """A chat as engine requests, and whether its replies begin with thinking or continue a text."""

    requests: list[Request]
    is_thinking: bool
    continues: bool


class TextEngine:
    """An engine with text in and text out."""

    def __init__(
        self,
        client: Fleet,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        metrics: Metrics,
        enable_thinking: bool | None = None,
        *,
        thinking_share: float = 1.0,  # part of max_tokens for thinking without a budget
        loop_guard: bool = False,
        system_prompt: str | None = None,  # for chats that have none
        allow_special_tokens_in_content: bool = False,
        open_schemas: bool = False,  # allow object keys that a JSON schema does not list
        min_priority: int = 0,  # the lowest priority that a request may have
        # How to compute vectors of texts; None: the defaults.
        vector_text: VectorText | None = None,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._template = template
        self._chat_encoder = ChatEncoder(template, tokenizer, allow_special_tokens_in_content)
        self._metrics = metrics
        self._template_defaults = (
            {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        )
        self._thinking_share = thinking_share
        self._loop_guard = loop_guard
        self._system_prompt = system_prompt
        self._open_schemas = open_schemas
        self._min_priority = min_priority
        self._preparation = Preparation()
        self._counting = Preparation(MAX_COUNTS)
        self.vectors = VectorEngine(
            client,
            tokenizer,
            vector_text or VectorText(tokenizer, template),
            metrics,
            self._preparation,
            self._refuse_far_too_long,
            min_priority,
        )
        self._dialect = dialect_of(template.source)
        self._thought = Thought(None)
        if self._dialect.thinking is not None:
            closing_ids = tuple(tokenizer.encode(self._dialect.thinking.forced_end))
            self._thought = Thought(
                tokenizer.id_of(self._dialect.thinking.end), closing_ids=closing_ids
            )

    async def stream_chat(
        self, request_id: str, chat: ChatRequest, deliver: Deliver, place: Place | None = None
    ) -> TextStream:
        """`place`: the request's place in the queue, until its replies take it over."""
        asked_at = time.monotonic()
        info = self._require_ready(chat)
        num_bytes = _resize(place, chat.sampling.n)
        prompt = await self._preparation.run(num_bytes, self._prepare_chat, request_id, chat, info)
        stream = TextStream(self._client, deliver)
        dialect = self._dialect
        if not chat.sampling.skip_special_tokens:  # then control tokens are text
            dialect = replace(dialect, control_tokens=())

        def reply_to(request: Request, index: int) -> Reply:
            split = StreamParser(
                dialect,
                chat.tools,
                in_thinking=prompt.is_thinking,
                parses_tools=bool(chat.tools),
                continues_thought=prompt.continues,
            )
            parser: Parser = split
            if chat.keeps_thoughts_in_content and self._dialect.thinking is not None:
                parser = ThoughtsInContent(split, self._dialect.thinking)
            thought = replace(
                self._thought,
                budget=self._thinking_budget(chat, request, prompt.is_thinking),
                is_stoppable=self._stops_thoughts(chat.sampling.stop),
            )
            return self._reply(
                stream,
                request,
                index,
                parser,
                asked_at,
                thought=thought,
                ends_after_call=not chat.is_parallel,
                form_param=form_param(chat),
                loop_guard=self._guard(chat),
                continues_text=prompt.continues,
                output=chat.output,
            )

        return _submit(stream, [prompt.requests], reply_to, place)

    async def stream_completion(
        self,
        request_id: str,
        completion: CompletionRequest,
        deliver: Deliver,
        place: Place | None = None,
    ) -> TextStream:
        asked_at = time.monotonic()
        info = self._require_ready(completion)
        num_bytes = _resize(place, completion.sampling.n * len(completion.prompts))
        requests, echoes = await self._preparation.run(
            num_bytes, self._prepare_completion, request_id, completion, info
        )
        stream = TextStream(self._client, deliver)

        def reply_to(request: Request, index: int) -> Reply:
            echo = echoes[index // completion.sampling.n]
            guard = self._guard(completion)
            return self._reply(
                stream,
                request,
                index,
                PlainText(),
                asked_at,
                echo=echo,
                form_param=form_param(completion),
                echoes_scores=completion.echo and completion.sampling.logprobs is not None,
                output=completion.output,
                loop_guard=guard,
                continues_text=self._tokenizer.has_text(request.token_ids),
            )

        return _submit(stream, requests, reply_to, place)

    def _require_ready(self, asked: TextRequest) -> EngineInfo:
        """Raises an error if the request would be refused, before it is prepared."""
        require_priority(asked.priority, self._min_priority)
        return self._client.require_ready()

    @property
    def can_think(self) -> bool:
        return self._dialect.thinking is not None

    @property
    def can_call(self) -> bool:
        return self._dialect.call is not None

    @property
    def template_source(self) -> str | None:
        return self._template.source

    @property
    def special_tokens(self) -> dict[str, str]:
        return self._template.special_tokens

    async def render(self, chat: ChatRequest, num_bytes: int = 0) -> str:
        """The prompt that a chat becomes. `num_bytes`: size of the request, here and below."""
        rendered = await self._counting.run(num_bytes, self._render_checked, chat)
        return rendered.text

    async def tokenize(self, asked: TokenizeRequest, tenant: str, num_bytes: int = 0) -> list[int]:
        return await self._counting.run(num_bytes, self._tokenize, asked, tenant)

    async def num_tokens(self, chat: ChatRequest, tenant: str, num_bytes: int) -> int:
        """The number of tokens of a chat's prompt."""
        return len(await self.tokenize(TokenizeRequest(chat=chat), tenant, num_bytes))

    async def token_texts(self, token_ids: list[int], num_bytes: int = 0) -> list[str]:
        return await self._counting.run(num_bytes, self._token_texts, token_ids)

    async def token_pieces(self, token_ids: list[int], num_bytes: int = 0) -> list[str | list[int]]:
        """The text of each token, or its bytes if they are not valid text."""
        return await self._counting.run(num_bytes, self._token_pieces, token_ids)

    async def detokenize(self, token_ids: list[int], num_bytes: int = 0) -> str:
        check_ids("tokens", token_ids, self._tokenizer.vocab_size)
        return await self._counting.run(num_bytes, self._tokenizer.decode, token_ids, False)

    def _token_texts(self, token_ids: list[int]) -> list[str]:
        bytes_of = self._tokenizer.token_bytes
        texts = {
            token_id: bytes_of(token_id).decode("utf-8", "replace") for token_id in set(token_ids)
        }
        return [texts[token_id] for token_id in token_ids]

    def _token_pieces(self, token_ids: list[int]) -> list[str | list[int]]:
        pieces: dict[int, str | list[int]] = {}
        for token_id in set(token_ids):
            data = self._tokenizer.token_bytes(token_id)
            try:
                pieces[token_id] = data.decode()
            except UnicodeDecodeError:
                pieces[token_id] = list(data)
        return [pieces[token_id] for token_id in token_ids]

    def _tokenize(self, asked: TokenizeRequest, tenant: str) -> list[int]:
        chat = asked.chat
        if chat is None:
            if not asked.knows_control_tokens:
                return self._tokenizer.encode_plain(asked.text)
            return self._tokenizer.encode(asked.text, asked.add_special_tokens, tenant)
        rendered = self._render_checked(chat)
        return self._chat_encoder.encode(rendered, tenant)

    def _render_checked(self, chat: ChatRequest) -> RenderedChat:
        num_chars = _num_chars([chat.messages, chat.tools])
        if num_chars > MAX_CHARS_ASKED:
            raise RequestError(
                "The messages are too long to be rendered or counted",
                f"They and the tools have {num_chars} characters; the limit is {MAX_CHARS_ASKED}.",
                "Send them in parts.",
                param="messages",
            )
        return self._render(chat)

    def _prepare_chat(self, request_id: str, chat: ChatRequest, info: EngineInfo) -> _ChatPrompt:
        try:
            return self._prepare_whole_chat(request_id, chat, info)
        except ContextLengthError:
            if not chat.drops_oldest:
                raise
        # Without max_tokens, the reply still needs room.
        max_tokens = chat.sampling.max_tokens or max(1, info.max_model_len // TRUNCATED_REPLY_SHARE)
        tried = replace(chat, sampling=replace(chat.sampling, max_tokens=max_tokens))

        def require_fit(messages: list[dict[str, Any]]) -> None:
            self._prepare_whole_chat(request_id, replace(tried, messages=messages), info)

        messages = without_oldest(chat.messages, require_fit)
        return self._prepare_whole_chat(request_id, replace(chat, messages=messages), info)

    def _prepare_whole_chat(
        self, request_id: str, chat: ChatRequest, info: EngineInfo
    ) -> _ChatPrompt:
        try:
            self._refuse_long_chat(chat, info.max_model_len)
            rendered = self._render(chat)
            is_thinking = rendered.opens(self._dialect.thinking)
            sampling = self._constrained(chat, is_thinking)
            if not self._is_truncated(chat, len(rendered.text)):
                self._refuse_far_too_long(
                    rendered.text, False, chat.cache_scope, info.max_model_len
                )
            token_ids = self._chat_encoder.encode(rendered, chat.cache_scope)
            token_ids = truncated(token_ids, sampling, info.max_model_len)
            (requests,) = self._build_requests(request_id, [token_ids], sampling, info, chat)
        except RequestError as error:
            if error.param == "prompt":  # a chat has messages
                error.param = "messages"
            raise
        return _ChatPrompt(requests, is_thinking, rendered.num_reply_chars > 0)

    def _constrained(self, chat: ChatRequest, is_thinking: bool) -> SamplingParams:
        if chat.reply_thought and not (is_thinking or chat.reply_start):
            raise RequestError(
                "The last message has reasoning but no content, and cannot be continued",
                "Thinking is off for this reply.",
                "Turn thinking on, or put the beginning of the reply into content.",
                param="messages",
            )
        if is_thinking and chat.reply_start and chat.reply_thought is None:
            raise RequestError(
                "The last message is the assistant's, and cannot be continued",
                "The reply begins with thinking, which would have to come before that message.",
                "Turn thinking off, or end with a user message.",
                param="messages",
            )
        grammar = chat_grammar(
            chat, self._dialect, self._tokenizer, is_thinking, self._open_schemas
        )
        if grammar is None:
            return chat.sampling
        starts_after = (self._require_thought_end(chat),) if is_thinking else ()
        return replace(chat.sampling, grammar=grammar, grammar_starts_after=starts_after)

    def _require_thought_end(self, chat: ChatRequest) -> int:
        if self._thought.end_id is None:
            raise RequestError(
                "A reply with thinking cannot follow a grammar here",
                "The model has no token that ends thinking.",
                "Turn thinking off.",
                param=form_param(chat),
            )
        return self._thought.end_id

    def _render(self, chat: ChatRequest) -> RenderedChat:
        arguments: dict[str, Any] = {**self._template_defaults, **chat.template_arguments}
        messages = with_system_prompt(chat.messages, self._system_prompt)
        return self._chat_encoder.render(
            messages,
            chat.tools,
            chat.add_generation_prompt,
            variables=arguments,
            reply_start=chat.reply_start,
            reply_thought=chat.reply_thought,
        )

    def _prepare_completion(
        self, request_id: str, asked: CompletionRequest, info: EngineInfo
    ) -> tuple[list[list[Request]], list[str]]:
        """The requests of each prompt, and the echo before its replies."""
        max_model_len = info.max_model_len
        texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]
        for text in texts:
            if not self._is_truncated(asked, len(text)):
                self._refuse_long([text], max_model_len)
        prompts = [
            self._encode(prompt, asked, max_model_len) if isinstance(prompt, str) else prompt
            for prompt in asked.prompts
        ]
        if asked.sampling.truncate_prompt_tokens is not None:
            prompts = [truncated(prompt, asked.sampling, max_model_len) for prompt in prompts]
            asked = replace(asked, prompts=list(prompts))
        grammar = None if asked.form is None else form_grammar(asked.form, self._open_schemas)
        sampling = replace(asked.sampling, grammar=grammar)
        requests = self._build_requests(request_id, prompts, sampling, info, asked)
        return requests, self._echoes_of(asked) if asked.echo else [""] * len(prompts)

    def _encode(self, prompt: str, asked: TextRequest, max_model_len: int) -> list[int]:
        """A prompt that the client wrote as a whole: control tokens in it are control tokens."""
        if not self._is_truncated(asked, len(prompt)):
            self._refuse_far_too_long(prompt, True, asked.cache_scope, max_model_len)
        return self._tokenizer.encode(prompt, True, asked.cache_scope)

    def _is_truncated(self, asked: TextRequest, num_chars: int) -> bool:
        """Whether the prompt is truncated to fit. All of it is tokenised first, so there is still a
        limit."""
        if asked.sampling.truncate_prompt_tokens is None:
            return False
        if num_chars > MAX_CHARS_ASKED:
            raise ContextLengthError(
                "The prompt is too long to be truncated",
                f"It has {num_chars} characters; the limit is {MAX_CHARS_ASKED}.",
                SHORTEN,
                param="prompt",
            )
        return True

    def _refuse_long_chat(self, chat: ChatRequest, max_model_len: int) -> None:
        """Judges a chat before it is rendered, by the text that its template certainly writes."""
        num_chars = _num_chars([message.get("content") for message in chat.messages])
        if self._is_truncated(chat, num_chars) or num_chars <= LONG_TOKEN * max_model_len:
            return
        thinking = self._dialect.thinking
        thought_end = None if thinking is None else thinking.end
        self._refuse_long(
            words_written(chat.messages, self._roles_written, thought_end), max_model_len
        )

    def _refuse_long(self, texts: list[str], max_model_len: int) -> None:
        """Raises an error if no tokenization of these texts can fit the context."""
        num_chars = sum(map(len, texts))
        if num_chars <= LONG_TOKEN * max_model_len:
            return
        bound = self._tokenizer.length_bound
        num_tokens = bound.fewest_tokens(texts)
        if num_tokens >= max_model_len:
            raise prompt_too_long(
                f"at least {num_tokens}",
                max_model_len,
                f" The text has {num_chars} characters, and no token has more than "
                f"{bound.longest_token}.",
            )

    @functools.cached_property
    def _roles_written(self) -> frozenset[str]:
        return roles_written(self._template)

    def _refuse_far_too_long(
        self, text: str, add_special_tokens: bool, scope: str, max_model_len: int
    ) -> None:
        """Judges a text by its beginning: counting all of its tokens could take a minute."""
        self._refuse_long([text], max_model_len)
        beginning = text[: LONG_TOKEN * max_model_len]
        if len(beginning) == len(text):
            return
        num_tokens = len(self._tokenizer.encode(beginning, add_special_tokens, scope))
        if num_tokens > max_model_len:
            raise prompt_too_long(
                f"more than {num_tokens}", max_model_len, f" The text has {len(text)} characters."
            )

    def _echoes_of(self, asked: CompletionRequest) -> list[str]:
        """The texts of the prompts: each reply begins with that of its prompt."""
        decode = self._tokenizer.decode
        echoes = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in asked.prompts]
        num_chars = asked.sampling.n * sum(map(len, echoes))
        if num_chars > MAX_ECHO_CHARS:
            raise RequestError(
                f"The echo would have {num_chars:,} characters",
                f"The limit is {MAX_ECHO_CHARS:,} per request; n is {asked.sampling.n}.",
                "Lower n, split the request, or omit echo.",
                param="echo",
            )
        return echoes

    def _build_requests(
        self,
        request_id: str,
        prompts: list[list[int]],
        sampling: SamplingParams,
        info: EngineInfo,
        asked: TextRequest,
    ) -> list[list[Request]]:
        """The requests of each prompt, with distinct ids."""
        room = info.max_model_len
        # Before scores are limited: tokens that do not fit must not count there.
        if asked.is_cut_to_context:
            sampling = _cut_to_context(sampling, room - min(map(len, prompts)))
        sampling = limit_scores(prompts, sampling, room)
        ids = (
            [request_id]
            if len(prompts) == 1
            else [f"{request_id}-{i}" for i in range(len(prompts))]
        )
        return [
            build_requests(
                id,
                token_ids,
                _cut_to_context(sampling, room - len(token_ids))
                if asked.is_cut_to_context
                else sampling,
                self._tokenizer,
                info.max_model_len,
                priority=asked.priority,
                session_id=asked.session_id,
                tenant=asked.tenant,
                cache_salt=asked.cache_salt,
                page_size=info.page_size,
            )
            for id, token_ids in zip(ids, prompts)
        ]

    def _thinking_budget(
        self, chat: ChatRequest, request: Request, is_thinking: bool
    ) -> int | None:
        """The request's own budget or, so that the answer still fits, a share of its
        `max_tokens`."""
        if chat.thinking_budget is not None or not is_thinking:
            return chat.thinking_budget
        budgets = [] if chat.effort_budget is None else [chat.effort_budget]
        if self._thinking_share < 1:
            assert request.sampling.max_tokens is not None
            share = int(self._thinking_share * request.sampling.max_tokens)
            budgets.append(max(MIN_THOUGHT_TOKENS, share))
        return min(budgets, default=None)

    def _stops_thoughts(self, stop: tuple[str, ...]) -> bool:
        """Stop strings apply to the answer, unless one of them is the end of thinking itself."""
        thinking = self._dialect.thinking
        return thinking is not None and any(thinking.end in text for text in stop)

    def _guard(self, asked: TextRequest) -> LoopGuard | None:
        is_wanted = self._loop_guard if asked.loop_guard is None else asked.loop_guard
        return LoopGuard() if is_wanted else None

    def _reply(
        self,
        stream: TextStream,
        request: Request,
        index: int,
        parser: Parser,
        asked_at: float,
        **options: Any,
    ) -> Reply:
        timer = TokenTimer(self._metrics, len(request.token_ids), asked_at)
        return Reply(stream, request, index, self._tokenizer, timer, parser, **options)


def _cut_to_context(sampling: SamplingParams, room: int) -> SamplingParams:
    """Limits max_tokens to what fits. If none fits, the prompt is refused later for its length."""
    if sampling.max_tokens is None:
        return sampling
    return replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room)))


def _num_chars(value: Any) -> int:
    """The number of characters of all strings in a JSON value."""
    num_chars, rest = 0, [value]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, dict):
            rest += value.values()
        elif isinstance(value, list):
            rest += value
    return num_chars


def _resize(place: Place | None, num_replies: int) -> int:
    """Refuses a request with more replies than there are places; returns the size of its body."""
    if place is None:
        return 0
    place.resize(num_replies)
    return place.num_bytes


def _submit(
    stream: TextStream,
    prompts: list[list[Request]],
    reply_to: Callable[[Request, int], Reply],
    place: Place | None,
) -> TextStream:
    indices = itertools.count()
    replies = [[reply_to(request, next(indices)) for request in requests] for requests in prompts]
    stream.submit(replies, place)
    return stream
