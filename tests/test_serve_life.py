"""Start, shutdown and failures: signals, dead processes, busy ports, engines that cannot start."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import tempfile
from pathlib import Path

import openai
import pytest

from penstock import wire
from penstock.config import EngineConfig
from penstock.errors import ConfigError, ContextLengthError, EngineDeadError, ModelNotFoundError
from penstock.serve import client as client_module
from penstock.serve.client import EngineClient
from penstock.serve.connection import allow_many_files
from penstock.serve.server import open_port
from penstock.types import Request, SamplingParams, TokenDelta
from serving import (
    FREE,
    MESSAGES,
    TINY_ENGINE,
    ask,
    assert_refused,
    eventually,
    is_alive,
    start_server,
)


def test_health_and_requests_are_503_until_the_engine_is_warm_and_sigterm_lets_replies_end() -> (
    None
):
    with start_server(wait_for="libraries") as server:
        starting = server.health()
        assert starting.status_code == 503
        assert starting.json()["status"] == "starting"
        assert starting.json()["phase"]["name"]
        early = server.post({"messages": MESSAGES})
        assert_refused(early, 503, None)
        assert early.headers["retry-after"]
        server.wait_phase("ready")
        assert server.health().json()["status"] == "ok"

        assert server.http.get(f"{server.url}/ready").status_code == 200

        engine_pid = server.engine_pid
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 150, **FREE}
        with server.stream(body) as lines:
            server.process.send_signal(signal.SIGTERM)
            assert eventually(
                lambda: server.http.get(f"{server.url}/ready").status_code == 503, 2.0
            )
            assert_refused(server.post({"messages": MESSAGES}), 503, None)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(timeout=10.0) == 0
        assert not is_alive(engine_pid)


def test_a_second_signal_ends_server_and_engine_at_once() -> None:
    with start_server() as server:
        engine_pid = server.engine_pid
        body = {"messages": MESSAGES, "stream": True, **FREE}
        with server.stream(body):
            server.process.send_signal(signal.SIGINT)
            assert eventually(
                lambda: server.http.get(f"{server.url}/ready").status_code == 503, 2.0
            )
            server.process.send_signal(signal.SIGINT)
            server.process.wait(timeout=3.0)
        assert not is_alive(engine_pid)


def test_without_an_engine_health_is_503_and_a_stream_that_waits_too_long_ends_with_an_error() -> (
    None
):
    with start_server(serve={"resume_timeout": 0.3}, forked=False) as server:
        body = {"messages": MESSAGES, "stream": True, **FREE}
        with server.stream(body) as lines:
            os.kill(server.engine_pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert "data: [DONE]" not in rest
        health = server.health()
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        (replica,) = health.json()["replicas"]
        assert replica["problem"] == "The engine process ended (killed by SIGKILL)"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client)
        assert caught.value.status_code == 503
        assert eventually(lambda: server.health().status_code == 200, 60.0)
        ask(client)
        server.stop()
        assert server.process.returncode == 0


def test_a_killed_server_leaves_no_engine_behind_even_one_that_is_loading() -> None:
    with start_server(wait_for="libraries") as server:
        engine_pid = server.engine_pid
        server.process.kill()
        assert eventually(lambda: not is_alive(engine_pid), 5.0)


def test_a_model_that_does_not_exist_ends_the_server_with_its_own_error() -> None:
    with start_server(engine={"model": "no-such-model"}, wait_for="failed") as server:
        assert "ModelNotFoundError" in server.phases[-1]["detail"]
        assert server.process.wait(timeout=10.0) == 1


def test_a_busy_port_is_refused_with_what_to_do() -> None:
    with open_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port} is in use") as caught:
            open_port("127.0.0.1", port)
    assert "--port" in caught.value.todo
    with pytest.raises(ConfigError):
        open_port("127.0.0.1", 70_000)


class Listener:
    """Receives one request; with `max_deltas`, it fails when it gets more."""

    def __init__(self, max_deltas: int | None = None) -> None:
        self.deltas: list[TokenDelta] = []
        self.error: Exception | None = None
        self.ended = asyncio.Event()
        self._max_deltas = max_deltas

    def take(self, delta: TokenDelta) -> None:
        if len(self.deltas) == self._max_deltas:
            raise ZeroDivisionError
        self.deltas.append(delta)
        if delta.finish is not None:
            self.ended.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ended.set()


def test_a_request_that_is_refused_or_a_receiver_that_breaks_ends_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def scenario() -> None:
        config = EngineConfig(**TINY_ENGINE)
        client = await EngineClient.launch(config, on_phase=lambda _: None)
        try:
            info = await client.wait_ready()
            good, refused, broken = Listener(), Listener(), Listener(max_deltas=2)
            requests = [
                (Request(id="broken", token_ids=(5,)), broken),
                (Request(id="refused", token_ids=(5,) * info.max_model_len), refused),
                (Request(id="good", token_ids=(5, 6), sampling=SamplingParams(max_tokens=9)), good),
            ]
            client.submit(requests)
            for listener in (good, refused, broken):
                await asyncio.wait_for(listener.ended.wait(), 30)
            assert sum(len(delta.token_ids) for delta in good.deltas) == 9
            assert (good.deltas[-1].finish, good.error) == ("length", None)
            assert isinstance(refused.error, ContextLengthError)
            assert refused.error.param == "prompt"
            assert isinstance(broken.error, ZeroDivisionError)
            assert len(broken.deltas) == 2
            assert client.num_outstanding == 0
            stats = await client.stats()
            assert stats.num_running == 0
            assert stats.num_free_pages == stats.num_pages - 1
            await assert_a_killed_engine_is_not_heard(client)
        finally:
            await client.close()

    asyncio.run(scenario())


async def assert_a_killed_engine_is_not_heard(client: EngineClient) -> None:
    """What the engine sent before it died is dropped if it was not read yet."""
    client.ping()
    last = Listener()
    client.submit(
        [(Request(id="last", token_ids=(5,), sampling=SamplingParams(max_tokens=500)), last)]
    )
    while not last.deltas:
        await asyncio.sleep(0.01)
    assert client.num_unanswered_pings == 0
    os.kill(client.pid, signal.SIGSTOP)
    client.kill(EngineDeadError("it hung"))
    num_deltas = len(last.deltas)
    await asyncio.wait_for(client.wait_dead(1.0), 2.0)
    await asyncio.sleep(0.2)
    assert not is_alive(client.pid)
    assert len(last.deltas) == num_deltas
    assert isinstance(last.error, EngineDeadError)


def test_a_signal_while_the_server_starts_ends_it_in_good_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        with start_server(wait_for="listening") as server:
            server.process.send_signal(signal.SIGHUP)  # no reason to end: the engines will be new
            assert eventually(lambda: bool(os.listdir(folder)))  # the engine's socket
            engine_pids = server.engine_pids
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=10.0) == 0
            assert os.listdir(folder) == []
            assert eventually(lambda: not any(map(is_alive, engine_pids)), 5.0)


def test_without_a_folder_for_its_socket_an_engine_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with client_module._socket_path() as path:
        folder = Path(path).parent
        assert folder.parent == Path("/tmp")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    long_folder = tmp_path / ("x" * 100)
    long_folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    monkeypatch.setattr(wire, "MAX_SOCKET_FOLDER_BYTES", 1000)
    with pytest.raises(EngineDeadError, match="too long") as caught:
        asyncio.run(EngineClient.launch(EngineConfig(), on_phase=lambda _: None))
    assert "TMPDIR" in caught.value.todo


def test_an_engine_that_cannot_start_tells_its_client_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TMPDIR path that is too long for a socket must not prevent the start."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    (tmp_path / ("x" * 100)).mkdir()

    async def scenario() -> None:
        config = EngineConfig(model="no-such-model")
        client = await EngineClient.launch(config, on_phase=lambda _: None)
        with pytest.raises(ModelNotFoundError, match="no-such-model"):
            await client.wait_ready()
        await client.close()

    asyncio.run(scenario())


def test_a_server_may_open_as_many_connections_as_the_hard_limit_has() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
