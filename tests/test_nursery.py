"""A process from the nursery equals an executed one: our child, with its own streams, session,
command line and exit code.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from nursery import CLONE_NUMBERS, start_forked
from serving import Server, child_pids, command_of, eventually, is_alive, start_server
from two_layers import two_layers

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in CLONE_NUMBERS,
    reason="processes are executed here",
)

PROGRAM = """
import atexit, json, os, sys, threading

atexit.register(print, "and left in good order")
threading.Timer(0.05, print, ["a thread ended"]).start()
print("heard", repr(sys.stdin.read()), file=sys.stderr)
variable = os.environ["RAY_AUTH_MODE"]
print(json.dumps([sys.argv, os.getcwd(), os.getsid(0), __name__, variable, os.getppid()]))
sys.exit(7)
"""


def test_a_forked_program_runs_as_an_executed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "as this test says")
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), "one", "two words"]
    with log.open("w") as stderr:
        forked = start_forked(command, stderr)
    assert forked is not None
    assert forked.stdout is not None
    said = forked.stdout.read().splitlines()
    assert forked.wait(timeout=10.0) == 7
    executed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert said == executed.stdout.splitlines()
    assert log.read_text() == executed.stderr
    assert json.loads(said[0])[-2:] == ["as this test says", os.getpid()]
    assert len(said) == 3


def test_a_program_that_raises_says_where_and_ends_with_1(tmp_path: Path) -> None:
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text("raise ValueError('no')")
    with log.open("w") as stderr:
        forked = start_forked([sys.executable, str(program)], stderr)
    assert forked is not None
    assert forked.wait(timeout=10.0) == 1
    assert "program.py" in log.read_text()
    assert log.read_text().endswith("ValueError: no\n")


def test_engines_are_children_of_their_server_with_a_session_of_their_own() -> None:
    with start_server({"model": two_layers()}) as server:
        engine = server.engine_pid  # found by its command line
        assert b"serving.py" in command_of(server.process.pid)
        assert is_forked(server)
        assert os.getsid(engine) == engine != os.getsid(server.process.pid)
        children = child_pids(server.process.pid)
        assert engine in children
        server.process.kill()
        assert server.process.wait(timeout=10.0) == -9
        assert eventually(lambda: not any(map(is_alive, children)))


def test_another_environment_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # torch reads it on import
    assert start_forked([sys.executable, "-c", ""], None) is None


def is_forked(server: Server) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{server.process.pid}/maps").read_text()
