"""Connections that an answer may write to itself.

Through ASGI every event of a stream is a message passed down a chain of coroutines, and a task to wake first:
three times the work of sending it. So a streamed answer opens and ends through ASGI, and writes its events to
the transport in between. Knows HTTP's chunks; what an event says is written in replies.py.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.errors import OverloadedError

# A client that reads slower than tokens come is cut off here: some thousands of events that nobody has read.
MAX_BACKLOG_BYTES = 1024 * 1024


class HttpConnection(HttpToolsProtocol):
    """uvicorn's, lending its transport to whoever answers."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["transport"] = self.transport  # type: ignore[typeddict-unknown-key]


class EventWriter:
    """The events of one answer: kept until its headers are out, and from then on written as they come."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._is_open = False
        self._early = b""

    def open(self) -> None:
        """The headers have been sent."""
        self._is_open = True
        early, self._early = self._early, b""
        if early:
            self.write(early)

    def write(self, events: bytes) -> None:
        """Never waits: what the client has not read stays in the transport's buffer, up to a limit."""
        if not self._is_open:
            self._early += events
            num_unread = len(self._early)
        elif self._transport.is_closing():
            return
        else:
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events))
            num_unread = self._transport.get_write_buffer_size()
        if num_unread > MAX_BACKLOG_BYTES:
            raise OverloadedError(
                "The reply was not read",
                f"More than {MAX_BACKLOG_BYTES} bytes of it were waiting to be sent.",
            )
