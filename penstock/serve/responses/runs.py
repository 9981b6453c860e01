"""Background replies (`background`): they continue when their client disconnects, and can be read
later.

A run records its response's events if a stream was requested: later readers start from any event.
Its result is stored like every other response, but not by this module. The events of all runs have
a limit in bytes: beyond it the oldest runs lose theirs, but their responses can still be fetched.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from penstock.errors import DeadlineError, PenstockError, RequestError
from penstock.serve.answer import unexpected_error
from penstock.serve.event_stream import HEARTBEAT_COMMENT, HEARTBEAT_EVERY_S
from penstock.serve.responses.replies import ResponseReplyFormat
from penstock.serve.text_stream import ReplyDelta, TextStream

log = logging.getLogger("penstock.serve")

MAX_EVENT_BYTES = 64 * 1024 * 1024  # for all runs together
EVENT_END = b"\n\n"  # encoded JSON contains no line breaks

KeepUnfinished = Callable[[bytes], None]


class Events:
    """The events that a run has written, for readers that wait for more."""

    def __init__(self) -> None:
        self.data: bytearray | None = bytearray()  # None: they were dropped
        self.has_ended = False
        self.on_write: Callable[[int], None] = lambda num_bytes: None
        self._written = asyncio.Event()

    def write(self, events: bytes) -> None:
        if self.data is None:
            return
        self.data += events
        self.on_write(len(events))
        self.wake()

    def drop(self) -> int:
        """Drops the events and ends all readers; returns the number of bytes."""
        data, self.data = self.data, None
        self.wake()
        return len(data or b"")

    def wake(self) -> None:
        self._written.set()
        self._written = asyncio.Event()

    async def read(self, num_skipped: int) -> AsyncIterator[bytes]:
        """Yields events as they come, without the first ones; a comment if none comes for long."""
        at, num_left = 0, num_skipped
        while self.data is not None:
            while num_left and (end := self.data.find(EVENT_END, at)) >= 0:
                at, num_left = end + len(EVENT_END), num_left - 1
            if not num_left and at < len(self.data):
                events, at = bytes(self.data[at:]), len(self.data)
                yield events
            elif self.has_ended:
                return
            else:
                written = self._written
                try:
                    await asyncio.wait_for(written.wait(), HEARTBEAT_EVERY_S)
                except TimeoutError:
                    yield HEARTBEAT_COMMENT


class Run:
    """One running reply."""

    def __init__(
        self, formatter: ResponseReplyFormat, keep_unfinished: KeepUnfinished, logs: bool
    ) -> None:
        self.status = "queued"
        self.events = Events() if logs else None
        self._formatter = formatter
        self._keep_unfinished = keep_unfinished
        self._task: asyncio.Task[None] | None = None
        self.on_end: Callable[[], object] = lambda: None
        self._write(formatter.encode_queued())

    def body(self) -> bytes:
        """The response so far."""
        return self._formatter.encode_so_far(self.status)

    def deliver(self, delta: ReplyDelta) -> None:
        # It was cancelled, but the engine does not know yet.
        if self.status not in ("queued", "in_progress"):
            return
        self.status = "in_progress"
        self._write(self._formatter.encode_chunk(delta))

    def follow(self, stream: TextStream, timeout_s: float | None) -> None:
        """Follows the reply to its end, whether its client is connected or not."""
        self._task = asyncio.create_task(self._follow(stream, timeout_s))

    def cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()
        self._fail("cancelled")

    async def _follow(self, stream: TextStream, timeout_s: float | None) -> None:
        with stream:
            try:
                async with asyncio.timeout(timeout_s):
                    await stream.wait_ended()
                self._write(self._formatter.encode_end(stream.usage))  # this stores the response
                self._end("completed")
            except TimeoutError:
                late = DeadlineError(
                    "The reply was not complete in time", f"The limit was {timeout_s:g} seconds."
                )
                self._fail("failed", late)
            except PenstockError as error:
                self._fail("failed", error)
            except Exception:
                log.exception("a reply failed in the background")
                self._fail("failed", unexpected_error())

    def _fail(self, status: str, error: PenstockError | None = None) -> None:
        """Stores the unfinished response with its status and error."""
        self._keep_unfinished(self._formatter.encode_so_far(status, error))
        if error is None:
            self._write(self._formatter.encode_cancelled())
        else:
            self._write(self._formatter.encode_failure(error))
        self._end(status)

    def _write(self, events: bytes) -> None:
        if self.events is not None:
            self.events.write(events)

    def _end(self, status: str) -> None:
        self.status = status
        if self.events is not None:
            self.events.has_ended = True
            self.events.wake()
        self.on_end()


class Runs:
    """The running replies, and the events of ended ones."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._num_event_bytes = 0
        self._running: dict[str, tuple[str, Run]] = {}  # tenant and run, by id
        # By id, oldest first.
        self._events: OrderedDict[str, Events] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, id: str, tenant: str, run: Run) -> None:
        self._running[id] = tenant, run
        run.on_end = lambda: self._running.pop(id)
        if run.events is not None:
            self._events[id] = run.events
            run.events.on_write = self._count
            self._count(len(run.events.data or b""))

    def find(self, id: str, tenant: str) -> Run | None:
        """The running reply with this id; None if there is none."""
        owner, run = self._running.get(id, (None, None))
        return run if owner == tenant else None

    def events_of(self, id: str) -> Events:
        """The events of an existing response."""
        events = self._events.get(id)
        if events is None:
            raise RequestError(
                "This response cannot be streamed again",
                "Events are stored only for responses with background and stream, up to "
                f"{self._max_event_bytes} bytes of all responses.",
                "Fetch it without stream.",
                param="stream",
            )
        return events

    def forget(self, id: str) -> None:
        if id in self._events:
            self._num_event_bytes -= self._events.pop(id).drop()

    def _count(self, num_bytes: int) -> None:
        self._num_event_bytes += num_bytes
        while self._num_event_bytes > self._max_event_bytes:
            self.forget(next(iter(self._events)))
