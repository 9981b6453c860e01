"""One reply on its way to the client: streamed or whole, and cancelled when the client disconnects.

An error before the headers are sent has its own HTTP status; after that, the stream ends with the
error in its API's format. Knows how answers are sent; the `ReplyFormat` of their endpoint knows how
they look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.config import ServeConfig
from penstock.errors import (
    DeadlineError,
    EngineDeadError,
    OverloadedError,
    PenstockError,
    RequestError,
)
from penstock.serve.admission import tenant_of
from penstock.serve.event_stream import EventStream
from penstock.serve.intake import Place
from penstock.serve.journal import MARKS_HEADER, current_journal, without_said
from penstock.serve.state import ServerState
from penstock.serve.text_stream import Deliver, ReplyDelta, ScoredToken, TextStream, Usage
from penstock.text.dialects import Delta

log = logging.getLogger("penstock.serve")

JSON_TYPE = "application/json"
EVENT_STREAM_TYPE = "text/event-stream; charset=utf-8"
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx buffers tokens before it passes them on
]
NO_HEADERS: Mapping[str, str] = {}
# A connection whose request body was not read to its end cannot be reused.
UNREAD_HEADERS = {"connection": "close"}

Pieces = list[bytes | bytearray]  # joined when they are sent
Start = Callable[[Deliver], Awaitable[TextStream]]


class Scores(Protocol):
    """The log-probabilities of one reply, encoded as they come: encoding all of them at its end
    would block the server."""

    def add(self, tokens: Sequence[ScoredToken]) -> None: ...

    def take(self) -> Pieces:
        """Returns the JSON of those that were added since the last call."""


@dataclass(slots=True)
class Choice:
    """One collected reply, for answers that are not streamed."""

    deltas: list[Delta] = field(default_factory=list)
    scores: Scores | None = None  # None: they were not requested
    prompt_scores: Scores | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] = ()

    def take(self, delta: ReplyDelta) -> None:
        self.deltas += delta.deltas
        if self.scores is not None:
            self.scores.add(delta.logprobs)
        if delta.extra is not None:
            self.token_ids += delta.extra.token_ids
            self.prompt_token_ids = self.prompt_token_ids or delta.extra.prompt_token_ids
            if self.prompt_scores is not None:
                self.prompt_scores.add(delta.extra.prompt_scores)


class BodyFormat(Protocol):
    """How one endpoint formats its answers; made for each answer, so it may keep state."""

    def encode_body(self, choices: dict[int, Choice], usage: Usage) -> bytes:
        """The whole body of a reply that is not streamed."""


class ReplyFormat(BodyFormat, Protocol):
    """The format of an endpoint whose answers may be streamed."""

    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        """The events of one delta of a stream; may be empty."""

    def encode_heartbeat(self) -> bytes:
        """Shows the client of a silent stream that the connection is alive."""

    def encode_end(self, usage: Usage) -> bytes:
        """The tail of a stream that succeeded."""

    def encode_failure(self, error: PenstockError) -> bytes:
        """The tail of a stream that failed after its headers were sent."""


def require_open(state: ServerState) -> None:
    """Raises an error once the server accepts no more requests."""
    if state.draining.is_set():
        raise EngineDeadError(
            "The server is shutting down",
            "It only finishes running requests.",
            "Use another server.",
        )


def shorter(*limits_s: float | None) -> float | None:
    """The shortest of these limits; None means no limit."""
    return min((limit for limit in limits_s if limit is not None), default=None)


class Answer:
    """Generates and sends a reply while the client is connected. `start` begins the generation."""

    def __init__(
        self,
        start: Start,
        formatter: ReplyFormat | BodyFormat,
        is_stream: bool,
        timeout_s: float | None = None,
        new_choice: Callable[[], Choice] = Choice,
        headers: Mapping[str, str] = NO_HEADERS,  # only for successful answers
        stream_type: str = EVENT_STREAM_TYPE,
    ) -> None:
        self._start: Start | None = start
        self._formatter: Any = formatter  # a `ReplyFormat` if it is a stream
        self._is_stream = is_stream
        self._new_choice = new_choice
        self._headers = headers
        self._stream_type = stream_type
        self._timeout_s = timeout_s  # the request's own; the server's limit is never exceeded
        self._ends_at: float | None = None  # on the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        require_open(_state(scope))
        # No client waits for a line of a batch: the batch's completion window limits it instead.
        self._allow(None if "least_priority" in scope else _state(scope).config.request_timeout)
        answer = self._send_events if self._is_stream else self._send_json
        await run_while_connected(receive, answer(scope, receive, send))

    async def _send_json(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices: dict[int, Choice] = {}

        def deliver(delta: ReplyDelta) -> None:
            choice = choices.get(delta.index)
            if choice is None:
                choice = choices[delta.index] = self._new_choice()
            choice.take(delta)

        with await self._begin(deliver) as stream, self._accounted(scope, stream):
            await stream.wait_ended()
            body = self._formatter.encode_body(choices, stream.usage)
        await Response(body, headers=self._headers, media_type=JSON_TYPE)(scope, receive, send)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = {"content-type": self._stream_type, **self._headers}
        journal = current_journal()
        if journal is not None:
            own[MARKS_HEADER] = "1"
        headers = [*((k.encode(), v.encode()) for k, v in own.items()), *STREAM_HEADERS]

        def encode_heartbeat() -> bytes:
            heartbeat = self._formatter.encode_heartbeat()
            return heartbeat + journal.mark() if journal is not None else heartbeat

        with EventStream(scope, send, headers, encode_heartbeat) as events:

            def deliver(delta: ReplyDelta) -> None:
                chunk = self._formatter.encode_chunk(delta)
                if journal is not None:
                    chunk = journal.marked(chunk)
                if chunk:  # an empty one would end the answer
                    events.write(chunk, delta.is_prompt)

            try:
                with await self._begin(deliver) as stream, self._accounted(scope, stream):
                    await stream.wait_started()
                    await events.open()
                    await stream.wait_ended()
                    tail = self._formatter.encode_end(stream.usage)
            except Exception as error:
                if not events.has_begun:
                    raise
                tail = self._fail(scope, error)
            await events.close(tail)

    def _fail(self, scope: Scope, error: Exception) -> bytes:
        if not isinstance(error, PenstockError):
            log.exception("a reply failed while streaming")
            error = unexpected_error()
        scope["record"].error = error.code
        return self._formatter.encode_failure(error)

    def _allow(self, servers_timeout_s: float | None) -> None:
        """Starts the clock, with the shorter of the two limits."""
        self._timeout_s = shorter(self._timeout_s, servers_timeout_s)
        if self._timeout_s is not None:
            self._ends_at = asyncio.get_running_loop().time() + self._timeout_s

    async def _begin(self, deliver: Deliver) -> TextStream:
        """Drops `start`, which holds the request, so that a long chat does not stay in memory."""
        start, self._start = self._start, None
        assert start is not None
        try:
            async with asyncio.timeout_at(self._ends_at):
                return await start(deliver)
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> DeadlineError:
        return DeadlineError(
            "The reply was not complete in time",
            f"Its time limit was {self._timeout_s:g} seconds, queueing included.",
            "Lower max_tokens, or raise the timeout.",
        )

    @contextlib.contextmanager
    def _accounted(self, scope: Scope, stream: TextStream) -> Iterator[None]:
        """Fails the stream at its deadline, and always records its usage."""
        ending = None
        if self._ends_at is not None:
            ending = asyncio.get_running_loop().call_at(self._ends_at, stream.fail, self._late())
        try:
            yield
        finally:
            if ending is not None:
                ending.cancel()
            record = scope["record"]
            record.usage, record.first_token_at = stream.usage, stream.started_at
            record.finish_reasons = tuple(stream.finish_reasons)


def _state(scope: Scope) -> ServerState:
    state: ServerState = scope["app"].state.server
    return state


def unexpected_error() -> PenstockError:
    """The error that a client gets for a bug in the server."""
    return PenstockError("The server failed on this request", "The server's log has the details.")


class Within:
    """Sends an answer inside a context manager."""

    def __init__(self, answer: Answer, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._answer = answer
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._context():
            await self._answer(scope, receive, send)


def event_stream(events: AsyncIterator[bytes], request: Request) -> Response:
    headers = {name.decode(): value.decode() for name, value in STREAM_HEADERS}
    headers["content-type"] = EVENT_STREAM_TYPE
    if request.method == "HEAD":  # it has no body that could end
        return Response(headers=headers)
    return StreamingResponse(events, headers=headers)


def json_response(content: dict[str, Any] | list[Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON_TYPE)


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work; cancels it when the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})
    if not working.cancelled():
        working.result()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, *, for_reply: bool = True) -> bytes:
    """Reads the whole body; raises an error if it is too large or too slow, or the queue is full.

    From here on the request holds a place in the queue and its bytes are counted, until it is
    submitted or ends. `for_reply`: it needs an engine; False for those that only count tokens.
    """
    state, scope = _state(request.scope), request.scope
    length = request.headers.get("content-length", "")
    num_declared = int(length) if length.isdigit() else 0
    if num_declared > state.config.max_body_bytes:
        raise _body_too_large(state.config.max_body_bytes)
    try:
        place = scope["place"] = state.intake.reserve(tenant_of(scope), for_reply=for_reply)
        place.add_bytes(num_declared)
        return await _receive_body(request, place, state.config)
    except OverloadedError:
        scope["is_unread"] = True
        raise


async def _receive_body(request: Request, place: Place, config: ServeConfig) -> bytes:
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(config.read_timeout) as time_limit:

            def stop() -> None:
                if not time_limit.expired():
                    time_limit.reschedule(0.0)

            with place.reading(stop):
                async for chunk in request.stream():
                    if place.num_received + len(chunk) > config.max_body_bytes:
                        raise _body_too_large(config.max_body_bytes)
                    place.receive(len(chunk))
                    chunks.append(chunk)
    except TimeoutError:
        place.require_room()
        message = f"The body did not arrive within {config.read_timeout:g} seconds."
        raise HTTPException(408, message, UNREAD_HEADERS) from None
    return without_said(request.scope, b"".join(chunks))


def _body_too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"The body has more than {max_bytes} bytes.", UNREAD_HEADERS)


class ReplyClock:
    """When a request arrived, and when its first and last tokens came, in nanoseconds: some APIs
    report these times. Time in the queue counts as prompt time."""

    def __init__(self) -> None:
        self._asked = self._began = self._ended = time.perf_counter_ns()
        self._has_begun = False

    def before(self, deliver: Deliver) -> Deliver:
        def note_and_deliver(delta: ReplyDelta) -> None:
            self._ended = time.perf_counter_ns()
            if not self._has_begun:
                self._has_begun, self._began = True, self._ended
            deliver(delta)

        return note_and_deliver

    @property
    def prompt_ns(self) -> int:
        return self._began - self._asked

    @property
    def reply_ns(self) -> int:
        """Never 0: clients divide by it."""
        return max(1, self._ended - self._began)

    @property
    def total_ns(self) -> int:
        return self.prompt_ns + self.reply_ns


def ids_of_page(
    ids: Sequence[str], request: Request, default: int, most: int
) -> tuple[list[str], bool]:
    """The requested page of these ids, which are oldest first, and whether there are more."""
    query = request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", str(default))
    if order not in ("asc", "desc"):
        raise RequestError(f"order is {order[:32]!r}", "It must be asc or desc.", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise RequestError(f"limit is {limit[:32]!r}", f"It must be 1 to {most}.", param="limit")
    ordered = list(ids) if order == "asc" else list(reversed(ids))
    if (after := query.get("after")) is not None:
        if after not in ordered:
            raise RequestError(
                f"after is {after[:64]!r}", "The list has no such id.", param="after"
            )
        ordered = ordered[ordered.index(after) + 1 :]
    page = ordered[: int(limit)]
    return page, len(ordered) > len(page)


def list_fields(ids: Sequence[str], data: list[Any], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}
