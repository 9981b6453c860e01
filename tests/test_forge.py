"""Forge: its output is correct, readable and faster than its first version; a ledger shows how."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from command_line import ROOT
from penstock.commands.forge import read_duration
from penstock.errors import CheckpointError, ConfigError
from penstock.forge import decisions, gate
from penstock.forge.decisions import Design
from penstock.forge.emit import emit, keep_lines
from penstock.forge.fork_server import ForkServer
from penstock.forge.fragments.graphs_decode import STEP_SIZES
from penstock.forge.ledger import Ledger, Row
from penstock.forge.local import LocalPlayer, load_module
from penstock.forge.measure import Sizes
from penstock.forge.oracle import Case, Distance, Oracle, allowed_distance
from penstock.forge.reference import Reference
from penstock.forge.run import forge
from penstock.forge.sandbox import Played
from penstock.forge.static_check import refusal
from penstock.forge.target import Target
from penstock.forge.traces import Call, Trace, correctness_traces
from penstock.forge.trial import Exam

SMALL: dict[str, Any] = {
    "model_type": "tiny_llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
CONFIGS = {
    "grouped heads": SMALL,
    "every head its own keys": {
        **SMALL,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "torch_dtype": "float16",
    },
    "one key head, wide heads": {
        **SMALL,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "num_hidden_layers": 1,
    },
}
toy: Any = load_module(ROOT / "scripts" / "generate_toy_weights.py")
BASELINE = ROOT / "evaluator" / "baseline_engine.py"
SIZES = Sizes(prompt_len=16, context_len=16, steps=3, batches=(1, 4), mixed_calls=8, repeats=2)


def make_target(folder: Path, config: dict[str, Any]) -> Target:
    (folder / "model_config.json").write_text(json.dumps(config))
    target = Target.of(config, folder / "weights", "cpu")
    toy.save_toy_weights(target.shape, folder / "weights" / "model.pt", torch.float16, seed=3)
    return target


def draw_cases(target: Target, seed: int, num_random: int = 2) -> list[Case]:
    knowing = Oracle(target)
    traces = correctness_traces(target.shape, seed, num_random=num_random, max_batch=12, crowd=17)
    return [knowing.answer(trace) for trace in traces]


def check_file(path: Path, target: Target, seed: int = 99) -> gate.Verdict:
    return gate.check(
        LocalPlayer(load_module(path), target), draw_cases(target, seed), allowed=Distance(1 / 3)
    )


def run_forge(folder: Path, config: dict[str, Any], **more: Any) -> tuple[Target, Path]:
    target = make_target(folder, config)
    out = folder / "workspace" / "engine.py"
    words: dict[str, Any] = {
        "budget_s": 60.0,
        "max_trials": 3,
        "num_random": 0,
        "sizes": SIZES,
        **more,
    }
    paths = {"config": folder / "model_config.json", "weights": folder / "weights", "out": out}
    forge(**paths, device="cpu", **words)
    return target, out


def read_ledger(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out.parent / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One fork server for all tests: most of its time goes into imports."""
    with ForkServer("cpu") as server:
        yield server


