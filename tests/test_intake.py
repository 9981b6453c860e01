"""Limits of requests that are being read and prepared: slots, bytes, and latency of others."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from penstock.config import ServeConfig
from penstock.errors import DeadlineError, OverloadedError
from penstock.serve.answer import Answer, Start
from penstock.serve.intake import LARGE_BODY_BYTES, SLOW_BYTES_PER_S, SLOW_S, Intake, place_of
from penstock.serve.metrics import Metrics
from penstock.serve.responses.items import Item
from penstock.serve.responses.routes import ResponsesRoutes
from penstock.serve.responses.store import ResponseStore
from penstock.serve.state import ServerState
from penstock.serve.text_stream import Deliver, TextStream
from penstock.text.turns import CHEAP, Preparation
from serving import (
    MESSAGES,
    Server,
    assert_refused,
    child_pids,
    command_of,
    eventually,
    start_server,
)
from two_layers import two_layers

MAX_QUEUE = 4
MB = 1024**2


# Slots and bytes


def intake_of(**settings: Any) -> Intake:
    return Intake(ServeConfig(**settings))


def is_empty(intake: Intake) -> bool:
    bodies = intake.bodies
    return not (
        intake.replies.taken or intake.counts.taken or bodies.num_bytes or bodies._num_large
    )


def test_a_tenants_places_are_counted_as_its_own() -> None:
    intake = intake_of(max_queue=3)
    places = [intake.reserve(tenant) for tenant in "aab"]
    assert intake.replies.taken == {"a": 2, "b": 1}
    with pytest.raises(OverloadedError, match="full"):
        intake.reserve("a")
    intake.reserve("c").release()  # a third of them is its share, however full the queue is
    places[0].release()
    places[0].release()
    intake.reserve("a").release()
    for place in places:
        place.release()
    assert is_empty(intake)


def test_bodies_hold_no_more_bytes_than_are_allowed_together() -> None:
    intake = intake_of(max_bodies_mb=4, max_body_mb=1)
    places = [intake.reserve("") for _ in range(6)]
    for place in places[:4]:
        place.add_bytes(MB)
    with pytest.raises(OverloadedError, match="same time"):
        places[4].add_bytes(1)
    places[4].add_bytes(0)
    places[0].hand_over(1)  # its body is not needed any more
    places[4].add_bytes(MB)
    for place in places:
        place.release()
    intake.replies.release("")
    assert is_empty(intake)


def test_large_bodies_leave_half_of_the_places_and_of_the_bytes_to_small_ones() -> None:
    intake = intake_of(max_queue=4, max_bodies_mb=64, max_body_mb=8)
    large = [intake.reserve("") for _ in range(2)]
    for place in large:
        place.add_bytes(8 * MB)
    third = intake.reserve("")
    third.add_bytes(LARGE_BODY_BYTES)
    with pytest.raises(OverloadedError):  # though there are bytes and places
        third.add_bytes(1)
    third.release()
    large[0].hand_over(1)
    intake.reserve("").add_bytes(8 * MB)  # one that runs is no longer in the way

    intake = intake_of(max_bodies_mb=64, max_body_mb=8)
    for _ in range(4):
        intake.reserve("").add_bytes(8 * MB)
    with pytest.raises(OverloadedError):
        intake.reserve("").add_bytes(8 * MB)
    intake.reserve("").add_bytes(LARGE_BODY_BYTES)


def test_the_largest_body_that_is_allowed_always_fits_an_idle_server() -> None:
    for settings in ({"max_bodies_mb": 1, "max_body_mb": 32}, {"max_queue": 1}):
        intake = intake_of(**settings)
        intake.reserve("").add_bytes(32 * MB)


def test_bodies_that_come_slowly_lose_their_room_when_others_need_it_and_not_before() -> None:
    now = 0.0
    intake = Intake(ServeConfig(max_queue=3), lambda: now)
    slow, fast, new = (intake.reserve("") for _ in range(3))
    stopped = []
    with (
        slow.reading(lambda: stopped.append("slow")),
        fast.reading(lambda: stopped.append("fast")),
        new.reading(lambda: stopped.append("new")),
    ):
        slow.receive(100)
        now = SLOW_S * 0.9
        with pytest.raises(OverloadedError):
            intake.reserve("")
        now, new.began_at = 10 * SLOW_S, 9.5 * SLOW_S
        fast.receive(int(SLOW_BYTES_PER_S * 9.5 * SLOW_S))
        assert not stopped, "there is no need"
        other = intake.reserve("")
        assert stopped == ["slow"]
        assert intake.replies.taken == {"": 3}
        with pytest.raises(OverloadedError, match="slowly"):
            slow.receive(1)
        with pytest.raises(OverloadedError):
            intake.reserve("")
        assert stopped == ["slow"]
    assert not intake.readers
    for place in (slow, fast, new, other):
        place.release()
    assert is_empty(intake)


def test_bytes_that_are_declared_and_never_come_block_others_only_briefly() -> None:
    now = 0.0
    intake = Intake(ServeConfig(max_bodies_mb=64, max_body_mb=32), lambda: now)
    places = [intake.reserve("") for _ in range(3)]
    stopped = []
    places[0].add_bytes(32 * MB)
    with places[0].reading(lambda: stopped.append(0)):
        with pytest.raises(OverloadedError):
            places[1].add_bytes(32 * MB)
        now = 2 * SLOW_S
        places[1].add_bytes(32 * MB)
        assert stopped == [0]
        with places[1].reading(lambda: stopped.append(1)), pytest.raises(OverloadedError):
            places[1].add_bytes(33 * MB)  # not evicted for its own bytes
        assert stopped == [0]


# Preparation


def test_a_client_that_leaves_holds_what_it_has_until_its_work_is_done() -> None:
    async def scenario() -> None:
        preparation = Preparation(1)
        may_end, has_ended = threading.Event(), threading.Event()

        def work() -> None:
            may_end.wait(10.0)
            has_ended.set()

        running = asyncio.create_task(preparation.run(1, work))
        waiting = asyncio.create_task(
            preparation.run(1, pytest.fail, "nobody waits for it any more")
        )
        await asyncio.sleep(0.05)
        running.cancel()
        waiting.cancel()
        await asyncio.sleep(0.05)
        assert waiting.done()
        assert not running.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert has_ended.is_set()
        assert await preparation.run(1, lambda: "next") == "next"

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_cheap_requests_are_prepared_while_expensive_ones_are() -> None:
    async def scenario() -> None:
        preparation = Preparation(2)
        may_end = threading.Event()
        expensive = [
            asyncio.create_task(preparation.run(10 * CHEAP, may_end.wait, 10.0)) for _ in range(5)
        ]
        await asyncio.sleep(0.05)
        for number in range(3):
            assert await asyncio.wait_for(preparation.run(100, lambda n=number: n), 5.0) == number
        assert not any(task.done() for task in expensive)
        may_end.set()
        assert all(await asyncio.gather(*expensive))

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_a_requests_time_includes_its_preparation() -> None:
    async def start(deliver: Deliver) -> TextStream:
        await asyncio.sleep(60.0)
        raise AssertionError("unreachable")

    async def answer() -> None:
        app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace()))
        app.state.server.draining = asyncio.Event()
        app.state.server.config = ServeConfig(request_timeout=9.0)
        formatter: Any = SimpleNamespace()
        await Answer(start, formatter, False, 0.05)({"app": app}, asyncio.Event().wait, formatter)  # type: ignore[arg-type]

    with pytest.raises(DeadlineError, match=r"0\.05 seconds"):
        asyncio.run(asyncio.wait_for(answer(), 5.0))


def test_what_was_asked_does_not_stay_in_memory_while_the_reply_is_generated() -> None:
    class Asked:
        """A long chat."""

    async def scenario() -> None:
        asked = Asked()
        still_there = weakref.ref(asked)
        formatter: Any = SimpleNamespace(encode_body=lambda *_: b"{}")

        def start_of(asked: Asked) -> Start:
            async def start(deliver: Deliver) -> TextStream:
                assert asked
                return TextStream(SimpleNamespace(abort=print), deliver)  # type: ignore[arg-type]

            return start

        state = SimpleNamespace(draining=asyncio.Event(), config=ServeConfig())
        scope = {
            "app": SimpleNamespace(state=SimpleNamespace(server=state)),
            "record": SimpleNamespace(),
        }
        answer = Answer(start_of(asked), formatter, False)
        answering = asyncio.create_task(answer(scope, asyncio.Event().wait, formatter))  # type: ignore[arg-type]
        del asked
        await asyncio.sleep(0.05)
        gc.collect()
        assert not answering.done()
        assert still_there() is None
        answering.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": "x", "previous_response_id": "resp_long"}',
        b'{"input": "x", "conversation": "conv_long"}',
        b'{"input": [{"type": "item_reference", "id": "msg_long"}]}',
    ],
)
def test_the_conversation_that_a_response_goes_on_from_counts_as_if_it_had_been_sent(
    body: bytes,
) -> None:
    config = ServeConfig(max_bodies_mb=0.001, max_body_mb=0.001)
    client: Any = SimpleNamespace(intake=Intake(config))
    state = ServerState(client, SimpleNamespace(), Metrics(), "tiny", config, 0)  # type: ignore[arg-type]
    store = ResponseStore()
    api = ResponsesRoutes(state, store)
    for id in ("resp_long", "conv_long"):
        store.keep(id, b"{}", [Item(role="user", content="x" * 1000, id="msg_long")], num_inputs=0)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    app = SimpleNamespace(state=SimpleNamespace(server=state))
    scope: dict[str, Any] = {"type": "http", "headers": [], "app": app, "request_id": "id"}
    with pytest.raises(OverloadedError, match="same time"):
        asyncio.run(api.respond(Request(scope, receive)))
    place_of(scope).release()
    assert is_empty(client.intake)


# A server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server({"model": two_layers()}, {"max_queue": MAX_QUEUE}) as running:
        yield running


def peak_mb(server: Server) -> float:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def post_raw(server: Server, body: bytes) -> tuple[int, bytes]:
    """Status and headers; a refusal may come before the whole body was sent."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(server.address, timeout=60) as connection:
        try:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
            connection.sendall(body)
        except OSError:
            pass
        answer = connection.recv(2**16)
    return int(answer.split(b" ", 2)[1]), answer.lower()


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_many_large_bodies_take_little_memory_and_delay_no_other_request(
    server: Server, field: str
) -> None:
    """Only the template knows that it ignores the second field, so each body is rendered."""
    text = "The river carries water. " * (10 * MB // 25)
    said = {"role": "assistant", "content": "x"} | {field: text}
    body = json.dumps({"messages": [*MESSAGES, said, *MESSAGES], "max_tokens": 1}).encode()
    before_mb = peak_mb(server)
    answered: Counter[int] = Counter()
    waits = []
    with ThreadPoolExecutor(30) as clients:
        posted = [clients.submit(post_raw, server, body) for _ in range(30)]
        while not all(future.done() for future in posted):
            started = time.monotonic()
            assert server.post({"messages": MESSAGES, "max_tokens": 1}).status_code == 200
            waits.append(time.monotonic() - started)
        for future in posted:
            status, answer = future.result()
            answered[status] += 1
            assert status != 429 or b"retry-after: 1" in answer
    assert set(answered) <= {200, 400, 429}
    assert answered[429] > 10
    assert max(waits) < 5.0  # a fraction of it on an idle machine
    assert peak_mb(server) - before_mb < 200.0  # more than 600 without slots
    assert eventually(server.is_idle)
    assert server.post({"messages": MESSAGES, "n": MAX_QUEUE, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "message"),
    [
        ("/v1/chat/completions", "messages", "…"),
        ("/v1/completions", "prompt", None),
        ("/v1/responses", "input", None),
        ("/v1/messages", "messages", "…"),
        ("/invocations", "prompt", None),
    ],
)
def test_what_cannot_fit_the_context_is_refused_in_every_api(
    server: Server, path: str, field: str, message: str | None
) -> None:
    text = "word " * 10**6
    value: Any = text if message is None else [{"role": "user", "content": text}]
    body = {field: value, "max_output_tokens" if path == "/v1/responses" else "max_tokens": 1}
    answer = server.post(body, path)
    if path == "/v1/messages":
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
    else:
        assert_refused(answer, 400, field)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "prompt is too long: at least" in answer.text


def test_a_place_is_free_again_however_a_request_ended(server: Server) -> None:
    for _ in range(2 * MAX_QUEUE):
        assert server.post("no object").status_code == 400
        with socket.create_connection(server.address) as connection:  # it never sends its body
            connection.sendall(
                b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
            )
    ask = {"messages": MESSAGES, "n": MAX_QUEUE, "max_tokens": 1}
    assert eventually(lambda: server.post(ask).status_code == 200)


def test_a_slow_sender_holds_a_place_from_its_head_on_until_others_need_it(
    server: Server,
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    small = {"messages": MESSAGES, "max_tokens": 1}
    connections: list[socket.socket] = []

    def is_refused_after_another() -> bool:
        connections.append(socket.create_connection(server.address))
        connections[-1].sendall(head)
        return server.post(small).status_code == 429

    try:
        assert eventually(is_refused_after_another)
        assert len(connections) >= MAX_QUEUE
        assert server.post({"prompt": "x"}, "/tokenize").status_code == 200
        assert eventually(lambda: server.post(small).status_code == 200), "they have had their time"
        connections[0].settimeout(10.0)
        answer = connections[0].recv(2**16)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in answer
        assert b"arrived slowly" in answer
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_chat_survives_the_process_that_renders_it(
    server: Server, number: signal.Signals
) -> None:
    children = child_pids(server.process.pid)
    renderers = [pid for pid in children if b"template_worker" in command_of(pid)]
    assert renderers
    for pid in renderers:
        os.kill(pid, number)
    assert server.post({"messages": MESSAGES, "max_tokens": 1}).status_code == 200
