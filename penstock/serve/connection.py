"""HTTP connection limits (header size, read timeouts, slow readers), and a cheap way to send
events.

This is uvicorn's HTTP, with limits on the time and size of a request's headers and framing, and on
the time of its body. Half-sent requests are cut off, and so are clients that do not read their
answers, so that neither holds memory or file descriptors for long.

Through ASGI every event of a stream passes a chain of coroutines and wakes a task: three times the
work of sending it. So a streamed answer starts and ends through ASGI, and writes its events
directly to the transport. Knows HTTP chunks; the APIs write the events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import select
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.config import ServeConfig
from penstock.errors import ConfigError, OverloadedError

log = logging.getLogger("penstock.serve")

# A client that reads more slowly than tokens are generated is cut off at this many unread bytes.
MAX_BACKLOG_BYTES = 1024 * 1024
# A client that reads nothing although data waits is cut off after this many checks in a row.
LOOK_AT_UNREAD_S = 3.0
MAX_LOOKS_AT_UNREAD = 10
MAX_HEAD_BYTES = 64 * 1024
MAX_HEAD_S = 10.0  # or the read timeout, if that is shorter
# A chunk of one byte takes six; more framing than this per byte of body is an attack.
MAX_FRAMING_PER_BYTE = 8
# Longer than clients keep idle connections: otherwise we might close one while its next request is
# arriving.
KEEP_ALIVE_S = 75
# Added to a body's timeout, so that the route can still answer in its API's own format.
ANSWER_GRACE_S = 1.0
# How often to check a client that has closed its side of the connection, and may be gone.
LOOK_AT_HALF_CLOSED_S = 0.25
FIRST_PROBE, LOOKS_PER_PROBE = 4, 20  # checks until it is sent something before its reply begins
MAX_LOOKS_AT_HALF_CLOSED = 20  # for HTTP/1.0, where nothing can be sent before the reply
UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")
TURNED_AWAY_S = 0.25
FULL_NEWS_S = 60.0
TOO_MANY = b"Too many connections are open. Try again later."
# At shutdown, clients are cut off before uvicorn cancels their requests, which it logs as errors.
CUT_OFF_BEFORE_S = 0.5
# Each connection takes a file descriptor, and engines need some to start.
OWN_FILES = 48  # event loop, log, chat templates, libraries; 16 of them are in use when idle
FILES_PER_ENGINE = 8  # while it starts: a folder, a listener, pipes, and the socket that stays
TURNED_AWAY = 16  # connections beyond the limit that are being answered 503


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits; it lends its transport to the answer."""

    read_timeout_s = ServeConfig().read_timeout
    max_connections = 2**31
    full_until = 0.0  # shared by all connections: until then, the warning is not logged again

    @classmethod
    def limited_by(cls, config: ServeConfig) -> type[HttpConnection]:
        limits = {
            "read_timeout_s": config.read_timeout,
            "max_connections": connection_limit(config),
        }
        return type(cls.__name__, (cls,), limits)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.timeout_keep_alive = KEEP_ALIVE_S
        self.parser = RequestParser(self)
        self._reading: asyncio.TimerHandle | None = None  # times out the request
        self._being_read: asyncio.TimerHandle | None = None  # checks that its answer is read
        self._num_messages = 0  # requests that have begun on this connection
        self._is_in_message = False
        self._num_framing_bytes = 0  # everything but the body of the current message
        self._num_body_bytes = 0
        self._is_refused = False
        # Checks a client that has closed its side.
        self._half_closed: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._turn_away()
            return
        self._give_time(min(self.read_timeout_s, MAX_HEAD_S))

    def _turn_away(self) -> None:
        """Answers 503, and leaves the client a moment to read it. Beyond TURNED_AWAY such answers,
        connections are closed without one: file descriptors are scarce."""
        self._is_refused = True
        if self.loop.time() > HttpConnection.full_until:
            log.warning(
                "all %d connections are in use; more are answered 503", self.max_connections
            )
        HttpConnection.full_until = self.loop.time() + FULL_NEWS_S
        if len(self.connections) > self.max_connections + TURNED_AWAY:
            self.transport.abort()
            return
        self.transport.write(
            _plain_answer(b"503 Service Unavailable", TOO_MANY, b"retry-after: 1\r\n")
        )
        self.loop.call_later(TURNED_AWAY_S, self.transport.close)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has closed its side may wait for its answer or be gone: both look the same
        until something is sent. True: the connection stays open."""
        cycle = self.cycle
        if self._is_refused or self._is_in_message or cycle is None or cycle.response_complete:
            return False
        cycle.keep_alive = False
        self._half_closed = self.loop.call_later(
            LOOK_AT_HALF_CLOSED_S, self._look_at_half_closed, 1
        )
        return True

    def _look_at_half_closed(self, num_looks: int) -> None:
        """Ends the request of a client that is gone: it answers any data with a reset. Before the
        reply begins, that data is an interim response, which HTTP/1.1 allows at any time and 1.0
        does not."""
        cycle = self.cycle
        if self.transport.is_closing() or cycle is None:
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)  # only errors
        is_old = cycle.scope["http_version"] == "1.0"
        if poll.poll(0) or (
            is_old and not cycle.response_started and num_looks > MAX_LOOKS_AT_HALF_CLOSED
        ):
            self.transport.abort()
            return
        if (
            not (is_old or cycle.response_started or self.pipeline)
            and num_looks % LOOKS_PER_PROBE == FIRST_PROBE
        ):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        look = self._look_at_half_closed
        self._half_closed = self.loop.call_later(LOOK_AT_HALF_CLOSED_S, look, num_looks + 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        if self._half_closed is not None:
            self._half_closed.cancel()
        self._stop_watching_reader()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_watching_reader()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        message, num_body_bytes = self._num_messages, self._num_body_bytes
        super().data_received(data)
        # Data in which a message began is not counted: it may contain bytes of the previous one.
        if self._is_in_message and message == self._num_messages:
            self._num_framing_bytes += len(data) - (self._num_body_bytes - num_body_bytes)
            if (
                self._num_framing_bytes
                > MAX_HEAD_BYTES + MAX_FRAMING_PER_BYTE * self._num_body_bytes
            ):
                self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["transport"] = self.transport  # type: ignore[typeddict-unknown-key]
        self.scope["give_time"] = self._give_more_time  # type: ignore[typeddict-unknown-key]
        self._num_messages += 1
        self._is_in_message = True
        self._num_framing_bytes = self._num_body_bytes = 0
        self._give_time(min(self.read_timeout_s, MAX_HEAD_S))

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            self._refuse()
            return
        if self._offers_upgrade():
            return
        self._give_time(self.read_timeout_s + ANSWER_GRACE_S)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if not self._is_refused:
            super().on_body(body)

    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def go_on_without_upgrade(self, rest: bytes) -> None:
        """Reads the request again as if it offered no other protocol: Java's HTTP client offers
        HTTP/2 with every request. `rest`: what follows its headers."""
        if self._is_refused:
            return
        request = b"%b %b HTTP/%b" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        lines = [b"%b: %b" % header for header in self.headers if header[0] not in UPGRADE_HEADERS]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        self.parser = RequestParser(self)
        self.parser.feed_data(b"\r\n".join([request, *lines, b"", rest]))

    def on_message_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._is_in_message = False
        self._stop_clock()
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # it closes when the client has read everything
            self._watch_reader()
        if self.timeout_keep_alive_task is not None and not self._is_in_message:
            # The connection may be idle for long, so what belonged to the request is freed.
            self.cycle = self.scope = self.headers = None  # type: ignore[assignment]

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def shutdown(self) -> None:
        """The server is shutting down. A client may read on until shortly before the deadline."""
        super().shutdown()
        time_left_s = self.config.timeout_graceful_shutdown or 0
        self.loop.call_later(max(0.0, time_left_s - CUT_OFF_BEFORE_S), self.transport.abort)

    def _watch_reader(self) -> None:
        if self._being_read is None:
            self._look_at_unread(-1, 0)

    def _look_at_unread(self, num_unread_before: int, num_looks: int) -> None:
        """Cuts off a client that reads nothing over several checks. Slow reading is allowed.

        Several checks, because reads and writes may by chance cancel out once.
        """
        num_unread = self.transport.get_write_buffer_size()
        num_looks = num_looks + 1 if num_unread == num_unread_before else 0
        if num_looks >= MAX_LOOKS_AT_UNREAD:
            self.transport.abort()
            return
        look = self._look_at_unread
        self._being_read = self.loop.call_later(LOOK_AT_UNREAD_S, look, num_unread, num_looks)

    def _stop_watching_reader(self) -> None:
        if self._being_read is not None:
            self._being_read.cancel()
            self._being_read = None

    def _give_time(self, seconds: float) -> None:
        self._stop_clock()
        self._reading = self.loop.call_later(seconds, self._cut_off)

    def _give_more_time(self, seconds: float) -> None:
        """For routes that accept a body for as long as it keeps arriving, and check that
        themselves."""
        if self._is_in_message:
            self._give_time(seconds + ANSWER_GRACE_S)

    def _stop_clock(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _cut_off(self) -> None:
        self._end(b"408 Request Timeout", b"The request took too long to arrive.")

    def _refuse(self) -> None:
        """Ends a request whose headers or framing are larger than any real client's."""
        self._is_refused = True
        message = b"The headers have more than %d bytes." % MAX_HEAD_BYTES
        self._end(b"431 Request Header Fields Too Large", message)

    def _end(self, status: bytes, message: bytes) -> None:
        """Closes the connection; if nothing was answered yet, first sends the reason as text."""
        self._stop_clock()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        if self.cycle is None or self.cycle.scope is not self.scope:
            self.transport.write(_plain_answer(status, message))
        self.transport.close()


