"""A writing model in the loop: only what is right and faster survives of what it writes; nothing escapes."""

from __future__ import annotations

import ctypes
import difflib
import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.forge import confine, decisions
from penstock.forge.confine import CPU_FORMS, FORMS, landlock_version
from penstock.forge.emit import emit
from penstock.forge.fork_server import ForkServer
from penstock.forge.host import time_in_turn, time_of_innermost
from penstock.forge.ledger import Ledger
from penstock.forge.machine import Machine
from penstock.forge.probe import Reach, probe, settle
from penstock.forge.run import open_writer
from penstock.forge.sandbox import CandidateError, Limits, Sandbox
from penstock.forge.screen import refusal
from penstock.forge.search import Search
from penstock.forge.target import Target
from penstock.forge.trial import Exam, run_trial
from penstock.forge.writer import EditError, Writer, apply_diff, read_reply
from test_forge import SIZES, SMALL, make_target

MACHINE = Machine("CPU", "cpu", "", 0, 1e10, 1e11, 1e-6)
TRIAL_S = 10.0
WASTE = "        wasted = sum(range(200_000))\n"  # milliseconds, also where others use the CPU
HEAD = "        check_batch(request_ids, len(input_ids))\n"


def plain_source() -> str:
    return emit(decisions.plain_design(), "An engine.")


def with_line(source: str, before: str, line: str) -> str:
    assert before in source
    return source.replace(before, line + before, 1)


def slow_source() -> str:
    """The plain engine with something in it that a writer can take out."""
    source = with_line(plain_source(), HEAD, WASTE)
    return with_line(source, "        tokens = torch.as_tensor(token_ids).flatten()\n", WASTE)


def as_diff(before: str, after: str) -> str:
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "a", "b"))


def proposals() -> dict[str, str]:
    """Replies by name. Only `good` deserves to live."""
    slow = slow_source()
    good = slow.replace(WASTE, "")
    file = "        open('/etc/hostname').read()\n"
    endless = "        torch.futures.Future().wait()\n"
    greedy = "        kept = torch.ones(1 << 30)\n"
    logits = "return F.linear(x, model.weights.head)"
    tampering = "import sys\nsys.modules['__main__'].kind_of_work = None\n"
    files = {
        "wrong": good.replace(logits, f"{logits} * 1.02"),
        "stale": good.replace("request.length += 1", "request.length += 0"),
        "slow": with_line(slow, HEAD, WASTE * 10),
        "reads files": with_line(good, HEAD, file),
        "opens sockets": good.replace("import os\n", "import os\nimport socket\n"),
        "imports penstock": good.replace("import os\n", "import os\nfrom penstock.forge import oracle\n"),
        "tampers": good.replace("import os\n", "import os\n" + tampering),
        "never returns": with_line(good, HEAD, endless),
        "takes all memory": with_line(good, HEAD, greedy),
        "is not Python": "def create_engine(:\n",
        "has no engine": "import torch\n",
    }
    assert all(text != good for text in files.values())
    replies = {name: f"{name}.\n```python\n{text}```\n" for name, text in files.items()}
    replies["says nothing"] = "I would rather not."
    replies["does not fit"] = "An edit.\n```diff\n@@ -1,1 +1,1 @@\n-no such line\n+another\n```\n"
    return {**replies, "good": f"Take the waste out.\n```diff\n{as_diff(slow, good)}```\n"}


