"""The sandbox: what candidates cannot do, and that attempts to reach the judge gain nothing."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.forge import confine
from penstock.forge.candidate_process import time_in_turn, time_of_innermost
from penstock.forge.confine import CPU_RESTRICTIONS, RESTRICTIONS, landlock_version
from penstock.forge.fork_server import ForkServer
from penstock.forge.local import LocalPlayer, load_module
from penstock.forge.sandbox import (
    CandidateError,
    Limits,
    OutOfTime,
    Played,
    Reach,
    Sandbox,
    probe,
    settle,
)
from penstock.forge.static_check import refusal
from penstock.forge.target import Target
from penstock.forge.traces import Call
from test_forge import SMALL, make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"), SMALL)


@pytest.fixture(scope="module")
def sandbox(target: Target) -> Iterator[Sandbox]:
    with ForkServer("cpu") as server:
        yield Sandbox(target, Limits(10.0, 1 << 30), server)


ESCAPES = """
import ctypes, os, signal, socket
seen = {}
def attempt(name, action):
    try:
        action()
        seen[name] = "done"
    except BaseException as error:
        seen[name] = type(error).__name__
def connect():
    with socket.create_connection(("127.0.0.1", PORT), timeout=2):
        pass
def leave():
    if ctypes.CDLL(None).unshare(0x10000000):  # into a namespace where one is root
        raise PermissionError
attempt("network", connect)
attempt("namespace", leave)
attempt("privilege", lambda: os.chroot("/"))
attempt("read", lambda: open(SECRET).read())
attempt("write", lambda: open(PLACE, "w").write("x"))
attempt("judge's memory", lambda: open("/proc/JUDGE/mem", "rb"))
attempt("signal", lambda: os.kill(JUDGE, 0))
attempt("penstock", lambda: __import__("penstock"))
attempt("memory", lambda: bytearray(1 << 40))
def create_engine(model_config, weight_dir, device):
    raise RuntimeError(str(seen))
"""


def test_the_sandbox_holds_what_the_screen_lets_through(sandbox: Sandbox, tmp_path: Path) -> None:
    """Without the static check, the kernel denies every access outside the process."""
    secret = tmp_path / "secret"
    secret.write_text("not for you")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        source = ESCAPES.replace("PORT", str(listening.getsockname()[1])).replace(
            "JUDGE", str(os.getpid())
        )
        source = source.replace("SECRET", repr(str(secret))).replace(
            "PLACE", repr(str(tmp_path / "written"))
        )
        assert refusal(source)
        with pytest.raises(CandidateError) as caught, sandbox.host(source):
            pass
    said = str(caught.value)
    assert "'penstock': 'ImportError'" in said
    assert "'memory': 'MemoryError'" in said
    assert "'privilege': 'PermissionError'" in said
    if "system calls" in sandbox.enforced:
        assert "'network': 'done'" not in said
        assert "'namespace': 'PermissionError'" in said
    if "files" in sandbox.enforced:
        assert "'read': 'PermissionError'" in said
        assert "'write': 'PermissionError'" in said
        assert "\"judge's memory\": 'PermissionError'" in said
    if "signals" in sandbox.enforced.get("files", ""):
        assert "'signal': 'PermissionError'" in said
    assert not (tmp_path / "written").exists()


DRIBBLE = """
import os, time
def create_engine(model_config, weight_dir, device):
    while True:
        for number in range(3, 64):
            try:
                os.write(number, b" ")
            except OSError:
                pass
        time.sleep(0.01)
"""


def test_bytes_that_keep_coming_buy_no_time(sandbox: Sandbox) -> None:
    started = time.monotonic()
    with (
        pytest.raises(OutOfTime, match=r"out of time: more than 0\.5 s"),
        sandbox.host(DRIBBLE, seconds=0.5),
    ):
        pass
    assert time.monotonic() - started < 5.0


IDLE = "def create_engine(model_config, weight_dir, device): pass\n"


def test_short_answers_do_not_add_up_to_more_than_the_limit(sandbox: Sandbox) -> None:
    with sandbox.host(IDLE, seconds=0.5) as hosted:

        def ask_often() -> None:
            for _ in range(100_000):
                hosted.play([], keep=[])

        with pytest.raises(OutOfTime):
            ask_often()


ORPHAN = """
import os, time
def create_engine(model_config, weight_dir, device):
    pid = os.fork()
    if pid == 0:
        for leave in (os.setsid, lambda: os.setpgid(0, 0)):
            try:
                leave()
            except OSError:
                pass
        time.sleep(600)
    time.sleep(0.2)
    raise RuntimeError(f"left {pid}")
