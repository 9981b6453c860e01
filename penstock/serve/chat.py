"""From a parsed request to a stream of text: template, tokens, engine, and back to text.

Owns the tokenizer, the chat template and the decoding of replies: stop strings end a reply here, not in the
engine. Knows no HTTP and no schema: openai.py stands in front of it, replies.py behind.

What is counted: the tokens of the reply but not the end token, which has no text, so that a client that
tokenises the text again comes to the same `completion_tokens`. Tokens that completed a stop string are
counted. A prompt is counted once, however many replies it gets.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from penstock.errors import EngineDeadError, PenstockError, RequestError
from penstock.serve.client import EngineClient, TokenStream
from penstock.serve.openai import ChatRequest, CompletionRequest
from penstock.text.prompt import build_requests
from penstock.text.stream import StreamDecoder
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.types import EngineInfo, FinishReason, Request, SamplingParams, TokenDelta, TokenLogprob

# Longer texts are tokenised in a thread: at about 1 MB/s they would hold up every other stream.
MAX_INLINE_CHARS = 16_384


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token as its bytes, with its log-probability and the likeliest ones at its place."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """News of one reply: text that was added and, at the end, why it ended."""

    index: int
    text: str = ""
    logprobs: tuple[ScoredToken, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


class _Reply:
    """One reply on its way from tokens to text."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer, echo: str) -> None:
        self.request = request
        self.index = index
        self.finish: FinishReason | None = None
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self._tokenizer = tokenizer
        self._echo = echo
        self._decoder = StreamDecoder(tokenizer, request.sampling.stop, request.sampling.min_tokens)

    def take(self, delta: TokenDelta) -> TextDelta:
        if delta.finish == "error":
            raise PenstockError("The engine could not finish the reply", delta.error or "")
        if delta.finish == "abort":
            raise EngineDeadError("The engine gave the reply up", delta.error or "")
        token_ids = delta.token_ids
        if delta.finish == "stop" and token_ids and token_ids[-1] in self.request.end_token_ids:
            token_ids = token_ids[:-1]
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        text = self._echo + self._decoder.push(token_ids)
        self._echo = ""
        num_before, self.num_tokens = self.num_tokens, self.num_tokens + len(token_ids)
        self.finish = delta.finish
        if self._decoder.stopped:
            self.finish = "stop"
            self.num_tokens = self._decoder.num_tokens
        elif self.finish is not None:
            text += self._decoder.finish()
        scored = delta.logprobs[: self.num_tokens - num_before]
        return TextDelta(self.index, text, tuple(map(self._score, scored)), self.finish)

    def _score(self, logprob: TokenLogprob) -> ScoredToken:
        token_bytes = self._tokenizer.token_bytes
        top = tuple((token_bytes(token_id), value) for token_id, value in logprob.top)
        return ScoredToken(token_bytes(logprob.token_id), logprob.logprob, top)


class TextStream:
    """The text of one or several replies as it comes; a context that aborts what still runs on leaving."""

    def __init__(self, tokens: TokenStream, prompts: list[list[_Reply]]) -> None:
        self._tokens = tokens
        self._prompts = prompts
        self._replies = {reply.request.id: reply for replies in prompts for reply in replies}

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens.close()

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> TextDelta:
        while True:
            delta = await anext(self._tokens)
            reply = self._replies[delta.request_id]
            if reply.finish is not None:  # tokens that were on their way when a stop string was seen
                continue
            news = reply.take(delta)
            if news.finish is not None:
                self._tokens.abort(delta.request_id)
            if news.text or news.logprobs or news.finish is not None:
                return news

    @property
    def usage(self) -> Usage:
        """So far. Replies to one prompt share its tokens; what the first found cached is what it saved."""
        return Usage(
            num_prompt_tokens=sum(len(replies[0].request.token_ids) for replies in self._prompts),
            num_completion_tokens=sum(reply.num_tokens for reply in self._replies.values()),
            num_cached_tokens=sum(replies[0].num_cached_tokens for replies in self._prompts),
        )


class TextEngine:
    """An engine that is spoken to in text."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        enable_thinking: bool | None = None,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._template = template
        self._template_defaults = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    async def stream_chat(self, request_id: str, chat: ChatRequest) -> TextStream:
        info = self._client.require_ready()
        arguments: dict[str, Any] = {**self._template_defaults, **chat.template_arguments}
        # In a thread: it waits for the template's own process, which may take its time.
        text = await asyncio.to_thread(self._template.render, chat.messages, tools=chat.tools, **arguments)
        token_ids = await self._encode(text, add_special_tokens=False)
        try:
            return self._submit(request_id, [token_ids], chat.sampling, info)
        except RequestError as error:
            if error.param == "prompt":  # a chat has messages
                error.param = "messages"
            raise

    async def stream_completion(self, request_id: str, completion: CompletionRequest) -> TextStream:
        info = self._client.require_ready()
        prompts = [
            await self._encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
            for prompt in completion.prompts
        ]
        echoes = completion.prompts if completion.echo else None
        return self._submit(request_id, prompts, completion.sampling, info, echoes)

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= MAX_INLINE_CHARS:
            return self._tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens)

    def _submit(
        self,
        request_id: str,
        prompts: list[list[int]],
        sampling: SamplingParams,
        info: EngineInfo,
        echoes: list[str | list[int]] | None = None,  # prompts to repeat before their replies
    ) -> TextStream:
        replies: list[list[_Reply]] = []
        for number, token_ids in enumerate(prompts):
            own_id = request_id if len(prompts) == 1 else f"{request_id}-{number}"
            requests = build_requests(own_id, token_ids, sampling, self._tokenizer, info.max_model_len)
            echo = "" if echoes is None else self._as_text(echoes[number])
            indices = range(number * len(requests), (number + 1) * len(requests))
            replies.append([_Reply(r, index, self._tokenizer, echo) for index, r in zip(indices, requests)])
        tokens = self._client.submit(*(reply.request for group in replies for reply in group))
        return TextStream(tokens, replies)

    def _as_text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
