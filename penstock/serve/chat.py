"""From a parsed request to a stream of text: template, tokens, engine, and back to text.

Owns the tokenizer, the chat template and the decoding of replies: stop strings end a reply here, not in the
engine. Knows no HTTP and no schema: openai.py stands in front of it, replies.py behind.

What is counted: the tokens of the reply but not the end token, which has no text, so that a client that
tokenises the text again comes to the same `completion_tokens`. Tokens that completed a stop string are
counted. A prompt is counted once, however many replies it gets.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec

from penstock.errors import EngineDeadError, PenstockError, RequestError
from penstock.serve.client import EngineClient
from penstock.serve.metrics import Metrics, TokenTimer
from penstock.serve.openai import ChatRequest, CompletionRequest
from penstock.text.prompt import build_requests
from penstock.text.stream import StreamDecoder
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.types import EngineInfo, FinishReason, Request, SamplingParams, TokenDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token as its bytes, with its log-probability and the likeliest ones at its place."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


# Made for every token; a dataclass would take six times as long.
class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """News of one reply: text that was added and, at the end, why it ended."""

    index: int
    text: str = ""
    logprobs: tuple[ScoredToken, ...] = ()
    finish: FinishReason | None = None


Deliver = Callable[[TextDelta], None]


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


class TextStream:
    """All replies to one call; a context that aborts on leaving whatever still runs.

    Text goes to `deliver` while the engine's message is being read. Whoever opened the stream is woken only
    by the first text and by the end.
    """

    def __init__(self, client: EngineClient, deliver: Deliver) -> None:
        self._client = client
        self._deliver = deliver
        self._prompts: list[list[_Reply]] = []
        self._open: set[str] = set()
        self._failure: Exception | None = None
        self._started = asyncio.Event()
        self._ended = asyncio.Event()

    def submit(self, prompts: list[list[_Reply]]) -> None:
        receivers = [(reply.request, reply) for replies in prompts for reply in replies]
        self._client.submit(receivers)
        self._prompts = prompts
        self._open = {request.id for request, _ in receivers}

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()

    async def wait_started(self) -> None:
        """Until there is text; raises what keeps it from coming."""
        await self._started.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_ended(self) -> None:
        """Until every reply has ended; raises why one did not."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def take(self, request_id: str, delta: TextDelta) -> None:
        if not (delta.text or delta.logprobs or delta.finish is not None):
            return
        self._deliver(delta)
        self._started.set()
        if delta.finish is not None:
            self._client.abort(request_id)  # a stop string is seen here before the engine knows
            self._open.discard(request_id)
            if not self._open:
                self._ended.set()

    def fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._started.set()
            self._ended.set()
            self._abort()

    def _abort(self) -> None:
        for request_id in self._open:
            self._client.abort(request_id)

    @property
    def usage(self) -> Usage:
        """So far. Replies to one prompt share its tokens; what the first found cached is what it saved."""
        return Usage(
            num_prompt_tokens=sum(len(replies[0].request.token_ids) for replies in self._prompts),
            num_completion_tokens=sum(reply.num_tokens for replies in self._prompts for reply in replies),
            num_cached_tokens=sum(replies[0].num_cached_tokens for replies in self._prompts),
        )


