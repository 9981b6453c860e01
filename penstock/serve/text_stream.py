"""Replies while they are generated: an engine's tokens become text, and the text becomes deltas.

Stop strings end a reply here, not in the engine. A thinking budget ends thinking, and so does a
loop in it: the model's own closing text is added. At a budget an engine that can appends the same
tokens, and the reply goes on in its row. Otherwise another engine request continues the reply after
that text, with the same place in the queue. If `max_tokens` leaves no room for an answer after
that, thinking runs until the limit. Knows no HTTP and no schema.

Usage counts the tokens of a reply except the end token, which has no text, so that a client that
tokenises the text again gets the same `completion_tokens`. Tokens that completed a stop string
count, and so do those that closed thinking. A prompt counts once, however many replies it gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from penstock.errors import EngineDeadError, PenstockError, RequestError
from penstock.serve.client import Receiver
from penstock.serve.fleet import Fleet
from penstock.serve.intake import Place
from penstock.serve.metrics import TokenTimer
from penstock.serve.openai.output_options import PLAIN_OUTPUT, OutputOptions
from penstock.text.dialects import ContentDelta, Delta, ReasoningDelta, ReplyEnd, ToolCallEnd
from penstock.text.loop_guard import LoopGuard
from penstock.text.stream import StreamDecoder
from penstock.text.tokenizer import Tokenizer
from penstock.types import (
    FinishReason,
    PromptScores,
    Request,
    ThoughtLimit,
    TokenDelta,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token as bytes, with its log-probability and the likeliest tokens at its position."""

    data: bytes
    logprob: float | None  # None: it is the first of a prompt, so nothing predicts it
    top: tuple[tuple[bytes, float], ...]
    token_id: int = -1
    top_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int


class ReplyExtra(msgspec.Struct, frozen=True, gc=False):
    """Rarely requested output besides the text (`OutputOptions`)."""

    token_ids: tuple[int, ...] = ()  # including the one that ended the reply
    prompt_token_ids: tuple[int, ...] = ()  # with the first delta
    prompt_scores: tuple[ScoredToken, ...] = ()
    usage: Usage | None = None  # this reply's, so far


# Created for every token; a dataclass would take six times as long.
class ReplyDelta(msgspec.Struct, frozen=True, gc=False):
    """A change of one reply; the last delta of its last change is a `ReplyEnd`."""

    index: int
    deltas: list[Delta]
    logprobs: tuple[ScoredToken, ...] = ()
    is_prompt: bool = False  # it has the echo or scores of the prompt, which may be large
    extra: ReplyExtra | None = None


Deliver = Callable[[ReplyDelta], None]


def without_thoughts(deliver: Deliver) -> Deliver:
    """Drops the reasoning, for clients that do not want to see it."""

    def deliver_rest(delta: ReplyDelta) -> None:
        deltas = [piece for piece in delta.deltas if not isinstance(piece, ReasoningDelta)]
        if deltas or delta.logprobs or delta.extra is not None:
            deliver(msgspec.structs.replace(delta, deltas=deltas))

    return deliver_rest


class Parser(Protocol):
    """Turns a reply's text into deltas, as `StreamParser` does."""

    @property
    def is_thinking(self) -> bool: ...

    def feed(self, text: str) -> list[Delta]: ...

    def close(self, finish: FinishReason) -> list[Delta]: ...


class PlainText:
    """The parser of completions: all text is content."""

    is_thinking = False

    def feed(self, text: str) -> list[Delta]:
        return [ContentDelta(text)]

    def close(self, finish: FinishReason) -> list[Delta]:
        return [ReplyEnd(finish)]


@dataclass(frozen=True, slots=True)
class Thought:
    """How thinking ends: by the model's end token or, after its budget, by `closing_ids`."""

    end_id: int | None
    budget: int | None = None
    closing_ids: tuple[int, ...] = ()
    is_stoppable: bool = False  # stop strings end thinking, too

    @property
    def limit(self) -> ThoughtLimit | None:
        """The budget for an engine, which sees only tokens. None: the server alone can keep it."""
        if self.end_id is None or not (self.budget and self.closing_ids):
            return None
        return ThoughtLimit(
            num_tokens=self.budget, end_id=self.end_id, closing_ids=self.closing_ids
        )


class OneReply(Receiver, Protocol):
    """Receives the deltas of one request, and counts its tokens."""

    request: Request
    num_cached_tokens: int
    num_reasoning_tokens: int

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def abandon(self) -> None:
        """Called when the rest of the reply is not needed."""


