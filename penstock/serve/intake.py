"""What a request holds before it runs: a place in the queue, and the bytes of its body.

A place is taken at the head of a request, before any of its body is read, and held until its reply has
ended: by the request while it is read and prepared, then by its replies in the fleet, one each. Its bytes are
counted from the head, as far as it declares them, until it is submitted. Whoever finds no place, or no bytes
left, is refused at once. Only used from the event loop. Knows no HTTP but for the last class, which gives
back what a request still holds at its end.
"""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config import ServeConfig
from penstock.errors import OverloadedError, RequestError

# Larger bodies may hold half of the places and half of the bytes before they run: what is left is for chats
# that take milliseconds to prepare.
LARGE_BODY_BYTES = 1024**2


class Queue:
    """So many places for all tenants. Whether one may have another is decided in `take` alone."""

    def __init__(self, max_places: int, what: str) -> None:
        self.max_places = max_places
        self.num_taken: Counter[str] = Counter()  # by tenant
        self._what = what  # that waits in it, for who is refused

    def take(self, tenant: str, num_places: int = 1) -> None:
        num_taken = self.num_taken.total()
        if num_taken + num_places > self.max_places:
            raise OverloadedError(
                "The server is full",
                f"{num_taken} {self._what}, at most {self.max_places} may.",
                "Try again later.",
            )
        self.num_taken[tenant] += num_places

    def give_back(self, tenant: str, num_places: int = 1) -> None:
        self.num_taken[tenant] -= num_places
        if not self.num_taken[tenant]:
            del self.num_taken[tenant]


class Bodies:
    """How many bytes of requests are in memory."""

    def __init__(self, max_bytes: int, max_body_bytes: int, max_large: int) -> None:
        self.max_bytes = max(max_bytes, max_body_bytes)
        self.num_bytes = 0
        self._max_large_bytes = max(max_bytes // 2, max_body_bytes)  # one always fits
        self._num_large_bytes = 0
        self._max_large = max_large
        self._num_large = 0

    def resize(self, before: int, after: int) -> None:
        """Of one body, which had so many bytes and now has, or will have, so many."""
        num_bytes = self.num_bytes + after - before
        large_before, large_after = (size if size > LARGE_BODY_BYTES else 0 for size in (before, after))
        num_large = self._num_large + bool(large_after) - bool(large_before)
        num_large_bytes = self._num_large_bytes + large_after - large_before
        is_too_much = num_bytes > self.max_bytes or (
            large_after and (num_large > self._max_large or num_large_bytes > self._max_large_bytes)
        )
        if is_too_much and after > before:
            raise OverloadedError(
                "Too much is being sent to this server at the same time",
                f"{self.num_bytes} bytes are being read and prepared, {self._num_large_bytes} of them in "
                f"{self._num_large} large bodies.",
                "Try again later.",
            )
        self.num_bytes, self._num_large, self._num_large_bytes = num_bytes, num_large, num_large_bytes


class Intake:
    """All that requests hold together."""

    def __init__(self, config: ServeConfig) -> None:
        max_queue = config.max_queue
        self.replies = Queue(max_queue, "requests are being read, waiting or running")
        self.counts = Queue(max_queue, "requests for tokens are waiting")  # the engines never see these
        self.bodies = Bodies(config.max_bodies_bytes, config.max_body_bytes, max(1, max_queue // 2))

    def reserve(self, tenant: str, *, for_reply: bool = True) -> Place:
        """A place for a request of this tenant, at its head."""
        return Place(self.replies if for_reply else self.counts, self.bodies, tenant)


class Place:
    """What one request holds; its replies take its places over when it is submitted."""

    def __init__(self, queue: Queue, bodies: Bodies, tenant: str) -> None:
        queue.take(tenant)
        self.tenant = tenant
        self.num_bytes = 0
        self._queue = queue
        self._bodies = bodies
        self._num_places = 1

    def resize(self, num_places: int) -> None:
        """As many as the request will have replies."""
        if num_places > self._queue.max_places:
            raise RequestError(
                f"the call asks for {num_places} replies",
                f"The server takes {self._queue.max_places} at a time (--max-queue), of all calls together.",
                "Lower n, or send fewer prompts in a call.",
                param="n",
            )
        if num_places > self._num_places:
            self._queue.take(self.tenant, num_places - self._num_places)
        elif num_places < self._num_places:
            self._queue.give_back(self.tenant, self._num_places - num_places)
        self._num_places = num_places

    def add_bytes(self, num_bytes: int) -> None:
        """Of the body, when it declares them or they come; or of what the request makes us read again."""
        self._bodies.resize(self.num_bytes, self.num_bytes + num_bytes)
        self.num_bytes += num_bytes

    def hand_over(self, num_replies: int) -> None:
        """To so many replies: each gives one place back when it ends. The body is not needed any more."""
        self.resize(num_replies)
        self._num_places = 0
        self._drop_bytes()

    def release(self) -> None:
        """Gives back whatever is left; may be called again."""
        self.resize(0)
        self._drop_bytes()

    def _drop_bytes(self) -> None:
        self._bodies.resize(self.num_bytes, 0)
        self.num_bytes = 0


def place_of(scope: Scope) -> Place:
    """That its body was read with."""
    place: Place = scope["place"]
    return place


class ReleasePlaces:
    """Gives back at the end of a request, however it ended, what it still holds."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if "place" in scope:
                place_of(scope).release()