@pytest.fixture
def scripted_model() -> Iterator[tuple[str, list[str], list[dict[str, Any]]]]:
    """A server that answers with the next reply of a list, and remembers what it was asked."""
    replies: list[str] = []
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps({"choices": [{"message": {"content": replies.pop(0)}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", replies, asked
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"), SMALL)


@pytest.fixture(scope="module")
def sandbox(target: Target) -> Iterator[Sandbox]:
    with ForkServer("cpu") as server:
        yield Sandbox(target, Limits(TRIAL_S, 1 << 30), server)


@pytest.fixture(scope="module")
def exam(target: Target) -> Exam:
    return Exam.draw(target, 1, num_random=0, sizes=SIZES)


def test_only_good_edits_survive(
    target: Target,
    sandbox: Sandbox,
    exam: Exam,
    tmp_path: Path,
    scripted_model: tuple[str, list[str], list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, replies, asked = scripted_model
    script = proposals()
    replies += script.values()
    monkeypatch.setattr("penstock.forge.writer.MAX_FAILURES", len(script) + 1)
    out = tmp_path / "workspace" / "engine.py"
    most = len(script) + 1
    search = Search(target, MACHINE, exam, sandbox, Ledger(out.parent), out, budget_s=280.0, max_trials=most)
    search.start(slow_source())
    search.improve_by_writing(Writer(url, "scripted"))
    rows = dict(zip(script, search.ledger.rows[1:]))
    kept = {name for name, row in rows.items() if row.verdict == "kept"}
    assert kept == {"good"}, search.ledger.rows[-1]
    assert out.read_text() == plain_source()
    stopped = {name: row.gate for name, row in rows.items()}
    assert {stopped[name] for name in ("wrong", "stale", "never returns", "takes all memory")} == {"check"}
    screened = (
        "reads files",
        "opens sockets",
        "imports penstock",
        "tampers",
        "is not Python",
        "has no engine",
    )
    assert {stopped[name] for name in screened} == {"screen"}
    assert stopped["says nothing"] == stopped["does not fit"] == "reply"
    assert "logits are off" in rows["wrong"].fault
    assert "out of time" in rows["never returns"].fault
    assert "memory" in rows["takes all memory"].fault.lower()
    assert "wasted = sum" in asked[0]["messages"][1]["content"]
    assert "never returns" in asked[-1]["messages"][1]["content"]


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
attempt("signal", lambda: os.kill(JUDGE, 0))
attempt("penstock", lambda: __import__("penstock"))
attempt("memory", lambda: bytearray(1 << 40))
def create_engine(model_config, weight_dir, device):
    raise RuntimeError(str(seen))
"""


def test_the_sandbox_holds_what_the_screen_lets_through(sandbox: Sandbox, tmp_path: Path) -> None:
    """Without the screen: every reach outside of the process is denied by the kernel."""
    secret = tmp_path / "secret"
    secret.write_text("not for you")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        source = ESCAPES.replace("PORT", str(listening.getsockname()[1])).replace("JUDGE", str(os.getpid()))
        source = source.replace("SECRET", repr(str(secret))).replace("PLACE", repr(str(tmp_path / "written")))
        assert refusal(source)
        with pytest.raises(CandidateError) as caught, sandbox.host(source):
            pass
    said = str(caught.value)
    assert "'penstock': 'ImportError'" in said
    assert "'memory': 'MemoryError'" in said
    assert "'privilege': 'PermissionError'" in said
    if {"network", "system calls"} & set(sandbox.enforced):
        assert "'network': 'done'" not in said
    if "system calls" in sandbox.enforced:
        assert "'namespace': 'PermissionError'" in said
    if "files" in sandbox.enforced:
        assert "'read': 'PermissionError'" in said
        assert "'write': 'PermissionError'" in said
    if "signals" in sandbox.enforced:
        assert "'signal': 'PermissionError'" in said
    assert not (tmp_path / "written").exists()


# The version of Landlock from which a form must be in force; a container may forbid namespaces on any kernel.
LEAST_LANDLOCK = {"files": 1, "files and devices": 1, "connections": 4, "signals": 6, "network": math.inf}
LEAST_LANDLOCK |= dict.fromkeys(("system calls", "privileges", "file sizes", "addresses"), -math.inf)


@pytest.mark.parametrize("form", [form for forms in CPU_FORMS for form in forms])
def test_every_restriction_stands_alone(sandbox: Sandbox, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one of them the device computes, and what that one takes away is out of reach."""
    monkeypatch.setattr(sandbox, "restrictions", [form])
    reached = probe(sandbox)
    assert not reached.obstacle
    if form not in sandbox.enforced and landlock_version(ctypes.CDLL(None)) < LEAST_LANDLOCK[form]:
        pytest.skip(f"this kernel, or the container around it, knows no way to restrict {form}")
    assert form in sandbox.enforced
    assert bool(reached.network) == (form in ("network", "system calls"))
    assert bool(reached.outside) == (form in ("files", "files and devices", "file sizes"))


def test_files_can_be_moved_under_all_restrictions(tmp_path: Path) -> None:
    """From one folder to another where both may be written, as Triton does with every kernel."""
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
        f"in_force = confine.confine({[forms[0] for forms in FORMS]!r}, {limits!r})\n"
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
    """As on a GPU, whose driver takes addresses without end."""
    monkeypatch.setattr(sandbox, "restrictions", [])
    greedy = (
        "import time, torch\ndef create_engine(*words):\n    kept = torch.ones(3 << 27)\n    time.sleep(60)\n"
    )
    with pytest.raises(CandidateError, match="out of memory"), sandbox.host(greedy):
        pass


def test_the_strongest_restrictions_that_a_device_works_under_are_found(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that works neither in a namespace of its own nor with few files, told by nobody."""

    def pretend(sandbox: Sandbox) -> Reach:
        in_the_way = {"network", "files"} & set(sandbox.restrictions)
        return Reach(device=f"OSError: {min(in_the_way)}" if in_the_way else "")

    monkeypatch.setattr("penstock.forge.probe.probe", pretend)
    monkeypatch.setattr(sandbox, "restrictions", list(sandbox.restrictions))
    monkeypatch.setattr(sandbox, "given_up", {})
    settle(sandbox)
    lost = {"network", "files"}
    expected = {form for forms in CPU_FORMS for form in forms} - lost
    assert set(sandbox.restrictions) == expected
    assert sandbox.given_up == {name: f"OSError: {name}" for name in lost}
    monkeypatch.setattr("penstock.forge.probe.probe", lambda sandbox: Reach(device="no such driver"))
    with pytest.raises(PenstockError, match="no such driver"):
        settle(sandbox)


def test_a_writing_model_is_not_asked_where_its_code_could_reach_the_network() -> None:
    with pytest.raises(PenstockError, match="cannot be kept off the network"):
        open_writer("http://127.0.0.1:1", "any", Reach(device="", network=""), 60.0)


def test_a_candidate_that_dies_is_a_failed_trial(sandbox: Sandbox, exam: Exam) -> None:
    crash = with_line(plain_source(), HEAD, "        os.path.join(1)\n")
    outcome = run_trial(sandbox, crash, exam)
    assert outcome.gate == "check"
    assert "TypeError" in outcome.fault
    assert run_trial(sandbox, plain_source(), exam).is_passed
    late = run_trial(sandbox, plain_source(), exam, seconds=0.05)
    assert "out of time" in late.fault


def test_profiles_count_no_time_twice() -> None:
    calls = [(0, 100, "outer"), (10, 40, "inner"), (20, 30, "innermost"), (120, 150, "outer")]
    assert time_of_innermost(calls) == pytest.approx({"outer": 1e-7, "inner": 2e-8, "innermost": 1e-8})
    kernels = [(0, 100, "first"), (60, 130, "early"), (70, 90, "hidden"), (140, 150, "late")]
    counted = {"first": 1e-7, "early": 3e-8, "hidden": 0.0, "late": 1e-8}
    assert time_in_turn(kernels) == pytest.approx(counted)


def test_diffs_apply_exactly_or_not_at_all() -> None:
    before = "a\nb\nc\nd\ne\n"
    after = "a\nB\nc\nd\nnew\ne\n"
    assert apply_diff(before, as_diff(before, after)) == after
    shifted = "zero\n" + before
    assert apply_diff(shifted, as_diff(before, after)) == "zero\n" + after
    with pytest.raises(EditError, match="does not fit"):
        apply_diff("x\ny\n", as_diff(before, after))
    with pytest.raises(EditError, match="no hunk"):
        apply_diff(before, "nothing to see")


def test_replies_are_read_as_files_or_diffs() -> None:
    assert read_reply("Idea.\n```python\nx = 1\n```", "y = 2\n").source == "x = 1\n"
    assert read_reply("Idea.\n```\n@@ -1 +1 @@\n-y = 2\n+y = 3\n```", "y = 2\n").source == "y = 3\n"
    assert read_reply("Two words.\n```python\n```", "").idea == "Two words."
    with pytest.raises(EditError):
        read_reply("no code", "")


@pytest.mark.parametrize(
    "line",
    [
        "import subprocess",
        "from os import system",
        "os.system('ls')",
        "os.environ",
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
    ],
)
def test_the_screen_refuses_what_no_engine_needs(line: str) -> None:
    source = f"import os\nimport torch\n{line}\ndef create_engine(): pass\n"
    assert "line 3" in refusal(source)
    assert not refusal(source.replace(line, "torch.zeros(1)"))
