"""The offline API: text in, text out, in this process.

llm = LLM("path/to/model")
for completion in llm.generate(["One", "Two"], SamplingParams(max_tokens=16)):
    print(completion.text)
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from penstock.config import EngineConfig, from_mapping
from penstock.engine.engine import Engine
from penstock.errors import PenstockError, RequestError
from penstock.models.source import find_model
from penstock.progress import OnPhase, Phase, PhaseList, timed
from penstock.text.chat_prompt import ChatEncoder
from penstock.text.generation_config import checkpoint_sampling
from penstock.text.pooling import VectorRules, VectorText
from penstock.text.prompt import build_pooling_request, build_requests, truncated
from penstock.text.stream import StreamDecoder
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.types import FinishReason, Pooling, Request, SamplingParams, TokenDelta, TokenLogprob

Prompt = str | Sequence[int]
Conversation = Sequence[dict[str, Any]]  # its messages

OFFLINE = {"bulk_share": 1.0}  # no interactive readers: all requests are equal
PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    token_ids: tuple[int, ...]  # with the end token, which has no text
    finish: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None  # the reason if finish is "error"


@dataclass(slots=True)
class _Reply:
    """One request: what has been decoded, and what the caller has not read yet."""

    request: Request
    decoder: StreamDecoder
    text: str = ""
    unread: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    error: str | None = None

    def take(self, delta: TokenDelta) -> None:
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        shown = delta.token_ids
        if delta.finish == "stop" and shown and shown[-1] in self.request.end_token_ids:
            shown = shown if self.decoder.shows_end(shown[-1]) else shown[:-1]
        text = self.decoder.push(shown)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish, self.error = delta.finish, delta.error
        if self.decoder.stopped:
            self.finish = "stop"
            del self.token_ids[self.decoder.num_tokens :]
            del self.logprobs[self.decoder.num_tokens :]
        elif self.finish is not None:
            text += self.decoder.finish()
        self.text += text
        self.unread += text

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish=self.finish,
            num_prompt_tokens=len(self.request.token_ids),
            num_cached_tokens=self.num_cached_tokens,
            logprobs=tuple(self.logprobs),
            error=self.error,
        )


class LLM:
    def __init__(
        self,
        model: str = "",
        *,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        allow_special_tokens_in_content: bool = False,
        generation_config: str = "auto",
        on_phase: OnPhase = lambda _: None,
        **settings: Any,
    ) -> None:
        """`model`: a folder, a GGUF file, a preset (with random_weights=True) or, if empty, the
        embedded one.

        `chat_template` is a file that replaces the model's own; `generation_config` (auto, off, a
        file or a folder) sets the sampling defaults of calls without `SamplingParams`; `settings`
        are the fields of `EngineConfig`.
        """
        config: EngineConfig = from_mapping(EngineConfig, {**OFFLINE, "model": model, **settings})
        source = find_model(model)
        self.sampling_defaults = checkpoint_sampling(generation_config, source.path)
        self.tokenizer = Tokenizer.load(tokenizer or source.path)
        self.template = ChatTemplate.load(tokenizer or source.path, chat_template)
        self.chat_encoder = ChatEncoder(
            self.template, self.tokenizer, allow_special_tokens_in_content
        )
        rules = VectorRules.load(source.path, config.pooling)
        self.vector_text = VectorText(
            self.tokenizer, self.template, rules, config.scoring, config.score_prompt
        )
        self.engine = Engine.from_source(source, config, on_phase, tokenizer)
        self._replies: dict[str, _Reply] = {}
        self._vectors: dict[str, bytes] = {}  # by the ids of requests that a call waits for
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """One completion per prompt, in their order; with n > 1, n completions for each prompt.

        `progress` shows how many are done: a bar on a terminal, a line every few seconds in a log.
        """
        alone = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: Sequence[Any] = [prompts] if alone else prompts
        encoded = [self._encode(prompt) for prompt in many]
        return self._generate(encoded, sampling, continues_text=True, progress=progress)

    def _generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | None,
        *,
        continues_text: bool,
        progress: bool,
    ) -> list[Completion]:
        replies = [
            reply for prompt in prompts for reply in self._prepare(prompt, sampling, continues_text)
        ]
        try:
            self._submit(replies)
            if progress:
                with PhaseList() as phases, timed("generate", phases) as report:
                    self._finish(replies, report)
            else:
                self._finish(replies, lambda _: None)
            return [reply.completion() for reply in replies]
        finally:
            self._forget(replies)

    def _finish(self, replies: list[_Reply], report: OnPhase) -> None:
        """Steps until all replies are complete."""
        started = reported = time.perf_counter()
        while any(reply.finish is None for reply in replies):
            self._step()
            if (now := time.perf_counter()) - reported >= PROGRESS_INTERVAL_S:
                reported = now
                report(_progress_of(replies, now - started))
        report(_progress_of(replies, time.perf_counter() - started))

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        *,
        progress: bool = False,
        **template_kwargs: Any,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling: SamplingParams | None = None,
        *,
        progress: bool = False,
        **template_kwargs: Any,
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | None = None,
        *,
        progress: bool = False,
        **template_kwargs: Any,
    ) -> Completion | list[Completion]:
        """The reply to a conversation, or the list of replies to a list of conversations.

        A list is batched; with n > 1 it has n replies to each conversation.
        """
        conversations, alone = _conversations(messages)
        if alone:
            _expect_one(
                sampling, "Call chat([messages], ...): a list gives n completions of each item."
            )
        prompts = [
            self.encode_chat(conversation, **template_kwargs) for conversation in conversations
        ]
        completions = self._generate(prompts, sampling, continues_text=False, progress=progress)
        return completions[0] if alone else completions

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        normalize: bool | None = None,  # None: what the checkpoint's configuration says
        dimensions: int | None = None,
    ) -> list[list[float]]:
        """One embedding per text, in their order."""
        alone = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
        many: Sequence[Any] = [texts] if alone else texts
        encode, rules = self.vector_text.encode, self.vector_text.rules.pooling
        prompts = [
            encode(text, prompt_name) if isinstance(text, str) else list(text) for text in many
        ]
        normalize = rules.normalize if normalize is None else normalize
        pooling = Pooling(kind=rules.kind, normalize=normalize, dimensions=dimensions)
        return [array("f", vector).tolist() for vector in self._pool(prompts, pooling)]

    def score(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None
    ) -> list[float]:
        """How relevant each document is to the query, as in /v1/rerank."""
        text, info = self.vector_text, self.engine.info
        pairs = [(query, document) for document in documents]
        prompts, scores = text.encode_pairs(pairs, info, instruction)
        vectors = enumerate(self._pool(prompts, text.score_pooling(info)))
        found = dict(pair for place, vector in vectors for pair in scores.take(place, vector))
        return [found[number] for number in range(len(pairs))]

    def _pool(self, prompts: list[list[int]], pooling: Pooling) -> list[bytes]:
        max_model_len = self.engine.info.max_model_len
        requests = [
            build_pooling_request(
                f"llm-{next(self._ids)}", prompt, pooling, self.tokenizer, max_model_len
            )
            for prompt in prompts
        ]
        ids = [request.id for request in requests]
        try:
            for request in requests:
                self.engine.submit(request)
            while not self._vectors.keys() >= set(ids):
                self._step()
            return [self._vectors[id] for id in ids]
        finally:
            for id in ids:
                if self._vectors.pop(id, None) is None:
                    self.engine.abort(id)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """Pieces of text as they are generated. Leaving the loop early stops the request."""
        return self._stream(self._encode(prompt), sampling, continues_text=True)

    def _stream(
        self, prompt: list[int], sampling: SamplingParams | None, *, continues_text: bool
    ) -> Generator[str, None, None]:
        _expect_one(sampling, "Use generate or chat, or start one stream after the other.")
        (reply,) = replies = self._prepare(prompt, sampling, continues_text)
        try:
            self._submit(replies)
            while reply.finish is None:
                self._step()
                text, reply.unread = reply.unread, ""
                if text:
                    yield text
            if reply.unread:
                yield reply.unread
            if reply.finish == "error":
                raise PenstockError(
                    "The reply ended with an error", reply.error or "The engine gave no reason."
                )
        finally:
            self._forget(replies)

    def stream_chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **template_kwargs: Any
    ) -> Generator[str, None, None]:
        prompt = self.encode_chat(messages, **template_kwargs)
        return self._stream(prompt, sampling, continues_text=False)

    def encode_chat(
        self,
        messages: Conversation,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Control tokens in the messages are text, unless `allow_special_tokens_in_content` is
        set.
        """
        chat = self.chat_encoder.render(messages, tools, add_generation_prompt, variables=variables)
        return self.chat_encoder.encode(chat)

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt, True) if isinstance(prompt, str) else list(prompt)

    def _prepare(
        self, token_ids: list[int], sampling: SamplingParams | None, continues_text: bool
    ) -> list[_Reply]:
        """`sampling.n` replies to a prompt. Raises an error for an invalid prompt, and submits
        nothing.
        """
        sampling = sampling or SamplingParams(**self.sampling_defaults)
        token_ids = truncated(token_ids, sampling, self.engine.info.max_model_len)
        continues_text = continues_text and self.tokenizer.has_text(token_ids)
        requests = build_requests(
            f"llm-{next(self._ids)}",
            token_ids,
            sampling,
            self.tokenizer,
            self.engine.info.max_model_len,
        )
        return [
            _Reply(request, StreamDecoder.of(self.tokenizer, sampling, continues_text))
            for request in requests
        ]

    def _submit(self, replies: Iterable[_Reply]) -> None:
        for reply in replies:
            self.engine.submit(reply.request)
            self._replies[reply.request.id] = reply

    def _step(self) -> None:
        for delta in self.engine.step():
            if delta.vector is not None:
                self._vectors[delta.request_id] = delta.vector
            reply = self._replies.get(delta.request_id)
            if reply is None or reply.finish is not None:
                continue
            reply.take(delta)
            if reply.decoder.stopped:
                self.engine.abort(delta.request_id)

    def _forget(self, replies: Iterable[_Reply]) -> None:
        """Stops those that are not complete."""
        for reply in replies:
            if self._replies.pop(reply.request.id, None) and reply.finish is None:
                self.engine.abort(reply.request.id)


