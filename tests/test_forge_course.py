"""Forge in the hands of a course: its loader, its commands, its time limit, as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from command_line import ROOT, environment
from penstock.forge import decisions
from penstock.forge.emit import emit
from penstock.forge.resident import ResidentPeak
from test_forge import SMALL, gpu_designs, make_target

# As a course's evaluator loads an engine: the module is nobody's, and Penstock is nowhere.
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


def test_every_design_loads_where_nobody_registers_the_module(tmp_path: Path) -> None:
    """From another working folder, too; those of a CPU also run."""
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
    """With a course's own words, from another folder."""
    words = ["--engine", str(ROOT / "evaluator" / "baseline_engine.py"), "--device", "auto", *more]
    words += ["--model-config", str(folder / "model_config.json"), "--weight-dir", str(folder / "weights")]
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
    second = ResidentPeak()  # what came before is forgotten
    assert second.read_bytes() < 60e6


def test_scripts_run_the_python_they_are_given(tmp_path: Path) -> None:
    """By a name relative to where they are called; so is the engine."""
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
        assert line.startswith(f"evaluator/{name}.py|--engine|{tmp_path / 'mine.py'}|--model-config|")
        assert line.endswith("weights|--device|cpu|")
    assert "--engine|workspace/engine.py|" in run("scripts/run_public_tests.sh")[-1]
    assert run("run.sh", "--budget", "1m")[-1].endswith("--budget|10m|--budget|1m|")
