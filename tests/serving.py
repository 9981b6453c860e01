"""A real server for tests: a process, a free port, the tiny model on a CPU, started on first use.

This file is also the program of that process; it reports its phases as JSON lines on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx

import nursery
from nursery import start_forked

if TYPE_CHECKING:
    import openai

    Process = subprocess.Popen[str] | nursery.Child

REPOSITORY = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 120.0
MAX_QUEUE = 32  # of the shared test server
TINY_ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "page_size": 16,
    "memory_gb": 0.05,
    "max_model_len": 4096,
}
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about rivers."}]
# The tiny model has random weights, so only max_tokens ends its replies.
FREE = {"ignore_eos": True}


class Server:
    """A server process and its output so far."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.url = ""
        self.phases: list[dict[str, Any]] = []
        self.http = httpx.Client(timeout=60.0)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read_phases, daemon=True).start()

    def _read_phases(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_phase(self, name: str) -> dict[str, Any]:
        """Waits until the server has written this; fails if it exits before."""
        while True:
            line = self._lines.get(timeout=START_TIMEOUT_S)
            assert line is not None, f"the server ended before {name!r}, after {self.phases}"
            phase = json.loads(line)
            self.phases.append(phase)
            if phase["name"] == "listening":
                self.url = phase["detail"]
            if phase["name"] == name:
                return phase

    @property
    def engine_pid(self) -> int:
        (engine,) = self.engine_pids
        return engine

    @property
    def engine_pids(self) -> list[int]:
        """The server's other child process, which runs chat templates."""
        return engine_pids_of(self.process.pid)

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def health(self) -> httpx.Response:
        return self.http.get(f"{self.url}/health")

    def post(self, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
        return self.http.post(f"{self.url}{path}", content=json.dumps(body))

    @contextlib.contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        """Streams a chat; the first of its lines has arrived."""
        with self.http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            yield lines

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] | None = None
        while stats is None:  # null while the engine runs a long step
            stats = self.health().json()["stats"]
        return stats

    def is_idle(self) -> bool:
        stats = self.stats()
        pages_back = stats["num_free_pages"] == stats["num_pages"] - 1  # page 0 is never allocated
        return pages_back and stats["num_running"] == 0 and stats["num_waiting"] == 0

    def end_sessions(self) -> None:
        """Ends all sessions: they keep pages until then."""
        for session in self.http.get(f"{self.url}/v1/sessions").json()["data"]:
            self.http.delete(f"{self.url}/v1/sessions/{session['id']}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=40.0)


@contextlib.contextmanager
def start_server(
    engine: dict[str, Any] | None = None,
    serve: dict[str, Any] | None = None,
    wait_for: str = "ready",
    log: IO[str] | None = None,  # for its stderr; None: inherited
    max_files: int | None = None,  # limit of open files
    path: Path | None = None,  # additional module path of server and engines
    forked: bool = True,  # from a process that has imported torch
) -> Iterator[Server]:
    settings = {"engine": {**TINY_ENGINE, **(engine or {})}, "serve": {"port": 0, **(serve or {})}}
    command = [sys.executable, __file__, json.dumps(settings)]
    process: Process | None = None
    if forked and wait_for == "ready" and max_files is None and path is None:
        process = start_forked(command, log)
    if process is None:
        process = _start_executed(command, log, max_files, path)
    server = Server(process)
    try:
        server.wait_phase(wait_for)
        yield server
        server.stop()
    finally:
        server.http.close()
        process.kill()
        process.wait()


def _start_executed(
    command: list[str], log: IO[str] | None, max_files: int | None, path: Path | None
) -> subprocess.Popen[str]:
    limit = [] if max_files is None else ["bash", "-c", f'ulimit -n {max_files}; exec "$@"', "bash"]
    folders = [REPOSITORY] if path is None else [REPOSITORY, path]
    return subprocess.Popen(
        [*limit, *command],
        stdin=subprocess.DEVNULL,  # no terminal, even if the tests run in one
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "OMP_NUM_THREADS": "1",
        },
    )


def ask(api: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "any", "messages": MESSAGES, "max_tokens": 12, "extra_body": FREE} | fields
    return api.chat.completions.create(**fields)


def assert_refused(answer: httpx.Response, status: int, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["param"] == param, error
    assert error["message"]
    assert "Traceback" not in answer.text
    assert answer.headers["x-request-id"]


def engine_pids_of(server_pid: int) -> list[int]:
    return [pid for pid in child_pids(server_pid) if b"penstock.engine.worker" in command_of(pid)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:  # the process has ended meanwhile
        return b""


def child_pids(pid: int) -> list[int]:
    """Children of all threads of the process: each thread lists those that it started."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            children += map(int, file.read_text().split())
    return children


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Whether the condition becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def main() -> int:
    from penstock.config import EngineConfig, ServeConfig, from_mapping
    from penstock.errors import PenstockError
    from penstock.progress import Phase
    from penstock.serve.request_log import configure_log
    from penstock.serve.server import run

    def say(phase: Phase) -> None:
        fields = {"name": phase.name, "detail": phase.detail, "seconds": phase.seconds}
        print(json.dumps(fields), flush=True)

    if nursery.is_forked:
        nursery.fork_engines()
    settings = json.loads(sys.argv[1])
    try:
        given = {
            name: tuple(v) if isinstance(v, list) else v for name, v in settings["serve"].items()
        }
        serve_config: ServeConfig = from_mapping(ServeConfig, given)
        configure_log(serve_config.log_format)
        run(EngineConfig(**settings["engine"]), serve_config, say)
    except PenstockError as error:
        say(Phase("failed", f"{type(error).__name__}: {error.what}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
