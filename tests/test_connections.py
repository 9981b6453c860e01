"""Clients that do not read their response are disconnected, and the server never waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import uvloop

from penstock.config import ServeConfig
from penstock.errors import OverloadedError
from penstock.serve import connection as connection_module
from penstock.serve.answer import Answer
from penstock.serve.connection import MAX_BACKLOG_BYTES, EventWriter, HttpConnection
from penstock.serve.text_stream import Deliver, ReplyDelta, TextStream, Usage
from penstock.text.dialects import ContentDelta
from serving import eventually

EVENT_BYTES = 8192
ASK = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
PAUSING = 300_000  # buffered bytes at which the transport pauses writing
LITTLE = 40_000  # fewer than that, and more than fit into the sockets


class EventsOnly:
    """A response format in which each delta is one event with its text."""

    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        (piece,) = delta.deltas
        assert isinstance(piece, ContentDelta)
        return piece.text.encode()

    def encode_heartbeat(self) -> bytes:
        return b""

    def encode_end(self, usage: Usage) -> bytes:
        return b"the end"

    def encode_failure(self, error: Exception) -> bytes:
        return b"failed"

    def encode_body(self, choices: Any, usage: Usage) -> bytes:
        raise NotImplementedError


class Flood:
    """A server whose reply has this length, and is written as fast as its loop runs."""

    def __init__(self, num_bytes: int, prompt: Sequence[int] = ()) -> None:
        self._num_events = num_bytes // EVENT_BYTES
        self._prompt = prompt  # bytes of the events before those
        self.record = SimpleNamespace(usage=None, error=None)
        self.has_ended = threading.Event()
        self.server = uvicorn.Server(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                http=HttpConnection.limited_by(ServeConfig()),
                ws="none",
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=1,
            )
        )

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        serving = SimpleNamespace(config=ServeConfig(), draining=asyncio.Event())
        scope |= {
            "app": SimpleNamespace(state=SimpleNamespace(server=serving)),
            "record": self.record,
        }
        try:
            await Answer(self._start, EventsOnly(), True)(scope, receive, send)
        finally:
            self.has_ended.set()

    async def _start(self, deliver: Deliver) -> TextStream:
        stream = TextStream(SimpleNamespace(abort=lambda id: None), deliver)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        delta = ReplyDelta(0, [ContentDelta("x" * EVENT_BYTES)])

        def generate(num_left: int) -> None:
            try:
                stream.take("id", delta, has_ended=num_left == 1)
            except Exception as error:
                stream.fail(error)
            else:
                if num_left > 1:
                    loop.call_later(0.0, generate, num_left - 1)

        def echo() -> None:
            for num_bytes in self._prompt:
                stream.take(
                    "id", ReplyDelta(0, [ContentDelta("e" * num_bytes)], (), is_prompt=True), False
                )

        loop.call_soon(echo)
        loop.call_later(0.1, generate, self._num_events)
        return stream

    @property
    def connections(self) -> list[Any]:
        return list(self.server.server_state.connections)


@contextlib.contextmanager
def flood(
    num_bytes: int, ask: bytes = ASK, prompt: Sequence[int] = ()
) -> Iterator[tuple[Flood, socket.socket]]:
    """Starts a flooding server, and a client with small socket buffers that has requested the
    reply.
    """
    source = Flood(num_bytes, prompt)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        thread = threading.Thread(
            target=lambda: uvloop.run(source.server.serve(sockets=[listener]))
        )
        thread.start()
        try:
            client.connect(listener.getsockname())
            client.settimeout(10.0)
            client.sendall(ask + b"\r\n")
            yield source, client
        finally:
            source.server.should_exit = True
            thread.join(10.0)
            assert not thread.is_alive()


@pytest.fixture
def _short_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disconnects a client that reads nothing after half a second."""
    monkeypatch.setattr(connection_module, "LOOK_AT_UNREAD_S", 0.05)