class RequestParser(httptools.HttpRequestParser):
    """Ignores offers of another protocol: the parser itself would drop the body after one."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._connection.go_on_without_upgrade(data[upgrade.args[0] :])


def _plain_answer(status: bytes, message: bytes, headers: bytes = b"") -> bytes:
    head = b"content-type: text/plain\r\ncontent-length: %d\r\n%bconnection: close" % (
        len(message),
        headers,
    )
    return b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (status, head, message)


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 has no chunks: a body of unknown length ends when the connection closes. uvicorn
    sends chunks anyway, unless it believes that each piece is the last."""
    send = cycle.send

    async def send_plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            cycle.chunked_encoding = None if b"content-length" in names else False
        elif cycle.expected_content_length == 0:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


class EventWriter:
    """The events of one answer: buffered until its headers are sent, and from then on written
    directly."""

    def __init__(self, transport: asyncio.WriteTransport, http_version: str = "1.1") -> None:
        self._transport = transport
        self._is_chunked = http_version != "1.0"
        self._is_open = False
        self._early = bytearray()
        self._max_unread = MAX_BACKLOG_BYTES

    def open(self) -> None:
        """The headers have been sent."""
        self._is_open = True
        early, self._early = bytes(self._early), bytearray()
        if early and not self._transport.is_closing():
            self._send(early)

    def write(self, events: bytes, is_prompt: bool = False) -> None:
        """Never waits: what the client has not read stays in the transport's buffer, up to a limit.
        Beyond it the connection is closed at once: no last event would reach that client.

        Counts what was unread before these events. Events that repeat the prompt come faster than
        any client reads, and count only against a client that reads nothing at all
        (`HttpConnection`).
        """
        if self._is_open and self._transport.is_closing():
            return
        unread = self._transport.get_write_buffer_size() if self._is_open else len(self._early)
        if unread > self._max_unread:
            if self._is_open:
                self._transport.abort()
            raise OverloadedError(
                "The reply was not read", f"{unread} bytes of it were waiting to be sent."
            )
        if is_prompt:
            self._max_unread += len(events)
        if self._is_open:
            self._send(events)
        else:
            self._early += events

    def _send(self, events: bytes) -> None:
        self._transport.write(
            b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events
        )


def allow_many_files() -> None:
    """Raises the soft limit to the hard one. The soft limit, often 1,024, is for programs that call
    select(); a client beyond it would wait for an answer for ever."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # if "no limit" is more than the system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit(config: ServeConfig) -> int:
    """The operator's limit, or as many as open files allow; raises an error if those are fewer."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        num_files = 2**31
    num_engines = len(config.gpus) or config.replicas
    num_reserved = OWN_FILES + FILES_PER_ENGINE * num_engines + TURNED_AWAY
    num_possible = num_files - num_reserved
    if num_possible < (config.max_connections or 1):
        raise ConfigError(
            f"The limit of {num_files} open files leaves {max(0, num_possible)} for connections",
            f"{num_reserved} are reserved for the server and its engines; connections need at "
            f"least {config.max_connections or 1}.",
            f"Raise the limit with `ulimit -n {num_reserved + (config.max_connections or 1024)}`"
            + (", or lower --max-connections." if config.max_connections else "."),
        )
    return config.max_connections or num_possible
