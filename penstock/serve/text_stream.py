"""Replies while they are generated: an engine's tokens become text, and the text becomes news of the reply.

Stop strings end a reply here, not in the engine. A thinking budget ends a thought, and so does a loop in it:
the thought is closed in the model's own words, and the reply goes on as a request that resumes it there, in
the place it had. Where `max_tokens` leaves no room for an answer behind it, it is left to that limit. Knows
no HTTP and no schema; it is told what to generate, and tells what came.

What is counted: the tokens of the reply but not the end token, which has no text, so that a client that
tokenises the text again comes to the same `completion_tokens`. Tokens that completed a stop string are
counted, as are those that closed a thought. A prompt is counted once, however many replies it gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import msgspec

from penstock.errors import EngineDeadError, PenstockError, RequestError
from penstock.serve.fleet import Fleet
from penstock.serve.intake import Place
from penstock.serve.metrics import TokenTimer
from penstock.text.dialects import ContentDelta, Delta, ReplyEnd, ToolCallEnd
from penstock.text.loop_guard import LoopGuard
from penstock.text.stream import StreamDecoder
from penstock.text.tokenizer import Tokenizer
from penstock.types import FinishReason, PromptScores, Request, TokenDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token as its bytes, with its log-probability and the likeliest ones at its place."""

    data: bytes
    logprob: float | None  # None: it is the first of a prompt, before which nothing stands
    top: tuple[tuple[bytes, float], ...]


# Made for every token; a dataclass would take six times as long.
class ReplyDelta(msgspec.Struct, frozen=True, gc=False):
    """News of one reply; the last piece of its last delta is a `ReplyEnd`."""

    index: int
    news: list[Delta]
    logprobs: tuple[ScoredToken, ...] = ()
    is_prompt: bool = False  # it has the echo, or scores of it: there is as much as the client has sent


Deliver = Callable[[ReplyDelta], None]


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int


class Parser(Protocol):
    """Makes news of a reply's text, as `StreamParser` does."""

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
    """How a model's thought ends: by the token it writes itself or, after so many tokens, by ours."""

    end_id: int | None
    budget: int | None = None
    closing_ids: tuple[int, ...] = ()


