"""start_server.sh and stop_server.sh: output and files, also after errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.text.tokenizer import Tokenizer
from sampled_model import SAMPLED, write_sampled_model
from serving import REPOSITORY, child_pids, command_of, engine_pids_of, eventually, is_alive
from thinking_template import write_thinking_template

pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".venv/bin/penstock").exists(), reason="the scripts would install first"
)
FLAGS = ("--device", "cpu", "--memory-gb", "0.05", "--max-model-len", "1024")


class Scripts:
    """The scripts with a run folder and a port of their own."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "RUN_DIR": str(self.run_dir), "OMP_NUM_THREADS": "1"}

    @property
    def _pid_file(self) -> Path:
        return self.run_dir / f"server-{self.port}.pid"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return self._run("./start_server.sh", *FLAGS, *flags)

    def stop(self) -> subprocess.CompletedProcess[str]:
        return self._run("./stop_server.sh")

    def _run(self, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [script, "--port", str(self.port), *flags],
            cwd=REPOSITORY,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def begin(self) -> subprocess.Popen[str]:
        """Starts a script without waiting for it, in a process group of its own."""
        return subprocess.Popen(
            ["env", "--default-signal=INT", "./start_server.sh", "--port", str(self.port), *FLAGS],
            cwd=REPOSITORY,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def has_supervisor(self) -> bool:
        return bool(self._pid_file.exists() and self._pid_file.read_text().strip())

    @property
    def supervisor_pid(self) -> int:
        return int(self._pid_file.read_text())

    @property
    def server_pid(self) -> int | None:
        """None while the supervisor has no server, or sleeps before the next one."""
        found = [pid for pid in child_pids(self.supervisor_pid) if b"penstock" in command_of(pid)]
        return found[0] if found else None

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    found = Scripts(tmp_path)
    yield found
    found.stop()


def start_thinker(scripts: Scripts, folder: Path, *flags: str) -> str:
    """Starts a model that thinks and has sampling defaults; returns the script's output."""
    template, model = write_thinking_template(folder), folder / "model"
    model.mkdir()
    words = ["--model", str(write_sampled_model(model)), "--chat-template", str(template)]
    started = scripts.start(*words, *flags)
    assert started.returncode == 0, started.stderr
    return started.stdout


def check_reply(scripts: Scripts, *, is_told: bool) -> None:
    sampling = httpx.get(f"{scripts.url}/health").json()["sampling"]
    assert sampling["temperature"] == (SAMPLED["temperature"] if is_told else 0)
    body = {"messages": [{"role": "user", "content": "What is 17 + 26?"}], "max_tokens": 64}
    reply = httpx.post(f"{scripts.url}/v1/chat/completions", json=body, timeout=60.0).json()
    message, usage = reply["choices"][0]["message"], reply["usage"]
    assert bool(message.get("reasoning_content")) == is_told
    if not is_told:
        assert (
            usage["completion_tokens"] == len(Tokenizer.load(None).encode(message["content"])) > 0
        )


def test_replies_are_sampled_and_thought_about_if_the_script_sets_that(
    scripts: Scripts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("thinker")
    start_thinker(scripts, folder, "--enable-thinking", "--generation-config", "auto")
    check_reply(scripts, is_told=True)


def test_a_server_is_started_once_comes_back_when_killed_and_is_stopped_once(
    scripts: Scripts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also checks that its replies are greedy and without thinking: starting a server takes
    seconds.
    """
    said = start_thinker(scripts, tmp_path_factory.mktemp("thinker"))
    assert f"Ready at {scripts.url}" in said
    assert scripts.is_ready()
    check_reply(scripts, is_told=False)

    again = scripts.start()
    assert again.returncode == 1
    assert "already runs" in again.stderr

    server = scripts.server_pid
    assert server is not None
    engines = engine_pids_of(server)
    os.kill(engines[0], signal.SIGSTOP)  # it cannot notice that its server dies
    os.kill(server, signal.SIGKILL)
    assert eventually(lambda: not any(map(is_alive, engines)), 5.0)
    assert eventually(scripts.is_ready, 120.0)
    assert scripts.server_pid != server

    supervisor = scripts.supervisor_pid
    stopped = scripts.stop()
    assert (stopped.returncode, "Stopped" in stopped.stdout) == (0, True)
    assert not is_alive(supervisor)
    assert not scripts.is_ready()
    nothing = scripts.stop()
    assert (nothing.returncode, "No server" in nothing.stdout) == (0, True)
    assert [path.suffix for path in scripts.run_dir.iterdir()] == [".log"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wait_that_is_given_up_leaves_no_server_behind(
    scripts: Scripts, number: signal.Signals
) -> None:
    starting = scripts.begin()
    assert eventually(lambda: scripts.has_supervisor, 30.0)
    supervisor = scripts.supervisor_pid
    os.killpg(starting.pid, number)  # as a terminal does: child processes of the script get it too
    _, said = starting.communicate(timeout=60)
    assert starting.returncode == 128 + number
    assert "Not ready yet, and stopped again" in said
    assert not is_alive(supervisor)
    assert not scripts.has_supervisor


def test_an_error_at_start_is_the_servers_own(scripts: Scripts) -> None:
    missing = scripts.start("--model", "no-such-model")
    assert missing.returncode == 1
    assert "no-such-model" in missing.stderr
    with socket.create_server(("127.0.0.1", scripts.port)):
        taken = scripts.start()
    assert taken.returncode == 1
    assert f"Port {scripts.port} is in use" in taken.stderr
    wrong = scripts.start("--no-such-flag")
    assert wrong.returncode == 1
    assert "--no-such-flag" in wrong.stderr


@pytest.mark.parametrize(
    ("script", "exit_code"), [("./start_server.sh", 1), ("./stop_server.sh", 0)]
)
def test_the_port_may_be_a_variable_and_a_flag_beats_it(
    scripts: Scripts, script: str, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PORT", "no-number" if exit_code else "4711")
    run = {"cwd": REPOSITORY, "env": scripts._environment, "capture_output": True, "text": True}
    done = subprocess.run([script], timeout=60, **run)  # type: ignore[call-overload]
    assert done.returncode == exit_code
    assert ("'no-number'" if exit_code else "port 4711") in done.stdout + done.stderr
    if not exit_code:
        assert f"port {scripts.port}" in scripts.stop().stdout