class _Reply:
    """One reply: receives the tokens of its request and gives their text to the stream."""

    def __init__(
        self,
        stream: TextStream,
        request: Request,
        index: int,
        tokenizer: Tokenizer,
        timer: TokenTimer,
        echo: str,  # what comes before its text
    ) -> None:
        self.request = request
        self.num_cached_tokens = 0
        self._stream = stream
        self._index = index
        self._tokenizer = tokenizer
        self._timer = timer
        self._echo = echo
        self._decoder = StreamDecoder(tokenizer, request.sampling.stop, request.sampling.min_tokens)

    @property
    def num_tokens(self) -> int:
        return self._decoder.num_tokens

    def take(self, delta: TokenDelta) -> None:
        token_ids, finish = delta.token_ids, delta.finish
        if finish is not None:
            if finish == "error":
                raise PenstockError("The engine could not finish the reply", delta.error or "")
            if finish == "abort":
                raise EngineDeadError("The engine gave the reply up", delta.error or "")
            if finish == "stop" and token_ids and token_ids[-1] in self.request.end_token_ids:
                token_ids = token_ids[:-1]
        self._timer.count(len(delta.token_ids))
        self.num_cached_tokens = delta.num_cached_tokens
        num_before = self.num_tokens
        text = self._decoder.push(token_ids)
        if self._echo:
            text, self._echo = self._echo + text, ""
        if self._decoder.stopped:
            finish = "stop"
        elif finish is not None:
            text += self._decoder.finish()
        scored = delta.logprobs[: self.num_tokens - num_before]
        self._stream.take(self.request.id, TextDelta(self._index, text, self._score(scored), finish))

    def fail(self, error: Exception) -> None:
        self._stream.fail(error)

    def _score(self, logprobs: tuple[TokenLogprob, ...]) -> tuple[ScoredToken, ...]:
        bytes_of = self._tokenizer.token_bytes
        return tuple(
            ScoredToken(
                bytes_of(token.token_id),
                token.logprob,
                tuple((bytes_of(token_id), logprob) for token_id, logprob in token.top),
            )
            for token in logprobs
        )


class TextEngine:
    """An engine that is spoken to in text."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        metrics: Metrics,
        enable_thinking: bool | None = None,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._template = template
        self._metrics = metrics
        self._template_defaults = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    async def stream_chat(self, request_id: str, chat: ChatRequest, deliver: Deliver) -> TextStream:
        asked_at = time.monotonic()
        info = self._client.require_ready()
        # In a thread: the template waits for its own process, and a long text takes the tokenizer a while.
        token_ids = await asyncio.to_thread(self._encode_chat, chat)
        try:
            requests = self._build_requests(request_id, [token_ids], chat.sampling, info)
        except RequestError as error:
            if error.param == "prompt":  # a chat has messages
                error.param = "messages"
            raise
        return self._submit(requests, [""], deliver, asked_at)

    async def stream_completion(
        self, request_id: str, completion: CompletionRequest, deliver: Deliver
    ) -> TextStream:
        asked_at = time.monotonic()
        info = self._client.require_ready()
        prompts = await asyncio.to_thread(self._encode_prompts, completion.prompts)
        requests = self._build_requests(request_id, prompts, completion.sampling, info)
        echoes = [self._as_text(prompt) if completion.echo else "" for prompt in completion.prompts]
        return self._submit(requests, echoes, deliver, asked_at)

    def _encode_chat(self, chat: ChatRequest) -> list[int]:
        arguments: dict[str, Any] = {**self._template_defaults, **chat.template_arguments}
        text = self._template.render(chat.messages, tools=chat.tools, **arguments)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode_prompts(self, prompts: list[str | list[int]]) -> list[list[int]]:
        encode = self._tokenizer.encode
        return [encode(prompt, True) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _as_text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _build_requests(
        self, request_id: str, prompts: list[list[int]], sampling: SamplingParams, info: EngineInfo
    ) -> list[list[Request]]:
        """The requests of each prompt, with ids that tell them apart."""
        ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
        return [
            build_requests(id, token_ids, sampling, self._tokenizer, info.max_model_len)
            for id, token_ids in zip(ids, prompts)
        ]

    def _submit(
        self, prompts: list[list[Request]], echoes: list[str], deliver: Deliver, asked_at: float
    ) -> TextStream:
        stream = TextStream(self._client, deliver)
        indices = itertools.count()

        def reply_to(request: Request, echo: str) -> _Reply:
            timer = TokenTimer(self._metrics, len(request.token_ids), asked_at)
            return _Reply(stream, request, next(indices), self._tokenizer, timer, echo)

        stream.submit(
            [[reply_to(request, echo) for request in requests] for requests, echo in zip(prompts, echoes)]
        )
        return stream