"""


def test_what_a_candidate_started_ends_with_it(sandbox: Sandbox) -> None:
    """Also a process that has moved to its own group."""
    with pytest.raises(CandidateError) as caught, sandbox.host(ORPHAN):
        pass
    if "system calls" not in sandbox.enforced:
        pytest.skip("no filter of system calls on this machine")
    (pid,) = re.findall(r"left (\d+)", str(caught.value))
    deadline = time.monotonic() + 10.0
    while (state := process_state(pid)) not in ("Z", "") and time.monotonic() < deadline:
        time.sleep(0.02)
    if state not in ("Z", ""):
        os.kill(int(pid), signal.SIGKILL)
    assert state in ("Z", "")


def process_state(pid: str) -> str:
    """The letter of a process's state; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


ODD_ENGINE = """
import threading, time, torch
class Lazy:
    shape = (1, 4)
    def float(self):
        return torch.zeros(1, 4)
    clone = float
class Engine:
    def prefill(self, ids, prompts):
        logits = torch.zeros(1, 4)
        return ANSWER
    def remove(self, ids):
        time.sleep(0.3)
def create_engine(*words):
    return Engine()
"""
ODD_CALLS = [Call("prefill", ("a",), ((1, 2),)), Call("remove", ("a",))]


@pytest.fixture(params=["sandbox", "this process"])
def play_odd(
    request: pytest.FixtureRequest, sandbox: Sandbox, target: Target, tmp_path: Path
) -> Callable[[str], Played]:
    """Two calls, of which the first is timed, of an engine with the given answers."""

    def play(answer: str) -> Played:
        source = ODD_ENGINE.replace("ANSWER", answer)
        if request.param == "sandbox":
            with sandbox.host(source) as hosted:
                return hosted.play(ODD_CALLS, keep=[0], timed=(0, 1))
        path = tmp_path / "engine.py"
        path.write_text(source)
        return LocalPlayer(load_module(path), target).play(ODD_CALLS, keep=[0], timed=(0, 1))

    return play


@pytest.mark.parametrize(
    "answer", ["Lazy()", "None", "logits.long()", "torch.nn.Parameter(logits)"]
)
def test_only_a_tensor_of_numbers_is_an_answer(
    play_odd: Callable[[str], Played], answer: str
) -> None:
    """Nor may such an answer pass for a refusal."""
    with pytest.raises(CandidateError, match="answered with"):
        play_odd(answer)


def test_answers_are_those_of_when_the_clock_stopped(play_odd: Callable[[str], Played]) -> None:
    late = "[logits, threading.Timer(0.05, logits.fill_, [1.0]).start()][0]"
    assert play_odd(late).logits[0].tolist() == [[0.0] * 4]
    assert play_odd("logits + 1").logits[0].tolist() == [[1.0] * 4]


