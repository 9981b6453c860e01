"""What a request holds before it runs: a place in the queue, and the bytes of its body.

A request takes a place when its headers arrive, before its body is read. When it is submitted, each
of its replies takes over one place until it ends. Bytes count from the headers, if they declare a
length, until submission. When places or bytes run out, requests whose bodies arrive slowly lose
theirs first; if there are none, the new request is refused at once. Used only from the event loop.
Only the last class knows HTTP: it releases what a request still holds at its end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config import ServeConfig
from penstock.errors import OverloadedError, RequestError
from penstock.serve.admission import QueueShares

# Until they run, large bodies may hold half of the places and half of the bytes: the rest is for
# ordinary chats, which take milliseconds to prepare.
LARGE_BODY_BYTES = 1024**2
# A body is slow if it takes longer than this, and longer than this rate allows. A slow body is
# accepted while there is room.
SLOW_S = 2.0
SLOW_BYTES_PER_S = 256 * 1024


class Bodies:
    """The bytes of request bodies in memory."""

    def __init__(self, max_bytes: int, max_body_bytes: int, max_large: int) -> None:
        self.max_bytes = max(max_bytes, max_body_bytes)
        self.num_bytes = 0
        self._max_large_bytes = max(max_bytes // 2, max_body_bytes)  # one always fits
        self._num_large_bytes = 0
        self._max_large = max_large
        self._num_large = 0

    def has_room(self, before: int, after: int) -> bool:
        """Whether one body may grow from `before` to `after` bytes."""
        if self.num_bytes + after - before > self.max_bytes:
            return False
        num_large, num_large_bytes = self._large_after(before, after)
        is_large = after > LARGE_BODY_BYTES
        return not is_large or (
            num_large <= self._max_large and num_large_bytes <= self._max_large_bytes
        )

    def resize(self, before: int, after: int) -> None:
        if after > before and not self.has_room(before, after):
            raise OverloadedError(
                "The server is receiving too much at the same time",
                f"{self.num_bytes} bytes are being read and prepared, {self._num_large_bytes} of "
                f"them in {self._num_large} large bodies.",
                "Try again later.",
            )
        self.num_bytes += after - before
        self._num_large, self._num_large_bytes = self._large_after(before, after)

    def _large_after(self, before: int, after: int) -> tuple[int, int]:
        """The number of large bodies after such a change, and their bytes."""
        was, will_be = (size if size > LARGE_BODY_BYTES else 0 for size in (before, after))
        return self._num_large + bool(will_be) - bool(was), self._num_large_bytes + will_be - was


class Intake:
    """The places and bytes of all requests."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        max_queue = config.max_queue
        self.clock = clock
        self.readers: dict[Place, None] = {}  # requests whose bodies are arriving, oldest first
        self.replies = QueueShares(max_queue, "requests are being read, waiting or running")
        # Most of these only count tokens.
        self.counts = QueueShares(max_queue, "requests that need no engine are waiting")
        self.bodies = Bodies(config.max_bodies_bytes, config.max_body_bytes, max(1, max_queue // 2))

    def reserve(self, tenant: str, *, for_reply: bool = True) -> Place:
        """Takes a place for a request of this tenant when its headers have arrived."""
        queue = self.replies if for_reply else self.counts
        self.make_room(queue.has_room)
        return Place(self, queue, tenant)

    def make_room(self, is_enough: Callable[[], bool], asking: Place | None = None) -> None:
        """Stops reading slow bodies until `is_enough`, or until no other body is slow."""
        if is_enough():  # nearly always
            return
        now = self.clock()
        for place in list(self.readers):
            if is_enough() or place.began_at > now - SLOW_S:
                return
            if place is not asking and place.is_slow(now):
                place.end_reading()


class Place:
    """What one request holds; its replies take over its places when it is submitted."""

    def __init__(self, intake: Intake, queue: QueueShares, tenant: str) -> None:
        queue.reserve(tenant)
        self.tenant = tenant
        self.num_bytes = 0
        self.num_received = 0  # bytes so far
        self.began_at = intake.clock()
        self._has_lost_room = False
        self._intake = intake
        self._queue = queue
        self._num_places = 1
        self._stop_reading: Callable[[], None] | None = None

    @contextlib.contextmanager
    def reading(self, stop: Callable[[], None]) -> Iterator[None]:
        """A context while the body arrives; calls `stop` if it is slow and others need its room."""
        self._stop_reading = stop
        self._intake.readers[self] = None
        try:
            yield
        finally:
            self._intake.readers.pop(self, None)

    def receive(self, num_bytes: int) -> None:
        """Counts bytes of the body. Those beyond the declared length, as in chunked bodies, take
        room now."""
        self.num_received += num_bytes
        if self.num_received > self.num_bytes:
            self.add_bytes(self.num_received - self.num_bytes)

    def is_slow(self, now: float) -> bool:
        return now - self.began_at > SLOW_S + self.num_received / SLOW_BYTES_PER_S

    def end_reading(self) -> None:
        assert self._stop_reading is not None
        self._has_lost_room = True
        self._intake.readers.pop(self, None)
        self.release()
        self._stop_reading()

    def require_room(self) -> None:
        if self._has_lost_room:
            raise OverloadedError(
                "The server is full",
                f"The body arrived slowly, {self.num_received} bytes in {SLOW_S:g} seconds or "
                "more, and other requests needed its room.",
                "Try again later.",
            )

    def resize(self, num_places: int) -> None:
        """Takes as many places as the request will have replies."""
        if num_places > self._queue.max_places:
            raise RequestError(
                f"The request asks for {num_places} replies",
                f"The server holds {self._queue.max_places} at a time (--max-queue), for all "
                "requests together.",
                "Lower n, or send fewer prompts in one request.",
                param="n",
            )
        if num_places > self._num_places:
            self._queue.reserve(self.tenant, num_places - self._num_places)
        elif num_places < self._num_places:
            self._queue.release(self.tenant, self._num_places - num_places)
        self._num_places = num_places

    def add_bytes(self, num_bytes: int) -> None:
        """Counts bytes of the body, as declared or received, or of stored messages that the request
        reads."""
        self.require_room()
        bodies, after = self._intake.bodies, self.num_bytes + num_bytes
        self._intake.make_room(lambda: bodies.has_room(self.num_bytes, after), asking=self)
        bodies.resize(self.num_bytes, after)
        self.num_bytes = after

    def hand_over(self, num_replies: int) -> None:
        """Hands the places over to the replies, each of which releases one when it ends. The body
        is no longer needed."""
        self.resize(num_replies)
        self._num_places = 0
        self._drop_bytes()

    def release(self) -> None:
        """Releases whatever is left; may be called twice."""
        self.resize(0)
        self._drop_bytes()

    def _drop_bytes(self) -> None:
        self._intake.bodies.resize(self.num_bytes, 0)
        self.num_bytes = 0


def place_of(scope: Scope) -> Place:
    """The place that `read_body` took."""
    place: Place = scope["place"]
    return place


class ReleasePlaces:
    """Releases what a request still holds at its end, however it ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if "place" in scope:
                place_of(scope).release()