@pytest.mark.parametrize(
    ("name", "num_trials"), [("grouped heads", 3), ("every head its own keys", 2)]
)
def test_forge_writes_an_engine_that_is_right_and_not_slower(
    name: str, num_trials: int, tmp_path: Path, server: ForkServer
) -> None:
    target, out = run_forge(
        tmp_path, CONFIGS[name], max_trials=num_trials, budget_s=600.0, server=server
    )
    verdict = check_file(out, target)
    assert verdict.is_passed, verdict.fault
    rows = read_ledger(out)
    assert len(rows) == num_trials
    assert all(row["gate"] == "passed" or row["fault"].startswith("slower") for row in rows)
    assert all({"start", "build", "gate", "measure"} <= set(row["phases"]) for row in rows)
    assert any("profile" in row["phases"] for row in rows)
    assert "fewer operations" in rows[1]["why"]
    assert rows[0]["verdict"] == "kept"
    kept = [row["score"] for row in rows if row["verdict"] == "kept"]
    assert kept[0] == 1.0
    assert kept == sorted(kept)
    assert all(
        row["why"] and row["idea"] and row["lines_added"] and "time" in row["held_to"]
        for row in rows
    )
    report = (out.parent / "report.md").read_text()
    assert all(row["idea"] in report for row in rows)
    log = (out.parent / "results.log").read_text()
    assert "trial 0" in log
    assert re.match(
        r"inspect, seconds: libraries .*machine .*weights .*cases .*benches .*sandbox", log
    )
    picture = ElementTree.fromstring((out.parent / "progress.svg").read_text())
    assert len(picture.findall("{*}circle")) == sum(row["gate"] == "passed" for row in rows)
    imported = set(re.findall(r"^(?:from|import) (\w+)", out.read_text(), re.MULTILINE))
    assert imported <= {
        "__future__",
        "collections",
        "dataclasses",
        "itertools",
        "math",
        "os",
        "torch",
        "typing",
    }