class TextStream:
    """All replies to one request of a client. As a context manager, aborts what runs at its exit.

    Deltas go to `deliver` while the engine's message is being read. The task that opened the stream
    is woken only by the first delta and by the end.
    """

    def __init__(self, client: Fleet, deliver: Deliver) -> None:
        self._client = client
        self._deliver = deliver
        self._prompts: Sequence[Sequence[OneReply]] = []
        self._open: set[str] = set()
        self._failure: Exception | None = None
        self.started_at: float | None = None  # on the monotonic clock
        self.finish_reasons: list[str] = []  # of ended replies
        self._started = asyncio.Event()
        self._ended = asyncio.Event()

    def submit(
        self,
        prompts: Sequence[Sequence[OneReply]],
        place: Place | None = None,
        max_running: int | None = None,
    ) -> None:
        """`place`: the request's place in the queue. The first `max_running` replies start; each
        one that ends may `go_on` with another."""
        receivers = [(reply.request, reply) for replies in prompts for reply in replies][
            :max_running
        ]
        self._client.submit(receivers, place)
        self._prompts = prompts
        self._open = {request.id for request, _ in receivers}

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._abort()

    async def wait_started(self) -> None:
        """Waits for the first delta; raises the error if there is none."""
        await self._started.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_ended(self) -> None:
        """Waits until every reply has ended; raises the error if one failed."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def take(self, request_id: str, delta: ReplyDelta, has_ended: bool) -> None:
        if not (delta.deltas or delta.logprobs or delta.extra):
            return
        self._deliver(delta)
        if self.started_at is None:
            self.started_at = time.monotonic()
            self._started.set()
        if has_ended:
            self.finish_reasons += [
                end.reason for end in delta.deltas[-1:] if isinstance(end, ReplyEnd)
            ]
            self.end(request_id)

    def end(self, request_id: str) -> None:
        self._client.abort(request_id)  # a stop string is found here before the engine knows
        self._open.discard(request_id)
        if not self._open:
            self._ended.set()

    def go_on(self, request_id: str, request: Request, reply: OneReply) -> None:
        """Replaces an engine request by another one, which continues the reply or the client's
        request."""
        self._client.go_on(request_id, request, reply)
        self._open.discard(request_id)
        self._open.add(request.id)

    def fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._started.set()
            self._ended.set()
            self._abort()

    def _abort(self) -> None:
        for request_id in self._open:
            self._client.abort(request_id)
        for replies in self._prompts:
            for reply in replies:
                reply.abandon()

    @property
    def usage(self) -> Usage:
        """Usage so far. A prompt counts once, with the cached tokens of its first reply."""
        replies = [reply for replies in self._prompts for reply in replies]
        return Usage(
            num_prompt_tokens=sum(replies[0].num_prompt_tokens for replies in self._prompts),
            num_completion_tokens=sum(reply.num_tokens for reply in replies),
            num_cached_tokens=sum(replies[0].num_cached_tokens for replies in self._prompts),
            num_reasoning_tokens=sum(reply.num_reasoning_tokens for reply in replies),
        )

    def usage_of(self, index: int) -> Usage:
        """The usage of one reply."""
        return _usage_of([reply for replies in self._prompts for reply in replies][index])

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the first prompt and its first reply, so far."""
        reply = self._prompts[0][0]
        return reply.num_prompt_tokens + reply.num_tokens


