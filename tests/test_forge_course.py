"""Forge with an unmodified course evaluator: its loader, commands and time limit."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import ROOT, environment
from penstock.cli import main
from penstock.forge import decisions, gate
from penstock.forge.emit import emit
from penstock.forge.initial_design import first_design
from penstock.forge.local import LocalPlayer, ResidentPeak, load_module
from penstock.forge.machine import Machine
from penstock.forge.measure import draw_benches
from penstock.forge.oracle import Case, Oracle, count_tokens
from penstock.forge.sandbox import OutOfTime
from penstock.forge.target import Target
from penstock.forge.traces import Trace, correctness_traces
from penstock.forge.trial import ALWAYS, answer_in_time, left_out
from test_forge import SIZES, SMALL, gpu_designs, make_target, read_ledger, run_forge

# A course's evaluator loads an engine like this: not registered, and without Penstock.
LOADER = """
import importlib.util, json, sys, torch
torch.set_num_threads(1)
config, weights, *paths = json.loads(sys.stdin.read())
for path, is_run in paths:
    spec = importlib.util.spec_from_file_location("submission", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "submission" not in sys.modules and "penstock" not in sys.modules
    if is_run:
        engine = module.create_engine(config, weights, device="cpu")
        logits = engine.prefill(["a", "b"], [torch.tensor([1, 2, 3]), torch.tensor([4])])
        assert logits.shape == engine.decode(["b", "a"], logits.argmax(-1)).shape == (2, config["vocab_size"])
        engine.remove(["a"])
    print(path)
"""


def test_every_design_loads_where_the_module_is_not_registered(tmp_path: Path) -> None:
    """Also from another working directory; designs for a CPU also run."""
    target = make_target(tmp_path, SMALL)
    plain = decisions.plain_design()
    of_cpu = [plain, *(design for _, design in decisions.moves(plain, "cpu"))]
    designs = [(design, True) for design in of_cpu] + [(design, False) for design in gpu_designs()]
    paths = []
    for number, (design, is_run) in enumerate(designs):
        path = tmp_path / f"engine_{number}.py"
        path.write_text(emit(design, "An engine."))
        paths.append((str(path), is_run))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = environment()
    words.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADER],
        input=json.dumps([SMALL, str(target.weight_dir), *paths]),
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env=words,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(designs) > 40


def evaluate(script: str, folder: Path, *more: str) -> str:
    """Calls a script with the arguments of a course, from another folder."""
    words = ["--engine", str(ROOT / "evaluator" / "baseline_engine.py"), "--device", "auto", *more]
    words += [
        "--model-config",
        str(folder / "model_config.json"),
        "--weight-dir",
        str(folder / "weights"),
    ]
    command = [sys.executable, str(ROOT / "evaluator" / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_evaluators_take_a_courses_words_and_have_a_baseline_to_try(tmp_path: Path) -> None:
    make_target(tmp_path, SMALL)
    said = evaluate("test_correctness.py", tmp_path, "--traces", "1", "--max-batch", "4")
    assert "9 of 9 situations are right" in said
    said = evaluate("benchmark_throughput.py", tmp_path, "--repeats", "1", "--no-baseline")
    engine = json.loads(said.splitlines()[-1])["engine"]
    assert engine["peak_bytes"] > 0
    speeds = {name: bench["decode_tokens_per_second"] for name, bench in engine["benches"].items()}
    assert speeds["prefill 8"] == 0
    assert 0 < speeds["mixed"] < engine["benches"]["mixed"]["tokens_per_second"]
    assert speeds["decode 8"] == engine["benches"]["decode 8"]["tokens_per_second"] > 0


def test_memory_of_an_engine_on_a_cpu_is_what_it_adds() -> None:
    first = ResidentPeak()
    kept = torch.ones(30_000_000)
    assert 115e6 < first.read_bytes() < 180e6
    del kept
    second = ResidentPeak()  # earlier peaks are reset
    assert second.read_bytes() < 60e6


def test_scripts_run_the_python_they_are_given(tmp_path: Path) -> None:
    """The interpreter's path and the engine's are relative to the caller's directory."""
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"\necho\n')
    python.chmod(0o755)
    (tmp_path / "mine.py").write_text("")

    def run(script: str, *words: str) -> list[str]:
        command = ["bash", str(ROOT / script), *words]
        variables = environment(PYTHON="./my python")
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    checked, timed = run("scripts/run_public_tests.sh", "mine.py", "--device", "cpu")[-2:]
    for line, name in ((checked, "test_correctness"), (timed, "benchmark_throughput")):
        assert line.startswith(
            f"evaluator/{name}.py|--engine|{tmp_path / 'mine.py'}|--model-config|"
        )
        assert line.endswith("weights|--device|cpu|")
    assert "--engine|workspace/engine.py|" in run("scripts/run_public_tests.sh")[-1]
    assert run("run.sh", "--budget", "1m")[-1].endswith("--budget|10m|--budget|1m|")


class SlowOracle(Oracle):
    """Takes time for every token, on a clock that only it advances."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.clock_s = 0.0

    def answer(self, trace: Trace, calls: Any = None, ids: Any = None) -> Case:
        self.clock_s += 0.01 * count_tokens(trace)
        return Case(trace.name, trace.calls, {})


@pytest.mark.parametrize(("seconds", "least_left_out"), [(math.inf, 0), (20.0, 3), (0.1, 8)])
def test_an_exam_is_as_long_as_the_budget_allows_and_asks_the_common_always(
    seconds: float, least_left_out: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path, {**SMALL, "max_position_embeddings": 512})
    knowing = SlowOracle(target)
    monkeypatch.setattr("penstock.forge.trial.time.monotonic", lambda: knowing.clock_s)
    traces = correctness_traces(target.shape, 0, num_random=4, max_batch=24, crowd=65)
    cases = answer_in_time(knowing, traces, seconds)
    names = {case.name for case in cases}
    assert set(ALWAYS) <= names
    assert len(left_out(traces, cases)) >= least_left_out
    assert (len(cases) == len(traces)) == (seconds == math.inf)
    always_s = sum(0.01 * count_tokens(trace) for trace in traces if trace.name in ALWAYS)
    assert knowing.clock_s <= max(seconds, always_s + 1e-6)


def test_benches_have_fewer_plays_where_right_answers_take_long(tmp_path: Path) -> None:
    target = make_target(tmp_path, SMALL)
    knowing = Oracle(target)
    assert {len(bench.plays) for bench in draw_benches(target, knowing, 1, SIZES)} == {
        1 + SIZES.repeats
    }
    assert {len(bench.plays) for bench in draw_benches(target, knowing, 1, SIZES, seconds=0.0)} == {
        2
    }


def test_an_engine_is_on_disk_once_it_is_right_however_long_timing_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*given: Any) -> None:
        assert (tmp_path / "workspace" / "engine.py").exists()
        raise OutOfTime("out of time: more than 7 s")

    monkeypatch.setattr("penstock.forge.trial.measure", measure)
    _, out = run_forge(tmp_path, SMALL)
    (row,) = read_ledger(out)
    assert (row["gate"], row["verdict"]) == ("measure", "kept")
    assert "before the first version could be timed" in (out.parent / "report.md").read_text()
    assert "out of time" in (out.parent / "results.log").read_text()


def test_a_profile_that_takes_too_long_costs_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(*given: Any) -> None:
        raise OutOfTime("out of time: more than 7 s")

    monkeypatch.setattr("penstock.forge.sandbox.Hosted.profile", profile)
    _, out = run_forge(tmp_path, SMALL, max_trials=1)
    assert [row["gate"] for row in read_ledger(out)] == ["passed"]


def test_a_run_that_comes_to_nothing_says_why_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After what an earlier run wrote, once, whichever part failed."""
    log = tmp_path / "workspace" / "results.log"
    paths = [
        "--config",
        str(tmp_path / "model_config.json"),
        "--weights",
        str(tmp_path / "weights"),
    ]
    words = ["forge", *paths, "--out", str(log.with_name("engine.py")), "--device", "cpu"]
    assert main(words) == 1
    assert "this run came to nothing" in log.read_text()
    assert log.read_text().count("There is no") == 1
    make_target(tmp_path, SMALL)
    wrong = gate.Verdict("chance 3: logits are off", 5.0, 1)
    monkeypatch.setattr("penstock.forge.gate.check", lambda *given: wrong)
    assert main(words) == 1
    said = log.read_text()
    assert (
        said.index("There is no")
        < said.index("inspect, seconds")
        < said.index("chance 3: logits are off")
    )
    assert not log.with_name("engine.py").exists()

    def broken(*given: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("penstock.forge.run.Machine.measure", broken)
    with contextlib.suppress(RuntimeError):
        main(words)
    assert log.read_text().count("a fault of ours\n") == 1
    assert "Traceback" in log.read_text()
    capsys.readouterr()


@pytest.mark.parametrize(("gain", "num_threads"), [(3.0, 1), (1.1, 2)])
def test_one_thread_is_enough_where_several_wait_for_each_other(
    gain: float, num_threads: int
) -> None:
    machine = Machine("CPU", "cpu", "", 0, 1e10, 1e11, 1e-6, one_thread_gain=gain)
    assert first_design(machine)["threads"] == ("one" if num_threads == 1 else "found")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with machine.quickest_threads():
            assert torch.get_num_threads() == num_threads
        assert torch.get_num_threads() == 2
        target = Target.of(SMALL, Path("."), "cpu")
        assert Machine.measure(target).one_thread_gain > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("gain", "products"), [(1.5, "packed"), (1.1, "library")])
def test_the_first_version_packs_weights_where_that_is_clearly_quicker(
    gain: float, products: str
) -> None:
    """A short budget may end with the first version."""
    machine = Machine("CPU", "cpu", "", 0, 1e10, 1e11, 1e-6, packed_gain=gain)
    assert first_design(machine)["products"] == products
    assert ("_linear_pointwise" in emit(first_design(machine), "First.")) == (products == "packed")


def test_threads_are_chosen_for_the_products_that_are_quicker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own product may not gain from a second thread where a packed one becomes twice as
    fast.
    """
    seconds = {(1, False): 1e-3, (2, False): 2e-3, (1, True): 1e-3, (2, True): 4e-4}

    clock_s = 0.0

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal clock_s
        clock_s += seconds[torch.get_num_threads(), weight.is_mkldnn]
        return x

    def read_clock() -> float:
        nonlocal clock_s
        clock_s += 1e-6
        return clock_s

    monkeypatch.setattr("penstock.forge.machine.multiply", multiply)
    monkeypatch.setattr("penstock.forge.machine.time.perf_counter", read_clock)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        machine = Machine.measure(
            Target.of({**SMALL, "hidden_size": 512, "intermediate_size": 512}, Path("."), "cpu")
        )
    finally:
        torch.set_num_threads(before)
    assert machine.is_quicker_with_packed_weights
    assert not machine.is_quicker_with_one_thread
    slower = replace(machine, one_thread_gain=1.5)  # a busy moment may measure like this
    back = [design["threads"] for _, design in decisions.moves(first_design(slower), "cpu")]
    assert "found" in back
    found = decisions.BY_NAME["threads"]["found"]
    assert (
        found.saves == decisions.BY_NAME["threads"]["one"].saves
    )  # worth a trial in either direction


def test_threads_that_one_engine_chose_are_not_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path, SMALL)
    (tmp_path / "one.py").write_text(
        emit(decisions.decide(decisions.plain_design(), "threads", "one"), "One.")
    )
    (tmp_path / "found.py").write_text(emit(decisions.plain_design(), "As found."))
    before = torch.get_num_threads()
    monkeypatch.setattr("penstock.forge.local.FOUND_THREADS", 2)
    try:
        LocalPlayer(load_module(tmp_path / "one.py"), target)
        assert torch.get_num_threads() == 1
        LocalPlayer(load_module(tmp_path / "found.py"), target)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