@pytest.mark.parametrize("name", CPU_RESTRICTIONS)
def test_every_restriction_stands_alone(
    sandbox: Sandbox, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one restriction alone, the device still computes, and what the restriction denies is
    denied.
    """
    monkeypatch.setattr(sandbox, "restrictions", [name])
    reached = probe(sandbox)
    assert not reached.obstacle
    if name == "files" and landlock_version(ctypes.CDLL(None)) < 1:
        pytest.skip("this kernel has no Landlock")
    assert name in sandbox.enforced
    assert bool(reached.network) == (name == "system calls")
    assert bool(reached.outside) == (name in ("files", "file sizes"))


def test_files_can_be_moved_under_all_restrictions(tmp_path: Path) -> None:
    """Between folders where both may be written, as Triton does with every kernel."""
    for folder in ("ours", "ours/new", "theirs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ours/new/kernel").touch()
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    limits = {"seconds": 9.0, "file_bytes": 1 << 20, "readable": ["/"], "writable": [ours]}
    code = (
        "import importlib.util, os, sys\n"
        f"spec = importlib.util.spec_from_file_location('confine', {confine.__file__!r})\n"
        "confine = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(confine)\n"
        f"in_force = confine.confine({RESTRICTIONS!r}, {limits!r})\n"
        f"os.rename({ours + '/new/kernel'!r}, {ours + '/kernel'!r})\n"
        "try:\n"
        f"    os.rename({ours + '/kernel'!r}, {theirs + '/kernel'!r})\n"
        "except OSError:\n"
        "    sys.exit(0)\n"
        "sys.exit('files' in in_force)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert (tmp_path / "ours/kernel").exists()


def test_a_candidate_without_a_limit_of_addresses_is_watched(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose driver reserves any amount of address space."""
    monkeypatch.setattr(sandbox, "restrictions", [])
    greedy = (
        "import time, torch\ndef create_engine(*words):\n    kept = torch.ones(3 << 27)\n    "
        "time.sleep(60)\n"
    )
    with pytest.raises(CandidateError, match="out of memory"), sandbox.host(greedy):
        pass


def test_the_strongest_restrictions_that_a_device_works_under_are_found(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that works neither with few files nor without privileges, which must be found by
    trying.
    """
    lost = {"files", "privileges"}

    def pretend(sandbox: Sandbox) -> Reach:
        in_the_way = lost & set(sandbox.restrictions)
        return Reach(device=f"OSError: {min(in_the_way)}" if in_the_way else "")

    monkeypatch.setattr("penstock.forge.sandbox.probe", pretend)
    monkeypatch.setattr(sandbox, "restrictions", list(sandbox.restrictions))
    monkeypatch.setattr(sandbox, "given_up", {})
    settle(sandbox)
    assert set(sandbox.restrictions) == set(CPU_RESTRICTIONS) - lost
    assert sandbox.given_up == {name: f"OSError: {name}" for name in lost}
    monkeypatch.setattr(
        "penstock.forge.sandbox.probe", lambda sandbox: Reach(device="no such driver")
    )
    with pytest.raises(PenstockError, match="no such driver"):
        settle(sandbox)


def test_profiles_count_no_time_twice() -> None:
    calls = [(0, 100, "outer"), (10, 40, "inner"), (20, 30, "innermost"), (120, 150, "outer")]
    assert time_of_innermost(calls) == pytest.approx(
        {"outer": 1e-7, "inner": 2e-8, "innermost": 1e-8}
    )
    kernels = [(0, 100, "first"), (60, 130, "early"), (70, 90, "hidden"), (140, 150, "late")]
    counted = {"first": 1e-7, "early": 3e-8, "hidden": 0.0, "late": 1e-8}
    assert time_in_turn(kernels) == pytest.approx(counted)


@pytest.mark.parametrize(
    "line",
    [
        "import subprocess",
        "from os import system",
        "from os.path import os",
        "import os as harmless",
        "os.system('ls')",
        "os.environ",
        "harmless = os",
        "torch.os.system('ls')",
        "from torch import os",
        "from torch.serialization import *",
        "torch._utils._sys",
        "operator.attrgetter('os')",
        "[math for math in (torch,)]",
        "torch.Tensor.float = None",
        "import torch.cuda as mine; mine.is_available = None",
        "mine = torch.cuda; mine.synchronize = None",
        "from functools import wraps",
        "torch.utils.cpp_extension.load_inline('x')",
        "from torch.utils import cpp_extension",
        "torch.hub.load('a', 'b')",
        "().__class__.__subclasses__()",
        "eval('1')",
        "getattr(torch, 'save')",
        "torch.save(1, 'x')",
        "import penstock",
        "from concurrent.futures import ProcessPoolExecutor",
        "concurrent.futures.ProcessPoolExecutor()",
        "from .. import judge",
        "__builtins__",
        "match torch.zeros:\n  case object(__builtins__=b): pass",
        "match torch.zeros:\n  case object(x): pass",
        "match [torch.zeros]:\n  case [object(__globals__=b), *_]: pass",
        "import torch.fx",
        "from torch import fx",
        "torch.fx.graph_module._exec_with_source('1', {})",
        "torch._dynamo.eval_frame",
        "torch._inductor.codecache.PyCodeCache.load('1')",
        "torch.utils.benchmark.Timer('1').timeit()",
        "import typing; typing.get_type_hints(x)",
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "torch.load('x', weights_only=not False)",
        "torch.load('x', weights_only=True, **{'weights_only': False})",
        "read = torch.load",
        "from torch import load",
        "from torch.serialization import load as read",
        "mine = torch.serialization; mine.load('x')",
        "import triton.language as tl; tl = torch.serialization; tl.load('x')",
        "torch.serialization.add_safe_globals([])",
    ],
)
def test_the_screen_refuses_what_no_engine_needs(line: str) -> None:
    source = f"import os\nimport torch\n{line}\ndef create_engine(): pass\n"
    assert refusal(source).startswith(("line 3", "line 4"))
    assert not refusal(source.replace(line, "torch.zeros(1)"))


@pytest.mark.parametrize(
    "line",
    [
        "torch.load('x', map_location='cpu', weights_only=True, mmap=True)",
        "import triton.language as tl; tl.load(1)",
        "from triton import language; language.load(1)",
        "match 3:\n  case 3 | 4: pass\n  case [a, *_]: pass\n  case {'b': c}: pass",
        "class A:\n  def load(self): return self.load()",
    ],
)
def test_the_screen_lets_engines_read_their_weights_and_their_memory(line: str) -> None:
    assert not refusal(f"import os\nimport torch\n{line}\ndef create_engine(): pass\n")