def test_an_interrupt_loses_nothing(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if "trial 1" in line:
            raise KeyboardInterrupt

    target, out = run_forge(
        tmp_path, CONFIGS["one key head, wide heads"], max_trials=9, say=interrupt
    )
    verdict = check_file(out, target)
    assert verdict.is_passed, verdict.fault
    assert "interrupted" in (out.parent / "report.md").read_text()
    assert len(read_ledger(out)) == 2


def test_a_run_that_comes_to_nothing_leaves_what_was_there(tmp_path: Path) -> None:
    """The log of an engine that is still there; the next run's first trial starts a new one."""
    for name in ("ledger.jsonl", "results.log"):
        (tmp_path / name).write_text(f"an earlier {name}")
    ledger = Ledger(tmp_path)
    ledger.log("inspected")
    assert (tmp_path / "ledger.jsonl").read_text() == "an earlier ledger.jsonl"
    assert (tmp_path / "results.log").read_text() == "an earlier results.log"
    words = {
        "idea": "first",
        "why": "",
        "gate": "passed",
        "fault": "",
        "verdict": "kept",
        "author": "search",
    }
    row = Row(trial=0, lines_added=1, lines_removed=0, at_s=1.0, seconds=1.0, score=1.0, **words)
    ledger.add(row)
    ledger.add(replace(row, trial=1))
    lines = (tmp_path / "results.log").read_text().splitlines()
    assert [line.rpartition("] ")[2][:9] for line in lines] == [
        "inspected",
        "trial 0: ",
        "trial 1: ",
    ]
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [row["trial"] for row in rows] == [0, 1]


def gpu_designs() -> list[Design]:
    """All alternatives of a decision: one step from the plain design, and from two of kernels."""
    plain = decisions.plain_design()
    kernels = decisions.decide(plain, "layers", "kernels")
    captured = decisions.decide(kernels, "graphs", "all")
    starts = [plain, kernels, decisions.decide(captured, "cache", "pages")]
    found = [*starts, *(design for start in starts for _, design in decisions.moves(start, "cuda"))]
    return list({json.dumps(design): design for design in found}.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_design_of_the_cpu_is_right(name: str, tmp_path: Path) -> None:
    target = make_target(tmp_path, CONFIGS[name])
    cases = draw_cases(target, seed=5, num_random=1)
    singles = [design for _, design in decisions.moves(decisions.plain_design(), "cpu")]
    chosen = singles if name == "grouped heads" else singles[3::3]
    assert len(singles) > 8
    threads = torch.get_num_threads()
    for design in chosen:
        path = tmp_path / "engine.py"
        path.write_text(emit(design, "An engine."))
        verdict = gate.check(LocalPlayer(load_module(path), target), cases, allowed=Distance(1 / 3))
        assert verdict.is_passed, (
            decisions.differences(decisions.plain_design(), design),
            verdict.fault,
        )
    torch.set_num_threads(threads)


def test_what_is_written_is_tidy_and_stands_alone(tmp_path: Path) -> None:
    """ruff has no complaint, no directive is left, nothing is defined twice or unused."""
    sources = [emit(design, "An engine.\n\nWith a reason.") for design in gpu_designs()]
    assert len(set(sources)) > 25
    for number, source in enumerate(sources):
        assert not refusal(source)
        assert "forge:" not in source
        names = re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE)
        words = Counter(re.findall(r"\w+", source))
        assert len(set(names)) == len(names)
        assert all(words[name] > 1 for name in names if name != "create_engine")
        (tmp_path / f"engine_{number}.py").write_text(source)
    rules = ["--config", str(ROOT / "pyproject.toml")]
    for words in (["check", *rules, "--ignore", "I001"], ["format", "--check", *rules]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, str(tmp_path)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:]


def test_a_directive_is_for_its_whole_statement_however_a_formatter_splits_it() -> None:
    text = (
        "if True:\n    a = max(\n        1,\n        2,\n    )  # forge: when cache=pages\nb = 3\n"
    )
    plain = decisions.plain_design()
    assert keep_lines(text, plain, {}) == "if True:\nb = 3\n"
    assert keep_lines(text, {**plain, "cache": "pages"}, {}) == text.replace(
        "  # forge: when cache=pages", ""
    )


def test_a_design_has_only_the_code_it_needs() -> None:
    plain = emit(decisions.plain_design(), "Plain.")
    assert not re.search(r"triton|graph|page", plain)
    paged = emit(decisions.decide(decisions.plain_design(), "cache", "pages"), "Paged.")
    assert "PAGE_SIZE = 64" in paged
    assert "FIRST_SLOTS" not in paged


def test_deciding_brings_what_a_choice_requires() -> None:
    design = decisions.decide(decisions.plain_design(), "graphs", "all")
    assert (design["layers"], design["prefill"], design["decode"]) == (
        "kernels",
        "kernel",
        "split_kv",
    )
    assert not decisions.is_idle("vector_rows", design)
    assert decisions.is_idle("page_size", design)
    flash = decisions.decide(design, "prefill", "flash")
    assert flash["graphs"] == "decode"  # prompts are then not captured, decode steps still are
    assert all(
        design["layers"] == "torch"
        for _, design in decisions.moves(decisions.plain_design(), "cpu")
    )


def test_the_search_may_try_every_alternative() -> None:
    """In some profile, on its own or required by another choice: an unreachable one would be dead
    code.
    """
    left = {(one.name, choice.name) for one in decisions.DECISIONS for choice in one.alternatives}
    waiting = [(decisions.plain_design(), device) for device in ("cpu", "cuda")]
    for design, device in waiting:
        left -= {(one.name, choice.name) for one, choice in decisions.active(design)}
        for alternative, moved in decisions.moves(design, device):
            lost = decisions.forgone(design, moved)
            gains = any(save > lost.get(part, 0.0) for part, save in alternative.saves.items())
            if left and gains and (moved, device) not in waiting:
                waiting.append((moved, device))
    assert not left


@pytest.fixture
def broken(tmp_path: Path) -> tuple[Target, Path]:
    """A faulty engine: when a shorter text replaces a longer one, it keeps the longer."""
    target = make_target(tmp_path, SMALL)
    source = emit(decisions.plain_design(), "Broken.")
    right = "self.requests[id] = Request(slot, length)"
    assert right in source
    old = "self.requests[id].length if id in self.requests else 0"
    wrong = source.replace(right, right.replace("length", f"max(length, {old})"))
    path = tmp_path / "broken.py"
    path.write_text(wrong)
    return target, path


def test_gate_names_the_situation_in_which_an_engine_is_wrong(broken: tuple[Target, Path]) -> None:
    verdict = check_file(broken[1], broken[0])
    assert "replaced" in verdict.fault
    assert "logits are off" in verdict.fault


def test_evaluator_fails_a_broken_engine_and_times_a_right_one(
    broken: tuple[Target, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, path = broken
    words = [
        "--config",
        str(path.parent / "model_config.json"),
        "--weights",
        str(target.weight_dir),
    ]

    def evaluate(script: str, engine: Path, *more: str) -> tuple[int, str]:
        command = [script, "--engine", str(engine), *words, *more, "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(sys, "path", list(sys.path))
        module: Any = load_module(ROOT / "evaluator" / script)
        return module.main(), capsys.readouterr().out

    code, said = evaluate("test_correctness.py", path, "--max-batch", "8", "--traces", "1")
    assert code == 1
    assert "[FAIL] removed, re-added, replaced" in said
    assert "[PASS] single" in said
    right = path.with_name("engine.py")
    right.write_text(emit(decisions.plain_design(), "Right."))
    code, said = evaluate("benchmark_throughput.py", right, "--repeats", "1")
    assert code == 0
    report = json.loads(said.splitlines()[-1])
    assert (
        set(report["times_naive"])
        == set(report["naive"]["benches"])
        <= set(report["engine"]["benches"])
    )
    assert report["engine"]["faults"] == []


def test_evaluator_compares_engines_by_the_calls_that_both_were_timed_with(
    broken: tuple[Target, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A naive engine is too slow to be timed with all of them."""
    target, path = broken
    right = path.with_name("engine.py")
    right.write_text(emit(decisions.plain_design(), "Right."))
    words = ["--engine", str(right), "--also", str(path), "--weights", str(target.weight_dir)]
    words += [
        "--config",
        str(path.parent / "model_config.json"),
        "--device",
        "cpu",
        "--repeats",
        "1",
    ]
    monkeypatch.setattr(
        sys, "argv", ["script", *words, "--families", "decode", "--baseline-seconds", "0"]
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    script: Any = load_module(ROOT / "evaluator" / "benchmark_throughput.py")
    assert script.main() == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    shortened = {f"decode {batch}, first 1 calls" for batch in (1, 8)}
    assert set(report["times_naive"]) == shortened
    assert {report["naive"]["benches"][name]["calls_timed"] for name in shortened} == {1}
    assert report["engine"]["benches"]["decode 8"]["calls_timed"] > 1
    assert set(report["times_also"]["broken"]) == {"decode 1", "decode 8"} | shortened
    assert report["naive"]["faults"] == []


def test_evaluator_hands_out_tokens_on_the_device_and_on_the_cpu_in_every_situation(
    broken: tuple[Target, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, path = broken
    words = [
        "--weights",
        str(target.weight_dir),
        "--config",
        str(path.parent / "model_config.json"),
    ]
    words += [
        "--engine",
        str(BASELINE),
        "--device",
        "cpu",
        "--max-batch",
        "2",
        "--traces",
        "1",
    ]
    places: dict[str, list[bool]] = {}
    play = LocalPlayer.play

    def watched_play(
        player: LocalPlayer, calls: list[Call], *, on_device: bool, **rest: Any
    ) -> Played:
        places.setdefault(str(calls), []).append(on_device)
        return play(player, calls, on_device=on_device, **rest)

    monkeypatch.setattr(LocalPlayer, "play", watched_play)
    monkeypatch.setattr(sys, "argv", ["script", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script: Any = load_module(ROOT / "evaluator" / "test_correctness.py")
    assert script.main() == 0
    assert len(places) == 9
    assert all(each == [True, False] for each in places.values())


def test_evaluator_keeps_engines_of_one_name_apart() -> None:
    script: Any = load_module(ROOT / "evaluator" / "benchmark_throughput.py")
    paths = [Path("engine.py"), Path("a/engine.py"), Path("/x/b/engine.py"), Path("/y/b/engine.py")]
    names = list(script.short_names(paths).values())
    assert names == [f"{Path.cwd().name}/engine", "a/engine", "x/b/engine", "y/b/engine"]
    assert script.short_names([Path("a/engine.py")]) == {Path("a/engine.py"): "engine"}


def test_an_exam_has_more_rows_than_a_captured_step_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path, SMALL)

    def most_rows() -> int:
        exam = Exam.draw(target, seed=2, num_random=0, sizes=SIZES)
        return max(
            len(call.ids) for case in exam.cases for call in case.calls if call.kind == "decode"
        )

    assert most_rows() > max(STEP_SIZES)
    cache_bytes = 128 * target.shape.max_len * target.kv_bytes_per_token
    monkeypatch.setattr("penstock.forge.trial.CPU_CACHE_BYTES", cache_bytes)
    assert most_rows() <= max(STEP_SIZES)


class Otherwise(Reference):
    """Rounds in the same places as the reference, but sums in another order."""

    def _project(self, x: Tensor, name: str) -> Tensor:
        weight, half = self.weights[name].float(), x.shape[1] // 2
        return (
            x[:, :half].float() @ weight[:, :half].T + x[:, half:].float() @ weight[:, half:].T
        ).to(x.dtype)


def test_where_rounding_alone_is_past_the_tolerance_what_is_wrong_is_still_found(
    tmp_path: Path,
) -> None:
    """As in bfloat16 with some layers: an engine is right if its error is that of the reference."""
    deep = SMALL | {
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "intermediate_size": 512,
        "vocab_size": 500,
    }
    target = make_target(tmp_path, deep)
    knowing = Oracle(target)
    knowing.reference = Reference(target, torch.bfloat16)
    trace = Trace("any", target.shape, random.Random(3))
    trace.prefill({"a": 40, "b": 7, "c": 1})
    trace.decode(["b", "a"])
    case = knowing.answer(trace)
    allowed = allowed_distance(knowing.rounding(case))
    assert allowed.most > 1.0
    assert allowed_distance(Distance(0.2, 0.1)) == Distance(0.4)

    def compared(logits: dict[int, Tensor]) -> str:
        errors = [None] * len(trace.calls)
        played = Played(seconds=0.0, errors=errors, logits=logits, peak_bytes=0)
        return gate.compare(case, played, allowed)[0]

    def verdict(reference: Reference) -> str:
        knowing.reference = reference
        return compared(knowing.answer(trace).answers)

    assert not verdict(Otherwise(target, torch.bfloat16))
    assert not verdict(Reference(target, torch.float32))
    for wrong in ({"rope_theta": 100.0}, {"rms_norm_eps": 5e-5}):
        other = Target.of(deep | wrong, target.weight_dir, "cpu")
        assert "is allowed" in verdict(Otherwise(other, torch.bfloat16)), wrong
    shifted = {number: answer + 0.014 for number, answer in case.answers.items()}
    assert "root mean square" in compared(shifted)


def test_naive_engine_is_right(tmp_path: Path) -> None:
    target = make_target(tmp_path, SMALL)
    player = LocalPlayer(load_module(BASELINE), target)
    verdict = gate.check(player, draw_cases(target, seed=7, num_random=1), allowed=Distance(1 / 3))
    assert verdict.is_passed, verdict.fault


def test_toy_weights_fill_every_tensor_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "model_config.json"
    config.write_text(json.dumps(SMALL))
    monkeypatch.setattr(
        sys, "argv", ["script", "--config", str(config), "--output", str(tmp_path / "w")]
    )
    toy.main()
    tensors = torch.load(tmp_path / "w" / "model.pt", weights_only=True)
    assert tensors["lm_head.weight"].shape == (96, 48)
    assert len(tensors) == 3 + 9 * SMALL["num_hidden_layers"]


def test_faulty_targets_are_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no"):
        Target.open(tmp_path / "model_config.json", tmp_path, "cpu")
    with pytest.raises(ConfigError, match="mixtral"):
        Target.of({**SMALL, "model_type": "mixtral"}, tmp_path, "cpu")
    with pytest.raises(ConfigError, match="hidden_size"):
        Target.of({key: SMALL[key] for key in SMALL if key != "hidden_size"}, tmp_path, "cpu")
    with pytest.raises(ConfigError, match="are not supported"):
        Target.of({**SMALL, "num_key_value_heads": 3}, tmp_path, "cpu")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0)]
)
def test_budgets_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds
