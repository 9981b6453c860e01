"""A streamed answer that stays alive: headers are sent before a late first event, and heartbeats
follow.

Proxies and clients close a connection that is silent for a minute; a long prompt takes longer. So
headers wait for the first event only for a short time, in which a failure still gets a status code.
The reply format defines the heartbeat: a comment of server-sent events, or an event of the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Scope, Send

from penstock.serve.connection import EventWriter

HEADERS_AFTER_S = 2.0  # at the latest
HEARTBEAT_EVERY_S = 10.0  # while nothing else is sent
HEARTBEAT_COMMENT = b": keep-alive\n\n"

Headers = list[tuple[bytes, bytes]]


class EventStream:
    """Sends headers once, then what is written. Its timer runs inside the context manager."""

    def __init__(
        self, scope: Scope, send: Send, headers: Headers, encode_heartbeat: Callable[[], bytes]
    ) -> None:
        self._send = send
        self._headers = headers
        self._encode_heartbeat = encode_heartbeat
        self._writer = EventWriter(scope["transport"], scope["http_version"])
        self._opening: asyncio.Task[None] | None = None
        self._clock: asyncio.TimerHandle
        self._is_quiet = True  # since the last check

    def __enter__(self) -> EventStream:
        self._look_after(HEADERS_AFTER_S)
        return self

    def __exit__(self, *error: object) -> None:
        self._clock.cancel()
        if self._opening is not None:
            self._opening.cancel()  # has no effect if it has finished

    @property
    def has_begun(self) -> bool:
        """Whether the status has been sent."""
        return self._opening is not None

    def write(self, events: bytes, is_prompt: bool = False) -> None:
        self._is_quiet = False
        self._writer.write(events, is_prompt)

    async def open(self) -> None:
        """Sends the headers, unless the clock already has."""
        await self._begin()

    async def close(self, events: bytes) -> None:
        """Sends the last events."""
        self._clock.cancel()
        await self._begin()
        await self._send({"type": "http.response.body", "body": events})

    def _begin(self) -> asyncio.Task[None]:
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._send_headers())
        return self._opening

    async def _send_headers(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._writer.open()

    def _look_after(self, seconds: float) -> None:
        self._clock = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._begin()
        # An empty one would end the answer.
        if self._is_quiet and (heartbeat := self._encode_heartbeat()):
            self._writer.write(heartbeat)
        self._is_quiet = True
        self._look_after(HEARTBEAT_EVERY_S)
