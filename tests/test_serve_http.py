"""HTTP of clients other than browsers: version 1.0, half-closed and too many connections."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ServeConfig
from penstock.errors import ConfigError
from penstock.serve.connection import (
    FILES_PER_ENGINE,
    MAX_HEAD_BYTES,
    OWN_FILES,
    TURNED_AWAY,
    connection_limit,
)
from serving import FREE, MESSAGES, Server, eventually, start_server
from two_layers import two_layers

MAX_FILES = 200
CHAT = {"messages": MESSAGES, "max_tokens": 4, **FREE}
ENDLESS = {"messages": MESSAGES, "max_tokens": 4000, **FREE}  # for longer than any test waits
NOTICED_S = 3.0
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its engines' sockets."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        with start_server({"model": two_layers()}, max_files=MAX_FILES) as running:
            yield running


def request(
    body: dict[str, Any], version: str = "1.1", path: str = "/v1/chat/completions"
) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(20.0)
    return b"".join(iter(lambda: connection.recv(65536), b""))


def exchange(server: Server, data: bytes, *, half_closes: bool = False) -> tuple[bytes, bytes]:
    """The head and the body of all that the server sends until it closes."""
    with socket.create_connection(server.address) as connection:
        connection.sendall(data)
        if half_closes:
            connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    while answer.startswith(INTERIM):  # which a slow machine may send
        answer = answer.removeprefix(INTERIM)
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


# HTTP/1.0


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", CHAT, b"data: [DONE]\n\n"),
        ("/v1/completions", {"prompt": "One", "max_tokens": 4, **FREE}, b"data: [DONE]\n\n"),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 4},
            b'data: {"type":"message_stop"}\n\n',
        ),
        ("/v1/responses", {"input": "One", "max_output_tokens": 4, **FREE}, b"\n\n"),
    ],
)
@pytest.mark.parametrize("half_closes", [False, True])
def test_a_stream_to_a_client_of_http_1_0_has_no_chunks_and_ends_with_the_connection(
    server: Server, path: str, body: dict[str, Any], end: bytes, half_closes: bool
) -> None:
    head, events = exchange(
        server, request({**body, "stream": True}, "1.0", path), half_closes=half_closes
    )
    assert head.startswith(b"http/1.1 200")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert events.startswith((b"data: {", b"event: "))
    assert events.endswith(end)
    assert all(line.startswith((b"data: ", b"event: ")) for line in events.split(b"\n") if line)


def test_what_has_a_length_keeps_it_in_http_1_0(server: Server) -> None:
    head, body = exchange(server, request(CHAT, "1.0"))
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["choices"]
    head, body = exchange(server, b"HEAD /health HTTP/1.0\r\n\r\n")
    assert (head.split()[1], body) == (b"200", b"")


# Offers of another protocol


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQA\r\n"


def with_headers(request: bytes, headers: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\n" + headers, 1)


def chunked(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    pieces = [data[at : at + 7] for at in range(0, len(data), 7)]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("plain", [request(CHAT), chunked(CHAT)], ids=["sized", "chunked"])
@pytest.mark.parametrize("num_pieces", [1, 2, 9])
def test_the_body_of_a_request_that_offers_http_2_is_read(
    server: Server, plain: bytes, num_pieces: int
) -> None:
    data = with_headers(plain, H2C) + with_headers(plain, H2C)
    with socket.create_connection(server.address) as connection:
        for place in range(num_pieces):
            begin, end = (len(data) * i // num_pieces for i in (place, place + 1))
            connection.sendall(data[begin:end])
            time.sleep(0.01)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200") == answer.count(b'"chat.completion"') == 2


def test_the_head_of_an_endless_stream_ends(server: Server) -> None:
    head, rest = exchange(
        server,
        b"HEAD /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    )
    assert b"text/event-stream" in head
    assert rest.startswith(b"HTTP/1.1 200")


def test_an_offer_changes_no_other_header_and_no_other_request(server: Server) -> None:
    closing = with_headers(request(CHAT), b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n")
    head, body = exchange(server, with_headers(request(CHAT), H2C) + request(CHAT) + closing)
    assert b"connection: close" not in head
    assert body.count(b"HTTP/1.1 200") == 2
    assert body.lower().count(b"connection: close") == 1
    head, _ = exchange(server, b"CONNECT x:1 HTTP/1.1\r\nUpgrade: h2c\r\n\r\n")
    assert head.startswith(b"http/1.1 400")
    large = with_headers(request(CHAT), H2C + b"X: %b\r\n" % (b"x" * MAX_HEAD_BYTES))
    assert exchange(server, large)[0].startswith(b"http/1.1 431")


# Half-closed connections


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_its_side_gets_its_answer(server: Server, stream: bool) -> None:
    head, body = exchange(server, request({**CHAT, "stream": stream}), half_closes=True)
    assert head.startswith(b"http/1.1 200")
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


def test_all_of_several_that_it_has_sent_at_once(server: Server) -> None:
    _, rest = exchange(server, request(CHAT) + request(CHAT) + request(CHAT), half_closes=True)
    assert rest.count(b"HTTP/1.1 200") == 2


def test_one_that_waits_long_gets_interim_answers_and_then_its_own(
    server: Server,
) -> None:
    with socket.create_connection(server.address) as connection:
        connection.sendall(request({**ENDLESS, "timeout": 2.0}))
        connection.shutdown(socket.SHUT_WR)
        first, interim, last = read_all(connection).split(b"HTTP/1.1 ")
    assert (first, interim.split()[0], last.split()[0]) == (b"", b"100", b"408")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half_closes", [False, True])
def test_one_that_is_gone_is_noticed_soon(server: Server, stream: bool, half_closes: bool) -> None:
    with socket.create_connection(server.address) as connection:
        connection.sendall(request({**ENDLESS, "stream": stream}))
        if half_closes:
            connection.shutdown(socket.SHUT_WR)
        assert eventually(lambda: server.stats()["num_running"] == 1)
    assert eventually(server.is_idle, NOTICED_S)


def test_half_a_request_is_none(server: Server) -> None:
    with socket.create_connection(server.address) as connection:
        connection.sendall(request(CHAT)[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


# More connections than fit


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.0)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_more_connections_than_files_allow_get_a_503_and_engines_still_start(
    server: Server, folder: Path
) -> None:
    limit = MAX_FILES - OWN_FILES - FILES_PER_ENGINE - TURNED_AWAY
    server.http.close()
    with contextlib.ExitStack() as opened:
        idle = [
            opened.enter_context(socket.create_connection(server.address)) for _ in range(limit - 1)
        ]
        assert len(idle) > 100
        for connection in idle:  # which may stay open for a while, since a request has come
            connection.sendall(b"GET /ready HTTP/1.1\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        server.http = opened.enter_context(type(server.http)(timeout=60.0))
        assert server.health().status_code == 200
        late = [
            opened.enter_context(socket.create_connection(server.address))
            for _ in range(2 * MAX_FILES)
        ]
        answers = []
        for connection in late:
            with contextlib.suppress(ConnectionResetError):
                connection.settimeout(5.0)
                answers.append(connection.recv(4096))
        told = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503")]
        assert told
        assert b"retry-after: 1" in told[0]
        assert told[0].endswith(b"Too many connections are open. Try again later.")
        assert server.health().status_code == 200

        dead = server.engine_pid
        os.kill(dead, signal.SIGKILL)
        assert eventually(lambda: server.engine_pids not in ([], [dead]), 20.0)
        assert eventually(lambda: server.health().status_code == 200, 60.0)
        assert all(is_open(connection) for connection in idle)
    server.http = type(server.http)(timeout=60.0)
    assert eventually(lambda: server.post(CHAT).status_code == 200, 10.0)
    assert list(folder.iterdir()) == []


def test_an_engine_that_cannot_start_for_want_of_files_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    from penstock.serve.client import _socket_path

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _socket_path() as path:
        Path(path).touch()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no descriptors are left
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_the_operators_limit_counts_and_must_be_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    assert connection_limit(ServeConfig()) == 1024 - 72
    assert connection_limit(ServeConfig(replicas=8)) == 1024 - 128
    assert connection_limit(ServeConfig(max_connections=10)) == 10
    with pytest.raises(ConfigError, match="952 for connections") as caught:
        connection_limit(ServeConfig(max_connections=1000))
    assert "ulimit -n 1072" in caught.value.todo
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    with pytest.raises(ConfigError, match="leaves 0") as caught:
        connection_limit(ServeConfig())
    assert caught.value.why.endswith("connections need at least 1.")


def test_a_client_that_does_not_read_is_cut_off_and_delays_no_other(server: Server) -> None:
    body = {
        "messages": MESSAGES,
        "n": 24,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
        **FREE,
    }
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        connection.sendall(request(body))
        assert eventually(lambda: server.stats()["num_running"] == 24)
        assert server.post({"messages": MESSAGES, "max_tokens": 2}).status_code == 200
        assert eventually(server.is_idle, 30.0)  # 24 full contexts would take a minute

        connection.settimeout(10.0)
        text = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(2**20):
                text += piece
    assert text.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in text
    assert not text.endswith(b"0\r\n\r\n"), "the stream looks complete"
