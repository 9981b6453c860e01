"""A writing model in the loop: only correct and faster code survives, and nothing escapes."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.forge import decisions
from penstock.forge.emit import emit
from penstock.forge.fork_server import ForkServer
from penstock.forge.ledger import Ledger
from penstock.forge.machine import Machine
from penstock.forge.run import forge, require_isolation
from penstock.forge.sandbox import Limits, Reach, Sandbox
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
    """The plain engine with something added that a writer can remove."""
    source = with_line(plain_source(), HEAD, WASTE)
    return with_line(source, "        tokens = torch.as_tensor(token_ids).flatten()\n", WASTE)


def as_diff(before: str, after: str) -> str:
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "a", "b"))


def proposals() -> dict[str, str]:
    """Replies by name. Only `good` should survive."""
    slow = slow_source()
    good = slow.replace(WASTE, "")
    file = "        open('/etc/hostname').read()\n"
    endless = "        torch.futures.Future().wait()\n"
    greedy = "        kept = torch.ones(1 << 30)\n"
    logits = "return multiply(x, model.weights.head)"
    tampering = "import sys\nsys.modules['__main__'].kind_of_work = None\n"
    files = {
        "wrong": good.replace(logits, f"{logits} * 1.02"),
        "stale": good.replace("request.length += 1", "request.length += 0"),
        "slow": with_line(slow, HEAD, WASTE * 10),
        "reads files": with_line(good, HEAD, file),
        "opens sockets": good.replace("import os\n", "import os\nimport socket\n"),
        "imports penstock": good.replace(
            "import os\n", "import os\nfrom penstock.forge import oracle\n"
        ),
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


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def scripted_model() -> Iterator[tuple[str, list[str], list[dict[str, Any]]]]:
    """A server that answers with the next reply of a list, and records its requests."""
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

    with serving(Handler) as url:
        yield url, replies, asked


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


@pytest.mark.slow
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
    search = Search(
        target, MACHINE, exam, sandbox, Ledger(out.parent), out, budget_s=280.0, max_trials=most
    )
    monkeypatch.setattr("penstock.forge.search.emit", lambda design, says: slow_source())
    search.start()
    search.improve_by_writing(Writer(url, "scripted"))
    rows = dict(zip(script, search.ledger.rows[1:]))
    kept = {name for name, row in rows.items() if row.verdict == "kept"}
    assert kept == {"good"}, search.ledger.rows[-1]
    assert out.read_text() == plain_source()
    stopped = {name: row.gate for name, row in rows.items()}
    assert {stopped[name] for name in ("wrong", "stale", "never returns", "takes all memory")} == {
        "check"
    }
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


def test_a_writing_model_is_not_asked_where_its_code_could_reach_the_network() -> None:
    with pytest.raises(PenstockError, match="cannot be kept off the network"):
        require_isolation(Reach(device="", network=""))


def test_an_unreachable_server_is_reported_before_anything_else(tmp_path: Path) -> None:
    """Nothing listens there, or the server requires a key."""
    nowhere = {
        "config": tmp_path / "c.json",
        "weights": tmp_path,
        "out": tmp_path / "workspace" / "engine.py",
    }

    def refused(url: str) -> str:
        with pytest.raises(PenstockError) as caught:
            forge(**nowhere, device="cpu", budget_s=60.0, llm_base_url=url)
        return str(caught.value)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self.send_error(401, "no key")

        def do_POST(self) -> None:
            time.sleep(0.5)
            self.send_error(500, "too late")

        def log_message(self, *words: Any) -> None:
            pass

    assert re.search(
        r"Nothing answers .*\n.*refused.*\nCorrect --llm-base-url", refused("http://127.0.0.1:1")
    )
    with serving(Handler) as url:
        said = refused(url)
        assert "PENSTOCK_API_KEY" in said
        assert "no key" in said
        late = Writer(url, "any").propose("", "", seconds=0.2)
        assert late == f"Nothing answers at {url}: timed out."


def test_a_candidate_that_dies_is_a_failed_trial(sandbox: Sandbox, exam: Exam) -> None:
    crash = with_line(plain_source(), HEAD, "        os.path.join(1)\n")
    outcome = run_trial(sandbox, crash, exam)
    assert outcome.gate == "check"
    assert "TypeError" in outcome.fault
    assert run_trial(sandbox, plain_source(), exam).is_passed
    late = run_trial(sandbox, plain_source(), exam, seconds=0.001)
    assert "out of time" in late.fault


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