class Reply:
    """One reply: receives the tokens of its request and gives deltas to the stream."""

    def __init__(
        self,
        stream: TextStream,
        request: Request,
        index: int,
        tokenizer: Tokenizer,
        timer: TokenTimer,
        parser: Parser,
        *,
        echo: str = "",  # text before the reply's own
        echoes_scores: bool = False,  # log-probabilities of the echo come before the reply's own
        output: OutputOptions = PLAIN_OUTPUT,
        thought: Thought | None = None,
        ends_after_call: bool = False,
        form_param: str = "",  # the field that set the request's grammar
        loop_guard: LoopGuard | None = None,
        continues_text: bool = False,  # it continues the last text of its prompt
    ) -> None:
        self._thought = thought or Thought(None)
        if parser.is_thinking and self._thought.limit is not None:
            request = replace(request, thought_limit=self._thought.limit)
        self._engine_closes = request.thought_limit is not None  # False again when thinking ends
        self._awaits_closing = False  # only the engine's next tokens tell whether it has closed it
        self._num_taken = 0  # tokens from engines, also those that were dropped
        self.request = request  # the current one
        self._asked = request
        self._began_s = time.monotonic()
        self.num_cached_tokens = 0
        self.num_reasoning_tokens = 0
        self._stream = stream
        self._index = index
        self._tokenizer = tokenizer
        self._timer = timer
        self._parser = parser
        self._echo = echo
        self._echoes_scores = echoes_scores
        self._output = output
        self._tells_extra = not output.is_plain
        self._tells_prompt = output.prompt_logprobs is not None
        self._stop_token_id: int | None = None  # the one of the request that ended the reply
        self._untold_ids: tuple[int, ...] = ()  # ids whose text is held back
        self._has_told_prompt = False
        self._first_scored: tuple[ScoredToken, ...] = ()
        if request.sampling.prompt_logprobs is not None:
            first_id = request.token_ids[0]
            self._first_scored = (ScoredToken(tokenizer.token_bytes(first_id), None, (), first_id),)
        self._spares_thoughts = bool(request.sampling.stop) and not self._thought.is_stoppable
        # Tokens since the request began; kept only if thinking may be closed.
        self._said_ids: list[int] = []
        self._ends_after_call = ends_after_call
        self._form_param = form_param
        self._loop_guard = loop_guard
        self._has_closed_loop = False  # looping thinking was closed; another loop ends the reply
        self._is_loop = False
        self._decoder = StreamDecoder.of(tokenizer, request.sampling, continues_text)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._asked.token_ids)

    @property
    def num_tokens(self) -> int:
        return self._decoder.num_tokens

    def take(self, delta: TokenDelta) -> None:
        self._num_taken += len(delta.token_ids)
        if delta.prompt_scores is not None:
            self._take_scores(delta.prompt_scores)
        elif self._awaits_closing:
            self._take_closing(delta)
        elif self._ends_after_call and len(delta.token_ids) > 1:
            any(map(self._take_tokens, _one_by_one(delta)))  # the call may end before the delta
        else:
            self._take_tokens(delta)

    def _take_tokens(self, delta: TokenDelta) -> bool:
        """Returns whether tokens after these are not part of the reply."""
        request, token_ids, finish = self.request, delta.token_ids, delta.finish
        end_ids: tuple[int, ...] = ()  # what ended the reply, unless that is part of its text
        if finish is not None:
            self._raise_failure(delta)
            if finish == "stop" and token_ids and token_ids[-1] in self.request.end_token_ids:
                self._note_end(token_ids[-1])
                if not self._decoder.shows_end(token_ids[-1]):
                    token_ids, end_ids = token_ids[:-1], token_ids[-1:]
        self._timer.count(len(delta.token_ids))
        if self.request is self._asked:
            self.num_cached_tokens = delta.num_cached_tokens
        num_before = self.num_tokens
        is_loop = (
            finish is None and self._loop_guard is not None and self._loop_guard.push(token_ids)
        )
        is_closed = False  # thinking must be closed
        if self._parser.is_thinking:
            is_last = finish is not None and not end_ids
            token_ids, is_closed = self._think(token_ids, is_last, is_loop)
            finish = None if is_closed else finish
        if self._thought.closing_ids and (
            self._thought.budget is not None or self._loop_guard is not None
        ):
            self._said_ids += token_ids
        text = self._decode(token_ids) if self._spares_thoughts else self._decoder.push(token_ids)
        said_ids = token_ids[: self.num_tokens - num_before]
        # After an echoed prompt the first token has a score even if it only ends the reply: lm-eval
        # drops the last one.
        keeps_end = num_before == 0 and self._echoes_scores
        scored = self._score(delta.logprobs if keeps_end else delta.logprobs[: len(said_ids)])
        echo, first, prompt_scores = self._take_prompt_start()
        text, scored = echo + text, first + scored
        if self._decoder.stopped:
            finish, end_ids = "stop", ()
            self.num_reasoning_tokens = min(self.num_reasoning_tokens, self.num_tokens)
        elif is_closed:
            end_ids = self._thought.closing_ids
            text += self._decode(end_ids)
            if self._decoder.stopped:
                finish = "stop"
            else:
                self._close_thought()
        elif is_loop:
            finish, self._is_loop = "length", True  # as without the guard
            self._timer.count_loop()
        if finish is not None:
            text += self._decoder.finish()
        deltas, has_ended = self._parse(text, finish)
        if has_ended:
            self._timer.end("length" if finish == "length" else "stop")
        elif self._engine_closes and not self._parser.is_thinking:
            self._go_on()  # the engine has not seen the end: it was no token, or it was a call
        extra = None
        if self._tells_extra:
            extra = self._extra(said_ids + end_ids, prompt_scores, is_told=bool(deltas or scored))
        self._stream.take(
            self.request.id, ReplyDelta(self._index, deltas, scored, bool(echo), extra), has_ended
        )
        return has_ended or self.request is not request

    def _note_end(self, token_id: int) -> None:
        """The model's own end token is not reported, even if the client lists it too."""
        sampling = self._asked.sampling
        is_own = sampling.ignore_eos or token_id not in self._tokenizer.eos_token_ids
        self._stop_token_id = token_id if is_own and token_id in sampling.stop_token_ids else None

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        """Stop strings end an answer, not thinking: clients get both separately, and mean the
        answer."""
        decoder, end_id = self._decoder, self._thought.end_id
        if not (self._spares_thoughts and self._parser.is_thinking):
            return decoder.push(token_ids)
        num_thought = token_ids.index(end_id) + 1 if end_id in token_ids else len(token_ids)
        return decoder.push_thought(token_ids[:num_thought]) + decoder.push(token_ids[num_thought:])

    def _extra(
        self, token_ids: tuple[int, ...], prompt_scores: tuple[ScoredToken, ...], *, is_told: bool
    ) -> ReplyExtra | None:
        """`is_told`: this delta is sent anyway. If not, its ids wait for one that is."""
        output = self._output
        self._untold_ids += token_ids if output.returns_token_ids else ()
        if not (is_told or prompt_scores):
            return None
        prompt_ids = (
            () if self._has_told_prompt or not output.returns_token_ids else self._asked.token_ids
        )
        self._has_told_prompt = True
        told_ids, self._untold_ids = self._untold_ids, ()
        usage = _usage_of(self) if output.counts_usage else None
        return ReplyExtra(told_ids, prompt_ids, prompt_scores, usage)

    def _take_scores(self, scores: PromptScores) -> None:
        """Sends scores of the prompt to the client as they come, before the first token."""
        echo, first, prompt_first = self._take_prompt_start()
        scored = self._score(scores.unpack())
        deltas = self._parser.feed(echo) if echo else []
        extra = None
        if self._tells_prompt:
            for_client = prompt_first + _with_top(scored, self._output.prompt_logprobs)
            extra = self._extra((), for_client, is_told=True)
        scored = (
            first + _with_top(scored, self._asked.sampling.logprobs) if self._echoes_scores else ()
        )
        self._stream.take(
            self.request.id,
            ReplyDelta(self._index, deltas, scored, is_prompt=True, extra=extra),
            False,
        )

    def _take_prompt_start(self) -> tuple[str, tuple[ScoredToken, ...], tuple[ScoredToken, ...]]:
        """What is sent first, and only once: the echo, and the prompt's first token, which has no
        score, for the scores of the reply and for those of the prompt."""
        echo, first = self._echo, self._first_scored
        self._echo, self._first_scored = "", ()
        return echo, first if self._echoes_scores else (), first if self._tells_prompt else ()

    def fail(self, error: Exception) -> None:
        self._timer.end("error")
        self._stream.fail(error)

    def abandon(self) -> None:
        self._timer.end("abort")

    def _raise_failure(self, delta: TokenDelta) -> None:
        if delta.finish == "error":
            what, why = "The engine could not finish the reply", delta.error or ""
            if self.request.sampling.grammar is not None:
                raise RequestError(
                    what, why, "Use a simpler schema or grammar.", param=self._form_param
                )
            raise PenstockError(what, why)
        if delta.finish == "abort":
            raise EngineDeadError("The engine aborted the reply", delta.error or "")

    def _parse(self, text: str, finish: FinishReason | None) -> tuple[list[Delta], bool]:
        deltas = self._parser.feed(text) if text else []
        if self._ends_after_call:
            for place, piece in enumerate(deltas):
                if isinstance(piece, ToolCallEnd) and not piece.is_broken:
                    return [*deltas[: place + 1], ReplyEnd("tool_calls")], True
        if finish is not None:
            *rest, end = self._parser.close(finish)
            assert isinstance(end, ReplyEnd)
            ended = ReplyEnd(
                end.reason, self._decoder.stop_string, self._is_loop, self._stop_token_id
            )
            deltas += [*rest, ended]
        return deltas, finish is not None

    def _think(
        self, token_ids: tuple[int, ...], is_last: bool, is_loop: bool
    ) -> tuple[tuple[int, ...], bool]:
        """Counts tokens of thinking; returns the tokens to keep, and whether thinking must be
        closed after them."""
        end_id, budget = self._thought.end_id, self._thought.budget
        has_end = end_id in token_ids
        num_thought = token_ids.index(end_id) + 1 if has_end else len(token_ids)
        if budget is not None:
            num_left = max(0, budget - self.num_reasoning_tokens)
            is_over = num_thought > num_left or (
                0 < num_thought == num_left and not (has_end or is_last)
            )
            if is_over and self._has_room_behind(num_left):
                self.num_reasoning_tokens += num_left
                return token_ids[:num_left], True
        self._engine_closes &= not has_end
        self.num_reasoning_tokens += num_thought
        is_closed = (
            is_loop
            and not (has_end or self._has_closed_loop)
            and self._has_room_behind(len(token_ids))
        )
        self._has_closed_loop |= is_closed
        return token_ids, is_closed

    def _close_thought(self) -> None:
        """The client has the closing text: the engine goes on behind it, or another request."""
        self.num_reasoning_tokens += len(self._thought.closing_ids)
        self._said_ids += self._thought.closing_ids
        if self._loop_guard is not None:
            self._loop_guard = LoopGuard()  # loops of the thinking do not count for the answer
        self._awaits_closing = self._engine_closes and self._num_taken == self._thought.budget
        self._engine_closes = False
        if not self._awaits_closing:
            self._go_on()

    def _take_closing(self, delta: TokenDelta) -> None:
        """The first tokens after the budget: an engine that closes thinking has no others."""
        if delta.finish is not None:
            self._raise_failure(delta)
        self._awaits_closing = False
        if delta.finish is not None or delta.token_ids != self._thought.closing_ids:
            self._go_on()

    def _has_room_behind(self, num_thought: int) -> bool:
        """Whether an answer fits after this many more tokens and the end of thinking."""
        max_tokens = self._asked.sampling.max_tokens
        assert max_tokens is not None
        return self.num_tokens + num_thought + len(self._thought.closing_ids) < max_tokens

    def _go_on(self) -> None:
        """Continues with another request after the thinking."""
        self._stop_token_id = None
        self._engine_closes = False
        closed = self.request
        self.request = replace(
            closed,
            id=f"{closed.id}-answer",
            token_ids=(*closed.token_ids, *self._said_ids),
            num_resumed_tokens=closed.num_resumed_tokens + len(self._said_ids),
            num_scored_tokens=0
            if closed.sampling.prompt_logprobs is None
            else closed.num_prompt_tokens - 1,
            age_s=time.monotonic() - self._began_s,
            thought_limit=None,
        )
        self._said_ids.clear()
        self._stream.go_on(closed.id, self.request, self)

    def _score(self, logprobs: Sequence[TokenLogprob]) -> tuple[ScoredToken, ...]:
        bytes_of = self._tokenizer.token_bytes
        return tuple(
            ScoredToken(
                bytes_of(token.token_id),
                token.logprob,
                tuple((bytes_of(token_id), logprob) for token_id, logprob in token.top),
                token.token_id,
                tuple(token_id for token_id, _ in token.top),
            )
            for token in logprobs
        )


def _one_by_one(delta: TokenDelta) -> Iterator[TokenDelta]:
    """The same tokens, one per delta; the last one has the finish reason."""
    last = len(delta.token_ids) - 1
    for place, token_id in enumerate(delta.token_ids):
        logprobs = delta.logprobs[place : place + 1]
        finish, error = (delta.finish, delta.error) if place == last else (None, None)
        yield TokenDelta(
            delta.request_id, (token_id,), logprobs, finish, delta.num_cached_tokens, error
        )


def _usage_of(reply: OneReply) -> Usage:
    return Usage(
        reply.num_prompt_tokens,
        reply.num_tokens,
        reply.num_cached_tokens,
        reply.num_reasoning_tokens,
    )


def _with_top(tokens: tuple[ScoredToken, ...], num_top: int | None) -> tuple[ScoredToken, ...]:
    """Keeps at most `num_top` alternatives: more may have been computed for another field."""
    if all(len(token.top) == num_top for token in tokens[:1]):
        return tokens
    return tuple(
        replace(token, top=token.top[:num_top], top_ids=token.top_ids[:num_top]) for token in tokens
    )
