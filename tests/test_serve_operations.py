"""Operation: time limits, priorities, the log, SageMaker's routes, abusive clients."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving import FREE, MESSAGES, Server, assert_refused, eventually, start_server
from two_layers import two_layers

READ_TIMEOUT_S = 1.0
SECRET = "quicksilver"  # in prompts; the log must not contain it


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "stderr"


@pytest.fixture(scope="module")
def server(log_file: Path) -> Iterator[Server]:
    """One row, so that other requests must wait."""
    settings: dict[str, Any] = {
        "read_timeout": READ_TIMEOUT_S,
        "log_format": "json",
        "max_body_mb": 1.0,
    }
    settings["min_priority"] = -10
    with (
        log_file.open("w") as log,
        start_server(
            engine={"model": two_layers(), "max_rows": 1}, serve=settings, log=log
        ) as running,
    ):
        yield running


def test_health_and_models_say_how_weights_and_kv_are_stored(server: Server) -> None:
    stored = {"dtype": "float32", "stored_as": ["bfloat16", "float32"], "bits_per_weight": 16.0}
    health = server.health().json()
    assert (health["weights"], health["kv_dtype"]) == (stored, "float32")
    (model,) = server.http.get(f"{server.url}/v1/models").json()["data"]
    assert model["weights"] == stored


# Time


def test_a_json_reply_out_of_time_is_a_408_that_is_not_to_be_retried(server: Server) -> None:
    answer = server.post({"messages": MESSAGES, "timeout": 0.2, **FREE})
    assert_refused(answer, 408, None)
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    assert eventually(server.is_idle, 1.0)


def test_a_stream_out_of_time_ends_with_an_error_and_without_done(server: Server) -> None:
    text = server.post({"messages": MESSAGES, "timeout": 0.5, "stream": True, **FREE}).text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert len(events) > 2
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in text
    assert eventually(server.is_idle, 1.0)


def test_time_spent_waiting_counts(server: Server) -> None:
    with server.stream({"messages": MESSAGES, "stream": True, **FREE}):
        started = time.monotonic()
        assert_refused(
            server.post({"messages": MESSAGES, "max_tokens": 1, "timeout": 0.3}), 408, None
        )
        assert 0.3 <= time.monotonic() - started < 2.0
    assert eventually(server.is_idle)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "change",
    [{"timeout": 0}, {"timeout": -1}, {"timeout": "1"}, {"priority": 10**6}, {"priority": -11}],
)
def test_a_time_or_a_priority_that_cannot_be_is_a_400(
    server: Server, path: str, change: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "x"}
    assert_refused(server.post(body | change, path), 400, next(iter(change)))


# Priorities


def test_no_request_is_more_urgent_than_the_operator_allows(server: Server) -> None:
    answer = server.post({"messages": MESSAGES, "max_tokens": 1, "priority": -11})
    assert "server accepts is -10" in answer.json()["error"]["message"]
    responses = server.post(
        {"input": "x", "max_output_tokens": 1, "priority": -11}, "/v1/responses"
    )
    assert_refused(responses, 400, "priority")
    assert server.post({"messages": MESSAGES, "max_tokens": 1, "priority": -10}).status_code == 200


def test_of_those_that_wait_the_more_urgent_runs_first(server: Server) -> None:
    ended: list[int] = []

    def ask(priority: int) -> None:
        server.post({"messages": MESSAGES, "max_tokens": 8, "priority": priority, **FREE})
        ended.append(priority)

    urgent = {"messages": MESSAGES, "stream": True, "priority": -10, **FREE}
    with ThreadPoolExecutor() as pool, server.stream(urgent):
        for num_waiting, priority in enumerate((5, 0, -5), start=1):
            pool.submit(ask, priority)
            assert eventually(lambda n=num_waiting: server.stats()["num_waiting"] == n)  # type: ignore[misc]
        assert ended == []
    assert ended == [-5, 0, 5]


# The log


def test_every_request_is_one_line_of_the_log_with_its_id_and_without_its_words(
    server: Server, log_file: Path
) -> None:
    ids = {"x-request-id": "trace-me"}
    body = {"prompt": f"{SECRET} is what I say", "max_tokens": 3, "stream": True, **FREE}
    server.http.post(f"{server.url}/v1/completions", headers=ids, json=body)
    server.http.post(
        f"{server.url}/v1/completions", headers=ids, json={"prompt": [SECRET], "n": "x"}
    )
    server.http.get(f"{server.url}/no/such%0apath?{SECRET}", headers=ids)
    server.http.get(f"{server.url}/health", headers=ids)

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in log_file.read_text().splitlines()]
        return [line for line in found if line.get("id") == "trace-me"]

    assert eventually(lambda: len(lines()) >= 3)
    # A stream's line is written after its client has read it, maybe after the next request's.
    good, wrong, missing = sorted(lines(), key=lambda line: line["status"])
    assert (good["route"], good["status"], good["completion_tokens"]) == ("/v1/completions", 200, 3)
    assert good["prompt_tokens"] > 0
    assert good["ms"] > 0
    assert len(good["reply_id"]) == 32
    assert (wrong["status"], missing["status"]) == (400, 404)
    assert SECRET not in log_file.read_text()


# SageMaker


def test_an_invocation_is_what_its_shape_says(server: Server) -> None:
    no_thinking = {"prompt": "Once", "thinking": {"type": "disabled"}}
    for change in ({"prompt": "Once"}, no_thinking, {"messages": MESSAGES, "thinking": True}):
        body = {"max_tokens": 6, **FREE, **change}
        same = "/v1/completions" if "prompt" in change else "/v1/chat/completions"
        invoked, direct = server.post(body, "/invocations").json(), server.post(body, same).json()
        assert (invoked["object"], invoked["choices"]) == (direct["object"], direct["choices"])
        assert server.post({**body, "stream": True}, "/invocations").text.endswith(
            "data: [DONE]\n\n"
        )


def test_an_invocation_thinks_only_on_request(server: Server) -> None:
    def num_prompt_tokens(path: str, **fields: Any) -> int:
        answer = server.post({"max_tokens": 2, **FREE, **fields}, path)
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    chat = {"messages": MESSAGES}
    on, off = (
        num_prompt_tokens("/v1/chat/completions", **chat, thinking=flag) for flag in (True, False)
    )
    assert on != off
    assert num_prompt_tokens("/invocations", **chat) == off
    assert num_prompt_tokens("/invocations", **chat, thinking=False) == off
    for asked in (
        {"thinking": True},
        {"thinking": {"type": "enabled"}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ):
        assert num_prompt_tokens("/invocations", **chat, **asked) == on
    prompt = MESSAGES[0]["content"]
    assert num_prompt_tokens("/invocations", prompt=prompt, thinking=True) == on
    for declined in (False, {"type": "disabled"}):
        assert num_prompt_tokens("/invocations", prompt=prompt, thinking=declined) < off


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": MESSAGES}, {"prompt": None}])
def test_an_invocation_without_a_shape_is_a_400(server: Server, body: dict[str, Any]) -> None:
    assert_refused(server.post(body, "/invocations"), 400, "prompt")


# Abusive connections


HEAD = b"POST %b HTTP/1.1\r\nHost: localhost\r\n"
HALF_SENT = {  # and the response to such a client
    b"": b"408",
    b"POST /v1/chat/comp": b"408",
    HEAD % b"/v1/chat/completions" + b"X-Slow: ": b"408",
    HEAD % b"/v1/chat/completions" + b"Content-Length: 100\r\n\r\n{": b"408",
    HEAD % b"/v1/messages" + b"Content-Length: 100\r\n\r\n{": b"408",
    HEAD % b"/v1/completions" + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n": b"408",
    HEAD % b"/nothing" + b"Content-Length: 100\r\n\r\n{": b"404",
}


def test_half_sent_requests_are_cut_off_and_delay_no_other(server: Server) -> None:
    started = time.monotonic()
    with contextlib.ExitStack() as opened:
        connections = [
            opened.enter_context(socket.create_connection(server.address)) for _ in HALF_SENT
        ]
        for connection, data in zip(connections, HALF_SENT):
            connection.sendall(data)
        assert server.post({"messages": MESSAGES, "max_tokens": 2}).status_code == 200
        for connection, status in zip(connections, HALF_SENT.values()):
            assert read_all(connection).startswith(b"HTTP/1.1 " + status)
    assert READ_TIMEOUT_S <= time.monotonic() - started < READ_TIMEOUT_S + 3.0


def test_dripping_bytes_buy_no_time(server: Server) -> None:
    with socket.create_connection(server.address) as connection:
        started = time.monotonic()
        connection.sendall(HEAD % b"/v1/messages" + b"Content-Length: 9999\r\n\r\n")
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 10.0:
                connection.sendall(b" ")
                time.sleep(0.1)
    assert time.monotonic() - started < READ_TIMEOUT_S + 3.0


OVERSIZED = {
    "a long header": [HEAD % b"/v1/completions" + b"X: ", b"x" * 5 * 2**20],
    "many headers": [HEAD % b"/v1/completions", b"X: y\r\n" * 100_000],
    "a long path": [b"GET /", b"x" * 2**20],
    "a long trailer": [
        HEAD % b"/health" + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ",
        b"x" * 5 * 2**20,
    ],
    "chunks of frames": [
        HEAD % b"/v1/completions" + b"Transfer-Encoding: chunked\r\n\r\n",
        (b"1;" + b"x" * 1000 + b"\r\n \r\n") * 5000,
    ],
    "a large body": [
        HEAD % b"/v1/completions" + b"Content-Length: 104857600\r\n\r\n",
        b" " * 2**20,
    ],
    "a large body in chunks": [
        HEAD % b"/v1/completions" + b"Transfer-Encoding: chunked\r\n\r\n",
        (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 40,
    ],
    "a length and chunks": [
        HEAD % b"/v1/completions" + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"0\r\n\r\n",
    ],
    "two lengths": [
        HEAD % b"/v1/completions" + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"{}",
    ],
    "no HTTP": [b"\x16\x03\x01" * 100, b"\0" * 1000],
}


@pytest.mark.parametrize("name", OVERSIZED)
def test_what_no_client_sends_is_cut_off_at_once(server: Server, name: str) -> None:
    started = time.monotonic()
    with socket.create_connection(server.address) as connection:
        with contextlib.suppress(OSError):
            for data in OVERSIZED[name]:
                connection.sendall(data)
        answer = read_all(connection)
    assert time.monotonic() - started < READ_TIMEOUT_S  # not the clock's doing
    statuses = re.findall(rb"^HTTP/1.1 (\d+)", answer, re.MULTILINE)
    assert len(statuses) <= 1
    assert set(statuses) <= {b"400", b"405", b"413", b"431"}
    assert server.health().status_code == 200


def read_all(connection: socket.socket) -> bytes:
    """Reads until the server closes, which it may do before it has read all that was sent."""
    connection.settimeout(10.0)
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            data += piece
    return data