def test_a_client_with_a_megabyte_unread_is_cut_off_at_once() -> None:
    started = time.monotonic()
    with flood(4 * MAX_BACKLOG_BYTES) as (source, client):
        assert source.has_ended.wait(5.0)
        assert eventually(lambda: not source.connections, 1.0)
        assert source.record.error == "overloaded"
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert len(received) < MAX_BACKLOG_BYTES
    assert not received.endswith(b"0\r\n\r\n")  # the response is incomplete, which a client can see
    assert (
        time.monotonic() - started < 10 * connection_module.LOOK_AT_UNREAD_S
    )  # closed before the timeout


@pytest.mark.parametrize("is_open", [False, True])
def test_what_was_unread_before_an_event_counts_and_not_the_event(is_open: bool) -> None:
    unread: list[bytes] = []
    transport: Any = SimpleNamespace(
        is_closing=lambda: False,
        abort=lambda: None,
        write=unread.append,
        get_write_buffer_size=lambda: sum(map(len, unread)),
    )
    events = EventWriter(transport)
    if is_open:
        events.open()
    events.write(b"x" * (2 * MAX_BACKLOG_BYTES))
    with pytest.raises(OverloadedError, match="not read"):
        events.write(b"y")


ECHOES = {"whole": [2 * MAX_BACKLOG_BYTES], "in parts": [MAX_BACKLOG_BYTES // 4] * 8}


@pytest.mark.parametrize("prompt", ECHOES.values(), ids=ECHOES)
def test_a_client_that_reads_a_long_echo_gets_all_of_it(prompt: list[int]) -> None:
    """It arrives at once, so no client can have read it when the next event comes."""
    with flood(EVENT_BYTES, prompt=prompt) as (source, client):
        received = bytearray()
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += client.recv(65536)
        assert source.has_ended.wait(5.0)
    assert received.count(b"e" * 1000) >= 2 * MAX_BACKLOG_BYTES // 1000 - len(prompt)
    assert b"the end" in received
    assert source.record.error is None


@pytest.mark.usefixtures("_short_clock")
def test_a_client_that_reads_nothing_of_an_echo_is_cut_off_after_a_while() -> None:
    with flood(EVENT_BYTES, prompt=[2 * MAX_BACKLOG_BYTES]) as (source, _):
        assert source.has_ended.wait(5.0)
        assert eventually(lambda: not source.connections, 5.0)


def test_a_client_with_a_megabyte_unread_after_an_echo_is_cut_off_at_once() -> None:
    with flood(4 * MAX_BACKLOG_BYTES, prompt=[2 * MAX_BACKLOG_BYTES]) as (source, _):
        assert source.has_ended.wait(5.0)
        assert source.record.error == "overloaded"


@pytest.mark.usefixtures("_short_clock")
@pytest.mark.parametrize(
    ("num_bytes", "ask"), [(PAUSING, ASK), (LITTLE, ASK + b"Connection: close\r\n"), (LITTLE, ASK)]
)
def test_a_client_that_reads_nothing_of_a_complete_reply_is_cut_off_after_a_while(
    num_bytes: int, ask: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "KEEP_ALIVE_S", 0.2)
    with flood(num_bytes, ask) as (source, _):
        assert source.has_ended.wait(5.0)
        assert eventually(lambda: not source.connections, 5.0)
        assert source.record.error is None


@pytest.mark.usefixtures("_short_clock")
def test_a_client_that_reads_slowly_gets_everything() -> None:
    received = b""
    with flood(PAUSING) as (_, client):
        started = time.monotonic()
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += client.recv(8192)
            time.sleep(0.015)
        num_looks = (time.monotonic() - started) / connection_module.LOOK_AT_UNREAD_S
    assert b"the end" in received
    assert num_looks > connection_module.MAX_LOOKS_AT_UNREAD


def test_a_client_that_does_not_read_delays_the_shutdown_only_briefly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with flood(PAUSING) as (source, _):
        assert eventually(lambda: any(one.flow.write_paused for one in source.connections))
        started = time.monotonic()
        source.server.should_exit = True
        assert source.has_ended.wait(5.0)
    assert time.monotonic() - started < 3.0
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
