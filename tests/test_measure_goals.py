"""scripts/measure_goals.py: what is met, missed, failed and skipped, and which rows are kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROW = {"model": "penstock-tiny", "scheme": "fp32"}

Measure = Callable[..., int]


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import measure_goals

    return measure_goals


@pytest.fixture
def measure(goals: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Runs the script with these benchmarks; tables are those of `tmp_path`."""
    monkeypatch.setattr(goals, "RESULTS", tmp_path)
    (tmp_path / "quantized.json").write_text(
        json.dumps({"what": "steps", "rows": [{**ROW, "batch": 1, "context": 64, "ms": 9.9}]})
    )

    def run(*benchmarks: Any, words: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr(goals, "BENCHMARKS", list(benchmarks))
        monkeypatch.setattr(sys, "argv", ["measure_goals.py", str(tmp_path / "out"), *words])
        code: int = goals.main()
        return code

    return run


def steps(goals: ModuleType, *limits: Any, flags: str = "", seconds: float = 0.0) -> Any:
    own = f"step --device cpu --batch 1,2 --context 64 --repeats 2 --warmup 1 {flags}"
    return goals.Benchmark("steps", own, seconds, limits, goals.STEPS, ROW)


def test_rows_replace_those_of_the_same_shape_and_goals_are_judged(
    goals: ModuleType, measure: Measure, tmp_path: Path
) -> None:
    met, missed = goals.Goal({"batch": 1}, "ms", 1e6), goals.Goal({"batch": 2}, "ms", 1e-6)
    fast = goals.Goal({"batch": 2}, "tok_s", 1e-6, is_least=True)
    assert measure(steps(goals, met, fast)) == 0
    assert measure(steps(goals, met, missed, fast), words=("--commit", "abc")) == 1

    found = json.loads((tmp_path / "out/goals.json").read_text())
    assert [row["is_met"] for row in found["rows"]] == [True, False, True]
    assert (found["missing"], found["commit"]) == ([], "abc")
    table = json.loads((tmp_path / "out/quantized.json").read_text())
    assert table["what"] == "steps"
    assert [row["batch"] for row in table["rows"]] == [1, 2]
    assert all(row["commit"] == "abc" and row["model"] == ROW["model"] for row in table["rows"])
    assert found["rows"][0]["best"] == table["rows"][0]["ms"] != 9.9


def test_rows_have_the_commit_of_the_start(
    goals: ModuleType, measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are written into a checkout make it differ from its commit."""
    commits = iter(("abc", "abc+", "abc+"))
    monkeypatch.setattr(goals, "provenance", lambda: {"commit": next(commits)})
    goal = goals.Goal({"batch": 1}, "ms", 1e6)
    assert measure(steps(goals, goal), steps(goals, goal)) == 0
    for file in ("goals.json", "quantized.json"):
        assert '"abc+"' not in (tmp_path / "out" / file).read_text()
    table = json.loads((tmp_path / "out/quantized.json").read_text())
    assert {row["commit"] for row in table["rows"]} == {"abc"}


def test_rows_keep_the_fields_that_their_tables_have(
    goals: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {name: name for name in goals.OFFLOADED.shared.values()}

    def run(command: list[str], **_: Any) -> None:
        if command[-2] == "--json":
            Path(command[-1]).write_text(json.dumps({**report, "rows": [{"read_gb_per_s": 0.0}]}))

    monkeypatch.setattr(goals.subprocess, "run", run)
    found = {one.name: one.run(Path("models/Qwen3.5-4B")) for one in goals.BENCHMARKS}
    [row] = found[f"offload {goals.A3B_6GB}"]
    assert (row["gpu_gb"], row["disk_gb_per_s"]) == ("gpu_gb", "read_gb_per_s")
    assert row["read_gb_per_s"] == 0.0  # of the run itself
    assert found["served 1000"][0]["tokenizer"] == "Qwen3.5-4B"
    assert "tokenizer" not in found["prefill"][0]
    assert found[f"ranks {goals.HUGE}"][0]["goal_ms"] == 4.0


def test_a_benchmark_that_fails_or_has_no_time_is_named_and_the_others_run(
    goals: ModuleType, measure: Measure, tmp_path: Path
) -> None:
    goal = goals.Goal({"batch": 1}, "ms", 1e6)
    late = steps(goals, goal, seconds=1e6)
    failing = steps(goals, goal, flags="--model no-such-model")
    assert measure(late, failing, steps(goals, goal)) == 1
    found = json.loads((tmp_path / "out/goals.json").read_text())
    assert [row["is_met"] for row in found["rows"]] == [True]
    skipped, failed = found["missing"]
    assert "skipped" in skipped
    assert "failed" in failed


def test_a_goal_that_no_row_has_is_not_met(goals: ModuleType) -> None:
    rows = [{"batch": 1, "ms": None}, {"batch": 2, "ms": 3.0}, {"batch": 2, "ms": 2.0}]
    assert not goals.Goal({"batch": 1}, "ms", 9.0).judge(rows)["is_met"]
    assert not goals.Goal({"batch": 4}, "ms", 9.0).judge(rows)["is_met"]
    assert goals.Goal({"batch": 2}, "ms", 9.0).judge(rows)["best"] == 2.0


def test_every_table_and_offload_case_exists(goals: ModuleType) -> None:
    from penstock.commands.bench_offload import CASES

    for one in goals.BENCHMARKS:
        values = json.loads((ROOT / "results/h200" / one.table.file).read_text())
        table = values if one.table.part is None else values[one.table.part]
        assert table["rows"], one.name
        assert one.goals, one.name
        if one.table is goals.OFFLOADED:
            assert {goal.fields["case"] for goal in one.goals} <= set(CASES)


def test_names_that_no_benchmark_has_are_refused(
    goals: ModuleType, measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        measure(steps(goals), words=("--only", "quantum"))
    assert end.value.code == 2
    assert "--only quantum names no benchmark; there are steps" in capsys.readouterr().err