class TextStream:
    """All replies to one call; a context that aborts on leaving whatever still runs.

    News go to `deliver` while the engine's message is being read. Whoever opened the stream is woken only by
    the first of them and by the end.
    """

    def __init__(self, client: Fleet, deliver: Deliver) -> None:
        self._client = client
        self._deliver = deliver
        self._prompts: list[list[Reply]] = []
        self._open: set[str] = set()
        self._failure: Exception | None = None
        self.started_at: float | None = None  # on the monotonic clock
        self.finish_reasons: list[str] = []  # of the replies that have ended
        self._started = asyncio.Event()
        self._ended = asyncio.Event()

    def submit(self, prompts: list[list[Reply]], place: Place | None = None) -> None:
        """`place`: that the call has in the queue."""
        receivers = [(reply.request, reply) for replies in prompts for reply in replies]
        self._client.submit(receivers, place)
        self._prompts = prompts
        self._open = {request.id for request, _ in receivers}

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()

    async def wait_started(self) -> None:
        """Until there is news; raises what keeps it from coming."""
        await self._started.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_ended(self) -> None:
        """Until every reply has ended; raises why one did not."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def take(self, request_id: str, delta: ReplyDelta, has_ended: bool) -> None:
        if not (delta.news or delta.logprobs):
            return
        self._deliver(delta)
        if self.started_at is None:
            self.started_at = time.monotonic()
            self._started.set()
        if has_ended:
            self.finish_reasons += [end.reason for end in delta.news[-1:] if isinstance(end, ReplyEnd)]
            self._client.abort(request_id)  # a stop string is seen here before the engine knows
            self._open.discard(request_id)
            if not self._open:
                self._ended.set()

    def go_on(self, request_id: str, request: Request, reply: Reply) -> None:
        """Continues a reply with another request."""
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
        """So far. Replies to one prompt share its tokens; what the first found cached is what it saved."""
        replies = [reply for replies in self._prompts for reply in replies]
        return Usage(
            num_prompt_tokens=sum(replies[0].num_prompt_tokens for replies in self._prompts),
            num_completion_tokens=sum(reply.num_tokens for reply in replies),
            num_cached_tokens=sum(replies[0].num_cached_tokens for replies in self._prompts),
            num_reasoning_tokens=sum(reply.num_reasoning_tokens for reply in replies),
        )

    @property
    def num_context_tokens(self) -> int:
        """Of the first prompt and its first reply, so far."""
        reply = self._prompts[0][0]
        return reply.num_prompt_tokens + reply.num_tokens


class Reply:
    """One reply: receives the tokens of its request and gives news of them to the stream."""

    def __init__(
        self,
        stream: TextStream,
        request: Request,
        index: int,
        tokenizer: Tokenizer,
        timer: TokenTimer,
        parser: Parser,
        *,
        echo: str = "",  # what comes before its text
        thought: Thought | None = None,
        ends_after_call: bool = False,
        form_param: str = "",  # the field that asked for the request's grammar
        loop_guard: LoopGuard | None = None,
        continues_text: bool = False,  # of its prompt, which is no other's turn
    ) -> None:
        self.request = request  # the one that runs
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
        self._first_scored: tuple[ScoredToken, ...] = ()
        if request.sampling.prompt_logprobs is not None:
            self._first_scored = (ScoredToken(tokenizer.token_bytes(request.token_ids[0]), None, ()),)
        self._thought = thought or Thought(None)
        self._said_ids: list[int] = []  # since the request began; kept only where a thought may be closed
        self._ends_after_call = ends_after_call
        self._form_param = form_param
        self._loop_guard = loop_guard
        self._has_closed_loop = False  # a thought that repeated itself; the next loop ends the reply
        self._is_loop = False
        self._decoder = StreamDecoder(
            tokenizer,
            request.sampling.stop,
            request.sampling.min_tokens,
            continues_text=continues_text,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._asked.token_ids)

    @property
    def num_tokens(self) -> int:
        return self._decoder.num_tokens

    def take(self, delta: TokenDelta) -> None:
        if delta.prompt_scores is not None:
            self._take_scores(delta.prompt_scores)
            return
        token_ids, finish = delta.token_ids, delta.finish
        if finish is not None:
            self._raise_failure(delta)
            if finish == "stop" and token_ids and token_ids[-1] in self.request.end_token_ids:
                token_ids = token_ids[:-1]
        self._timer.count(len(delta.token_ids))
        if self.request is self._asked:
            self.num_cached_tokens = delta.num_cached_tokens
        num_before = self.num_tokens
        is_loop = finish is None and self._loop_guard is not None and self._loop_guard.push(token_ids)
        is_closed = False  # the thought, by us
        if self._parser.is_thinking:
            token_ids, is_closed = self._think(token_ids, finish is not None, is_loop)
            finish = None if is_closed else finish
        if self._thought.closing_ids and (self._thought.budget is not None or self._loop_guard is not None):
            self._said_ids += token_ids
        text = self._decoder.push(token_ids)
        # Behind a scored prompt the first token has a score even if it only ends the reply: lm-eval leaves
        # out the last one.
        keeps_end = num_before == 0 and self.request.sampling.prompt_logprobs is not None
        scored = self._score(delta.logprobs if keeps_end else delta.logprobs[: self.num_tokens - num_before])
        echo, first = self._take_prompt_start()
        text, scored = echo + text, first + scored
        if self._decoder.stopped:
            finish = "stop"
        elif is_closed:
            text += self._decoder.push(self._thought.closing_ids)
            if self._decoder.stopped:
                finish = "stop"
            else:
                self._go_on()
        elif is_loop:
            finish, self._is_loop = "length", True  # as it would have ended, had it been left alone
            self._timer.count_loop()
        if finish is not None:
            text += self._decoder.finish()
        news, has_ended = self._parse(text, finish)
        if has_ended:
            self._timer.end("length" if finish == "length" else "stop")
        self._stream.take(self.request.id, ReplyDelta(self._index, news, scored, bool(echo)), has_ended)

    def _take_scores(self, scores: PromptScores) -> None:
        """Scores of the prompt go on to the client as they come, before there is any token."""
        echo, first = self._take_prompt_start()
        scored = first + self._score(scores.unpack())
        news = self._parser.feed(echo) if echo else []
        self._stream.take(self.request.id, ReplyDelta(self._index, news, scored, is_prompt=True), False)

    def _take_prompt_start(self) -> tuple[str, tuple[ScoredToken, ...]]:
        """What comes before all else, once: the echo, and its first token, before which nothing stands."""
        echo, first = self._echo, self._first_scored
        self._echo, self._first_scored = "", ()
        return echo, first

    def fail(self, error: Exception) -> None:
        self._timer.end("error")
        self._stream.fail(error)

    def abandon(self) -> None:
        """Nobody waits for the rest of it."""
        self._timer.end("abort")

    def _raise_failure(self, delta: TokenDelta) -> None:
        if delta.finish == "error":
            what, why = "The engine could not finish the reply", delta.error or ""
            if self.request.sampling.grammar is not None:
                raise RequestError(what, why, "Ask for a simpler form.", param=self._form_param)
            raise PenstockError(what, why)
        if delta.finish == "abort":
            raise EngineDeadError("The engine gave the reply up", delta.error or "")

    def _parse(self, text: str, finish: FinishReason | None) -> tuple[list[Delta], bool]:
        news = self._parser.feed(text) if text else []
        if self._ends_after_call:
            for place, piece in enumerate(news):
                if isinstance(piece, ToolCallEnd) and not piece.is_broken:
                    return [*news[: place + 1], ReplyEnd("tool_calls")], True
        if finish is not None:
            *rest, end = self._parser.close(finish)
            assert isinstance(end, ReplyEnd)
            news += [*rest, ReplyEnd(end.reason, self._decoder.stop_string, self._is_loop)]
        return news, finish is not None

    def _think(
        self, token_ids: tuple[int, ...], is_last: bool, is_loop: bool
    ) -> tuple[tuple[int, ...], bool]:
        """Counts tokens of a thought; gives those it may have, and whether it must be closed after them."""
        end_id, budget = self._thought.end_id, self._thought.budget
        has_end = end_id in token_ids
        num_thought = token_ids.index(end_id) + 1 if has_end else len(token_ids)
        if budget is not None:
            num_left = max(0, budget - self.num_reasoning_tokens)
            is_over = num_thought > num_left or (num_thought == num_left and not (has_end or is_last))
            if is_over and self._has_room_behind(num_left):
                self.num_reasoning_tokens += num_left
                return token_ids[:num_left], True
        self.num_reasoning_tokens += num_thought
        is_closed = (
            is_loop and not (has_end or self._has_closed_loop) and self._has_room_behind(len(token_ids))
        )
        self._has_closed_loop |= is_closed
        return token_ids, is_closed

    def _has_room_behind(self, num_thought: int) -> bool:
        """Whether an answer fits behind so many more tokens and the end of the thought."""
        max_tokens = self._asked.sampling.max_tokens
        assert max_tokens is not None
        return self.num_tokens + num_thought + len(self._thought.closing_ids) < max_tokens

    def _go_on(self) -> None:
        """Asks for what comes after the closed thought."""
        self.num_reasoning_tokens += len(self._thought.closing_ids)
        closed = self.request
        thought_ids = (*self._said_ids, *self._thought.closing_ids)
        self.request = replace(
            closed,
            id=f"{closed.id}-answer",
            token_ids=(*closed.token_ids, *thought_ids),
            num_resumed_tokens=closed.num_resumed_tokens + len(thought_ids),
            age_s=time.monotonic() - self._began_s,
        )
        self._said_ids.clear()
        if self._loop_guard is not None:
            self._loop_guard = LoopGuard()  # the answer is another text
        self._stream.go_on(closed.id, self.request, self)

    def _score(self, logprobs: Sequence[TokenLogprob]) -> tuple[ScoredToken, ...]:
        bytes_of = self._tokenizer.token_bytes
        return tuple(
            ScoredToken(
                bytes_of(token.token_id),
                token.logprob,
                tuple((bytes_of(token_id), logprob) for token_id, logprob in token.top),
            )
            for token in logprobs
        )
