"""A writing model joins at the plan: its choices are tried first, and trials decide."""

from __future__ import annotations

import json
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_line import ROOT, environment
from penstock.commands.flags import unknown_variables
from penstock.forge import decisions
from penstock.forge.ledger import Ledger
from penstock.forge.oracle import Distance
from penstock.forge.search import Search
from penstock.forge.target import Target
from penstock.forge.trial import Exam, Outcome
from penstock.forge.writer import (
    MAX_STEPS,
    PLAN_TASK,
    TASK,
    Step,
    Writer,
    describe_choices,
    read_plan,
)
from test_forge import SMALL, make_target, read_ledger
from test_forge_thrift import H200, timings_of
from test_forge_writer import serving

PLAN = """Here is what I would do:
1. `weights=fused norm=library`: fewer, larger products
layers=kernels: not on a CPU
decode=telepathy: there is no such thing
2. decode = grouped: one product for all heads
"""


def test_plans_are_read_for_what_can_be_decided_here() -> None:
    steps = read_plan(PLAN, "cpu")
    assert [step.choices for step in steps] == [
        {"weights": "fused", "norm": "library"},
        {"decode": "grouped"},
    ]
    assert steps[0].why == "fewer, larger products"
    assert len(read_plan(PLAN, "cuda")) == 3
    assert len(read_plan("norm=library\n" * 20, "cpu")) == MAX_STEPS
    assert read_plan("I would rather not.", "cpu") == []
    designed = steps[0].follow(decisions.plain_design())
    assert (designed["weights"], designed["norm"]) == ("fused", "library")
    told = describe_choices(decisions.plain_design(), "cpu")
    assert "weights=fused" in told
    assert "layers=kernels" not in told


class Planner(Writer):
    is_exhausted = True  # it plans, and does not edit

    def plan(self, brief: str, choices: str, device: str, seconds: float) -> list[Step] | str:
        assert "Where time goes" in brief
        assert "weights=fused" in choices
        assert 0 < seconds < 60
        return read_plan(PLAN, device)


def test_what_was_planned_is_tried_before_the_profile_chooses_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = {"decode.projection": 1.0, "prefill.projection": 1.0}

    def run_trial(sandbox: Any, source: str, *given: Any, **rest: Any) -> Outcome:
        return Outcome("", "passed", 1e-3, timings=timings_of(1.0), profile=profile)

    monkeypatch.setattr("penstock.forge.search.run_trial", run_trial)
    box: Any = SimpleNamespace(enforced={}, given_up={})
    target, ledger = Target.of(SMALL, Path("."), "cpu"), Ledger(tmp_path)
    writer = Planner("http://127.0.0.1:1", "planner")
    exam, out = Exam([], [], Distance(1.0)), tmp_path / "engine.py"
    search = Search(
        target, H200, exam, box, ledger, out, budget_s=60.0, writer=writer, max_trials=5
    )
    search.run()
    ideas = [row.idea for row in ledger.rows]
    assert ideas[2] == "weights: separate → fused; norm: plain → library"
    assert ideas[3] == "decode: each → grouped"
    assert [row.why.startswith("planned by planner: ") for row in ledger.rows] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert len(set(ideas)) == 5
    assert (
        "plan from planner: weights=fused norm=library; decode=grouped"
        in (tmp_path / "results.log").read_text()
    )


def scripted_model(asked: list[str]) -> type[BaseHTTPRequestHandler]:
    """Plans, then edits the given file: first wrongly, then without gain."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "scripted"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == "scripted"
            task, words = (message["content"] for message in body["messages"])
            asked.append(task)
            reply = PLAN
            if task == TASK:
                source = words.partition("```python\n")[2].removesuffix("```")
                wrong = source.replace("request.length += 1", "request.length += 2")
                is_first = asked.count(TASK) == 1
                reply = f"Faster.\n```python\n{wrong}```" if is_first else "I would rather not."
            self._answer({"choices": [{"message": {"content": reply}}]})

        def _answer(self, message: dict[str, Any]) -> None:
            body = json.dumps(message).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    return Handler


@pytest.mark.slow
def test_a_model_named_by_variables_plans_and_edits_in_run_sh(tmp_path: Path) -> None:
    make_target(tmp_path, {**SMALL, "num_hidden_layers": 1, "max_position_embeddings": 64})
    out = tmp_path / "workspace" / "engine.py"
    words = [
        "--config",
        str(tmp_path / "model_config.json"),
        "--weights",
        str(tmp_path / "weights"),
    ]
    words += ["--out", str(out), "--device", "cpu", "--budget", "60s"]
    asked: list[str] = []
    with serving(scripted_model(asked)) as url:
        variables = environment(PENSTOCK_LLM_BASE_URL=f"{url}/v1")
        done = subprocess.run(
            ["bash", str(ROOT / "run.sh"), *words], capture_output=True, text=True, env=variables
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no setting has that name" not in done.stderr
    assert asked[0] == PLAN_TASK
    rows = read_ledger(out)
    assert any(row["why"].startswith("planned by scripted") for row in rows)
    edits = [row for row in rows if row["author"] == "scripted"]
    assert [row["gate"] for row in edits] == ["check", "reply", "reply", "reply"]
    assert all(row["verdict"] == "discarded" for row in edits)
    assert "plan from scripted" in (out.parent / "results.log").read_text()
    assert "planned by scripted" in (out.parent / "report.md").read_text()


def test_variables_of_forge_are_known() -> None:
    assert unknown_variables({"PENSTOCK_LLM_BASE_URL": "x", "PENSTOCK_LLM_MODEL": "y"}) == []
    assert unknown_variables({"PENSTOCK_LLM_URL": "x"})