def _progress_of(replies: list[_Reply], seconds: float) -> Phase:
    num_done = sum(reply.finish is not None for reply in replies)
    num_tokens = sum(len(reply.token_ids) for reply in replies)
    detail = f"{num_done} of {len(replies)} replies, {num_tokens:,} tokens"
    if seconds > 0:
        detail += f", {num_tokens / seconds:,.0f} tok/s"
    return Phase("generate", detail, num_done / max(len(replies), 1))


def _expect_one(sampling: SamplingParams | None, todo: str) -> None:
    if sampling is not None and sampling.n > 1:
        raise RequestError(
            f"n is {sampling.n}", "This call returns one completion.", todo, param="n"
        )


def _conversations(
    messages: Conversation | Sequence[Conversation],
) -> tuple[list[Conversation], bool]:
    """What `chat` received, as a list, and whether it was a single conversation."""
    if not _is_list(messages):
        raise _no_conversation("messages", messages)
    items: list[Any] = list(messages)
    if all(isinstance(item, Mapping) for item in items):
        return [items], True
    for index, item in enumerate(items):
        if not _is_list(item):
            raise _no_conversation(f"messages[{index}]", item)
    return items, False


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _no_conversation(name: str, value: object) -> RequestError:
    return RequestError(
        f"{name} is a {type(value).__name__}",
        "A conversation is a list of messages, and a message is a dict with role and content; "
        "several conversations are a list of such lists.",
        'Pass [{"role": "user", "content": "..."}], or a list of these.',
        param="messages",
    )
