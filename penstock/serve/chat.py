"""From a parsed request to a stream of news: template, form, tokens, engine.

Owns the tokenizer and the chat template, and knows from the template which dialect the model speaks. Knows no
HTTP and no schema: the APIs stand in front of it, text_stream.py behind, where the replies grow.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ContextLengthError, RequestError
from penstock.serve.admission import require_priority
from penstock.serve.fleet import Fleet
from penstock.serve.metrics import Metrics, TokenTimer
from penstock.serve.openai.requests import (
    MAX_CHARS_ASKED,
    ChatRequest,
    CompletionRequest,
    TextRequest,
    TokenizeRequest,
)
from penstock.serve.reply_form import form_param, grammar_of
from penstock.serve.system_prompt import with_system_prompt
from penstock.serve.text_stream import Deliver, Parser, PlainText, Reply, TextStream, Thought
from penstock.text.dialects import StreamParser, dialect_of
from penstock.text.loop_guard import LoopGuard
from penstock.text.prompt import SHORTEN, build_requests, check_ids
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.types import EngineInfo, Request, SamplingParams

LONG_TOKEN = 16  # characters; few tokens of a text have as many
MAX_COUNTS = 2  # at a time: threads, and the process of the chat template, are there for replies first


@dataclass(frozen=True, slots=True)
class _ChatPrompt:
    """A chat as the engine gets it, and whether its reply begins inside a thought."""

    token_ids: list[int]
    sampling: SamplingParams
    is_thinking: bool


class TextEngine:
    """An engine that is spoken to in text."""

    def __init__(
        self,
        client: Fleet,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        metrics: Metrics,
        enable_thinking: bool | None = None,
        *,
        loop_guard: bool = False,
        system_prompt: str | None = None,  # of chats that have none
        min_priority: int = 0,  # the most urgent that a request may be
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._template = template
        self._metrics = metrics
        self._template_defaults = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._loop_guard = loop_guard
        self._system_prompt = system_prompt
        self._min_priority = min_priority
        self._counting = asyncio.Semaphore(MAX_COUNTS)
        self._dialect = dialect_of(template.source)
        self._thought = Thought(None)
        if self._dialect.thinking is not None:
            closing_ids = tuple(tokenizer.encode(self._dialect.thinking.forced_end))
            self._thought = Thought(tokenizer.id_of(self._dialect.thinking.end), closing_ids=closing_ids)

    async def stream_chat(self, request_id: str, chat: ChatRequest, deliver: Deliver) -> TextStream:
        asked_at = time.monotonic()
        info = self._require_place(chat)
        # In a thread: the template waits for its own process, a long text takes the tokenizer a while, and
        # so does a grammar.
        try:
            prompt = await asyncio.to_thread(self._prepare_chat, chat)
            sampling = prompt.sampling
            if chat.is_cut_to_context:
                sampling = _cut_to_context(sampling, info.max_model_len - len(prompt.token_ids))
            requests = self._build_requests(request_id, [prompt.token_ids], sampling, info, chat)
        except RequestError as error:
            if error.param == "prompt":  # a chat has messages
                error.param = "messages"
            raise
        stream = TextStream(self._client, deliver)
        thought = replace(self._thought, budget=chat.thinking_budget)

        def reply_to(request: Request, index: int) -> Reply:
            parser = StreamParser(
                self._dialect, chat.tools, in_thinking=prompt.is_thinking, parses_tools=bool(chat.tools)
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
            )

        return _submit(stream, requests, reply_to)

    async def stream_completion(
        self, request_id: str, completion: CompletionRequest, deliver: Deliver
    ) -> TextStream:
        asked_at = time.monotonic()
        info = self._require_place(completion)
        prompts = await asyncio.to_thread(self._encode_prompts, completion)
        requests = self._build_requests(request_id, prompts, completion.sampling, info, completion)
        echoes = [self._as_text(prompt) if completion.echo else "" for prompt in completion.prompts]
        stream = TextStream(self._client, deliver)

        def reply_to(request: Request, index: int) -> Reply:
            echo = echoes[index // completion.sampling.n]
            guard = self._guard(completion)
            return self._reply(stream, request, index, PlainText(), asked_at, echo=echo, loop_guard=guard)

        return _submit(stream, requests, reply_to)

    def _require_place(self, asked: TextRequest) -> EngineInfo:
        """Raises why the request would not be taken, before it costs anything."""
        require_priority(asked.priority, self._min_priority)
        return self._client.require_ready(asked.tenant)

    async def tokenize(self, asked: TokenizeRequest, tenant: str) -> list[int]:
        async with self._counting:
            return await asyncio.to_thread(self._tokenize, asked, tenant)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    async def detokenize(self, token_ids: list[int]) -> str:
        check_ids("tokens", token_ids, self._tokenizer.vocab_size)
        return await asyncio.to_thread(self._tokenizer.decode, token_ids, False)

    def _tokenize(self, asked: TokenizeRequest, tenant: str) -> list[int]:
        chat = asked.chat
        if chat is None:
            return self._tokenizer.encode(asked.text, asked.add_special_tokens, tenant)
        num_chars = _num_chars([chat.messages, chat.tools])
        if num_chars > MAX_CHARS_ASKED:
            raise RequestError(
                "the messages are too long to be tokenized",
                f"They and the tools have {num_chars} characters; at most {MAX_CHARS_ASKED} are taken.",
                "Send them in parts.",
                param="messages",
            )
        text = self._render(chat, asked.add_generation_prompt)
        return self._tokenizer.encode(text + chat.reply_start, False, tenant)

    def _prepare_chat(self, chat: ChatRequest) -> _ChatPrompt:
        text = self._render(chat)
        thinking = self._dialect.thinking
        is_thinking = thinking is not None and thinking.is_open_after(text)
        if is_thinking and chat.reply_start:
            raise RequestError(
                "The last message is the assistant's, and cannot be continued",
                "The reply begins with a thought, which comes before those words.",
                "Turn thinking off, or end the messages with a user's.",
                param="messages",
            )
        grammar = grammar_of(chat, self._dialect, self._tokenizer, is_thinking)
        sampling = chat.sampling
        if grammar is not None:
            starts_after = (self._require_thought_end(chat),) if is_thinking else ()
            sampling = replace(sampling, grammar=grammar, grammar_starts_after=starts_after)
        token_ids = self._encode(text + chat.reply_start, False, chat.tenant)
        return _ChatPrompt(token_ids, sampling, is_thinking)

    def _require_thought_end(self, chat: ChatRequest) -> int:
        if self._thought.end_id is None:
            raise RequestError(
                "A reply that begins with a thought cannot be held to a form here",
                "The model has no token that ends a thought.",
                "Turn thinking off.",
                param=form_param(chat),
            )
        return self._thought.end_id

    def _render(self, chat: ChatRequest, add_generation_prompt: bool = True) -> str:
        arguments: dict[str, Any] = {**self._template_defaults, **chat.template_arguments}
        messages = with_system_prompt(chat.messages, self._system_prompt)
        return self._template.render(messages, chat.tools, add_generation_prompt, **arguments)

    def _encode_prompts(self, asked: CompletionRequest) -> list[list[int]]:
        return [
            self._encode(prompt, True, asked.tenant) if isinstance(prompt, str) else prompt
            for prompt in asked.prompts
        ]

    def _encode(self, text: str, add_special_tokens: bool, tenant: str) -> list[int]:
        """Judges a text that is far too long by its beginning: to count all of it could take a minute."""
        max_model_len = self._client.require_ready(tenant).max_model_len
        beginning = text[: LONG_TOKEN * max_model_len]
        if len(beginning) < len(text):
            num_tokens = len(self._tokenizer.encode(beginning, add_special_tokens, tenant))
            if num_tokens > max_model_len:
                raise ContextLengthError(
                    f"the prompt is too long: more than {num_tokens} tokens > {max_model_len - 1} maximum",
                    f"The context holds {max_model_len} tokens; the text has {len(text)} characters.",
                    SHORTEN,
                    param="prompt",
                )
        return self._tokenizer.encode(text, add_special_tokens, tenant)

    def _as_text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _build_requests(
        self,
        request_id: str,
        prompts: list[list[int]],
        sampling: SamplingParams,
        info: EngineInfo,
        asked: TextRequest,
    ) -> list[list[Request]]:
        """The requests of each prompt, with ids that tell them apart."""
        ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
        return [
            build_requests(
                id,
                token_ids,
                sampling,
                self._tokenizer,
                info.max_model_len,
                priority=asked.priority,
                session_id=asked.session_id,
                tenant=asked.tenant,
            )
            for id, token_ids in zip(ids, prompts)
        ]

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
    """As many tokens as were asked for or as fit. Where none does, the prompt is refused for its length."""
    if sampling.max_tokens is None:
        return sampling
    return replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room)))


def _num_chars(value: Any) -> int:
    """Of all texts in a JSON value."""
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


def _submit(
    stream: TextStream, prompts: list[list[Request]], reply_to: Callable[[Request, int], Reply]
) -> TextStream:
    indices = itertools.count()
    stream.submit([[reply_to(request, next(indices)) for request in requests] for requests in prompts])
    return stream
