"""Forge uses its time well: no play that says nothing new, no kernel compiled twice, a good first guess."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from command_line import ROOT
from penstock.errors import CapacityError
from penstock.forge import decisions
from penstock.forge import measure as measuring
from penstock.forge.emit import emit
from penstock.forge.fragments import launch
from penstock.forge.ledger import Ledger, write_report
from penstock.forge.local import LocalPlayer, load_module
from penstock.forge.machine import Machine
from penstock.forge.measure import FAMILIES, Bench, Timing, measure
from penstock.forge.opening import opening
from penstock.forge.oracle import Case, Distance, Oracle
from penstock.forge.reference import Reference
from penstock.forge.sandbox import Played
from penstock.forge.search import Engine, Search
from penstock.forge.target import Target
from penstock.forge.traces import Call, Trace
from penstock.forge.trial import Bar, Exam, Outcome, count_slots, widest_batch
from penstock.forge.writer import Proposal, Writer
from test_forge import SIZES, SMALL, make_target

H200 = Machine("NVIDIA H200", "cuda", "9.0", 141 << 30, 4.1e12, 7e14, 6.5e-6)
QUICK = Machine("a GPU that launches in no time", "cuda", "9.0", 0, 1e12, 1e15, 1e-9)
SHAPES = {  # layers, width, width of the feed-forward, heads, key heads, head_dim, vocabulary
    "6x768": (6, 768, 2048, 12, 4, 64, 32000),
    "32x4096": (32, 4096, 14336, 32, 8, 128, 128256),
}
BENCHES = {"prefill 8": "prefill", "decode 1": "decode", "decode 8": "decode", "mixed": "mixed"}


def gpu_target(name: str) -> Target:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "vocab_size")
    sizes = dict(zip(names, SHAPES[name]))
    return Target.of({**SMALL, **sizes, "torch_dtype": "bfloat16"}, Path("."), "cuda")


class Metronome:
    """A player whose benches take as long as one says."""

    def __init__(self, seconds: dict[str, Sequence[float]]) -> None:
        self.seconds = {name: list(values) for name, values in seconds.items()}
        self.played: list[str] = []

    def play(
        self,
        calls: Sequence[Call],
        *,
        keep: Sequence[int],
        timed: tuple[int, int] = (-1, -1),
        on_device: bool = True,
    ) -> Played:
        (name,) = calls[0].ids
        self.played.append(name)
        return Played(self.seconds[name].pop(0), [None], {}, 0)


def draw_benches() -> list[Bench]:
    cases = {name: Case(name, [Call("remove", (name,))], [None]) for name in BENCHES}
    return [Bench(name, family, cases[name], (0, 1), [cases[name]] * 3) for name, family in BENCHES.items()]


def timings_of(seconds: float) -> dict[str, Timing]:
    return {name: Timing(family, seconds, 1, 1) for name, family in BENCHES.items()}


def test_a_bench_is_repeated_until_it_has_been_seen_for_long_enough() -> None:
    """Twice at least, since the first play may have to warm up, if that is not little of it; the quickest
    counts."""
    seconds = {
        "prefill 8": [0.9, 0.7],
        "decode 1": [0.15] * 3,
        "decode 8": [0.01, 0.004, 0.005, 0.006],
        "mixed": [1.1],
    }
    player = Metronome(seconds)
    timings, fault, _ = measure(player, draw_benches(), allowed=Distance(1.0))
    assert not fault
    assert not any(player.seconds.values())
    assert {name: timing.seconds for name, timing in timings.items()} == {
        name: min(values) for name, values in seconds.items()
    }


class Memory:
    """An engine that knows the answers to prompts it has seen before, and what else it has seen."""

    def __init__(self, engine: Any, is_lazy: bool) -> None:
        self.engine = engine
        self.is_lazy = is_lazy  # and then answers anything to requests that come back
        self.known: dict[Any, torch.Tensor] = {}
        self.ids: set[tuple[str, ...]] = set()
        self.num_prefills = self.num_known = 0

    def prefill(self, ids: list[str], prompts: list[torch.Tensor]) -> torch.Tensor:
        key = tuple(tuple(prompt.tolist()) for prompt in prompts)
        self.num_prefills += 1
        self.num_known += key in self.known
        self.known[key] = self.engine.prefill(ids, prompts)
        is_back = tuple(ids) in self.ids
        self.ids.add(tuple(ids))
        return torch.zeros_like(self.known[key]) if self.is_lazy and is_back else self.known[key]

    def decode(self, ids: list[str], tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.engine.decode(ids, tokens)
        return logits

    def remove(self, ids: list[str]) -> None:
        self.engine.remove(ids)


def test_what_an_engine_remembers_of_a_play_does_not_help_it_in_the_next(tmp_path: Path) -> None:
    """Each has other tokens, and each has answers that are checked."""
    target = make_target(tmp_path, SMALL)
    benches = measuring.draw_benches(target, Oracle(target), 3, replace(SIZES, repeats=3))
    path = tmp_path / "engine.py"
    path.write_text(emit(decisions.plain_design(), "An engine."))
    player = LocalPlayer(load_module(path), target)
    plain = player.engine
    player.engine = memory = Memory(plain, is_lazy=False)
    _, fault, _ = measure(player, benches, Distance(1 / 3))
    assert not fault
    assert memory.num_prefills > 2 * len(benches)
    assert memory.num_known == 0
    player.engine = Memory(plain, is_lazy=True)
    _, fault, _ = measure(player, benches, Distance(1 / 3))
    assert "prefill 8, while timed" in fault
    assert "logits are off" in fault


def test_a_candidate_that_cannot_catch_up_is_not_timed_to_the_end() -> None:
    slow = {"prefill 8": [0.3] * 2, "decode 1": [0.35] * 2, "decode 8": [0.7] * 2}
    player = Metronome(slow)
    timings, fault, _ = measure(player, draw_benches(), Distance(1.0), to_beat=timings_of(0.2))
    assert fault == "slower: decode 8 700 ms a call against 200"
    assert set(timings) == set(slow)


@pytest.mark.parametrize(
    ("prefill_s", "decode_s"),
    [(0.02, (0.9, 0.9)), (0.21, (0.9, 0.05)), (0.21, (0.21, 0.21))],
    ids=["prompts make up", "large steps make up", "hardly slower"],
)
def test_a_candidate_that_may_catch_up_is_timed_to_the_end(
    prefill_s: float, decode_s: tuple[float, float]
) -> None:
    seconds = dict(zip(BENCHES, (prefill_s, *decode_s, 0.5)))
    player = Metronome({name: [value] * 4 for name, value in seconds.items()})
    timings, fault, _ = measure(player, draw_benches(), Distance(1.0), to_beat=timings_of(0.2))
    assert not fault
    assert set(timings) == set(BENCHES)


def searched(
    target: Target,
    machine: Machine,
    folder: Path,
    patch: pytest.MonkeyPatch,
    judge: Callable[[str], float],
    profile: dict[str, float],
    max_trials: int = 1000,
) -> Search:
    """A search whose candidates all are right, and take as long as the judge says."""

    def run_trial(sandbox: Any, source: str, *given: Any, **rest: Any) -> Outcome:
        rest.get("when_right", lambda: None)()
        return Outcome("", "passed", 1e-3, timings=timings_of(judge(source)), profile=profile)

    patch.setattr("penstock.forge.search.run_trial", run_trial)
    box: Any = SimpleNamespace(enforced={}, given_up={})
    exam, out = Exam([], [], Distance(1.0)), folder / "engine.py"
    search = Search(target, machine, exam, box, Ledger(folder), out, budget_s=60.0, max_trials=max_trials)
    search.run()
    return search


def ideas_of(search: Search) -> list[tuple[str, str]]:
    return [(row.idea.partition(":")[0], row.verdict) for row in search.ledger.rows]


@pytest.mark.parametrize("name", SHAPES)
def test_the_opening_on_a_gpu_is_what_a_profile_full_of_launches_leads_to(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, fused weights and captured steps together: one trial, with or without a profile."""
    target = gpu_target(name)
    guess = opening(target, H200)
    assert guess is not None
    design, why = guess
    chosen = {part: design[part] for part in ("layers", "weights", "prefill", "decode", "graphs")}
    expected = {"layers": "kernels", "weights": "fused", "prefill": "kernel", "decode": "split_kv"}
    assert chosen == {**expected, "graphs": "all"}
    assert design["passes"] == ("all" if name == "6x768" else "short")
    assert "launching" in why
    assert opening(target, QUICK) is None
    profile = {
        "decode.launch": 0.9,
        "decode.attention": 0.1,
        "prefill.launch": 0.8,
        "prefill.projection": 0.2,
    }
    speed = 1.0

    def quicken(source: str) -> float:
        nonlocal speed
        speed *= 2.0
        return 1.0 / speed

    found = searched(target, QUICK, tmp_path, monkeypatch, quicken, profile, max_trials=2)
    assert found.best is not None
    assert found.best.design == {**design, "passes": "short"}
    found = searched(target, QUICK, tmp_path, monkeypatch, quicken, profile)
    assert found.ledger.rows[2].idea.startswith("passes: ")
    assert found.best is not None  # what captures less than is captured now was never worth a trial
    assert (found.best.design["passes"], found.best.design["graphs"]) == ("all", "all")
    assert not any("flash" in row.idea for row in found.ledger.rows)


def test_what_no_profiler_has_seen_may_be_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then alternatives are tried by what they promise at best: each kind of work is an eighth of all."""
    profile = {"decode.unseen": 0.7, "prefill.unseen": 0.3}
    target = gpu_target("6x768")
    found = searched(target, QUICK, tmp_path, monkeypatch, lambda source: 1.0, profile, max_trials=2)
    tried = found.ledger.rows[1]
    assert tried.idea.startswith("layers: ")
    assert "kernels" in tried.idea
    assert " is 12% of the time" in tried.why


def test_what_has_disappointed_waits_for_what_was_never_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another best engine it may be worth a second try, but not the next one."""
    profile = {"decode.projection": 1.0, "prefill.projection": 1.0}

    def judge(source: str) -> float:
        if "CUDAGraph" not in source:
            return 4.0
        return 0.5 if "VECTOR_ROWS = 2" in source else 1.0

    target = gpu_target("6x768")
    ideas = ideas_of(searched(target, H200, tmp_path, monkeypatch, judge, profile, max_trials=6))
    assert [verdict for _, verdict in ideas[:2]] == ["kept", "kept"]  # the first version, the opening
    assert ideas[2:5] == [("weight_rows", "discarded")] * 2 + [("vector_rows", "kept")]
    assert ideas[5][0] != "weight_rows"


@pytest.mark.parametrize(
    ("max_len", "num_slots", "widest"), [(2048, 129, 64), (8192, 57, 16), (16384, 28, 8), (131072, 0, 0)]
)
def test_an_exam_has_no_more_requests_than_captured_engines_have_place_for(
    max_len: int, num_slots: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 8 B beside others on an H200; the longer its texts may be, the fewer fit."""
    target = gpu_target("32x4096")
    target = replace(target, shape=target.shape._replace(max_len=max_len))
    free = target.weight_bytes + int(123.2e9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    if not num_slots:
        with pytest.raises(CapacityError, match="131,072 tokens") as raised:
            count_slots(target)
        assert "max_position_embeddings" in raised.value.todo
        return
    assert count_slots(target) == num_slots
    assert widest_batch(num_slots) == widest


def test_there_is_no_opening_where_launching_is_not_what_takes_time() -> None:
    assert opening(gpu_target("32x4096"), QUICK) is None


def test_the_opening_on_a_cpu_saves_operations_all_at_once() -> None:
    target, machine = Target.of(SMALL, Path("."), "cpu"), replace(H200, device="cpu", one_thread_gain=2.0)
    guess = opening(target, machine)
    assert guess is not None
    changed = decisions.differences(decisions.plain_design(), guess[0])
    assert [one.partition(":")[0] for one in changed] == [
        "weights",
        "norm",
        "rope",
        "prefill",
        "decode",
        "threads",
    ]


@pytest.mark.parametrize("is_right", [True, False])
def test_after_the_first_version_the_opening_is_tried_and_the_first_is_profiled_only_if_it_fails(
    is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = {"decode.projection": 1.0, "prefill.projection": 1.0}
    tried: list[tuple[str, bool]] = []

    def run_trial(
        sandbox: Any,
        source: str,
        exam: Exam,
        *,
        bar: Bar | None = None,
        is_profiled: bool = True,
        **rest: Any,
    ) -> Outcome:
        tried.append((source, is_profiled))
        if bar is None:
            rest["when_right"]()
            return Outcome("", "passed", 1.0, timings=timings_of(1.0))
        if "CUDAGraph" in source and is_right:
            return Outcome("", "passed", 1.0, timings=timings_of(0.1), profile=profile)
        return Outcome("no such kernel", "build", 1.0)

    profiled: list[str] = []

    def profile_engine(sandbox: Any, source: str, exam: Exam, *, seconds: float) -> dict[str, float]:
        profiled.append(source)
        return profile

    monkeypatch.setattr("penstock.forge.search.run_trial", run_trial)
    monkeypatch.setattr("penstock.forge.search.profile_engine", profile_engine)
    sandbox: Any = SimpleNamespace(enforced={}, given_up={})
    out = tmp_path / "engine.py"
    exam, ledger = Exam([], [], Distance(1.0)), Ledger(tmp_path)
    search = Search(gpu_target("6x768"), H200, exam, sandbox, ledger, out, budget_s=60.0, max_trials=3)
    search.run()
    first, second, *_ = tried
    assert "CUDAGraph" not in first[0]
    assert not first[1]
    assert "CUDAGraph" in second[0]
    assert "launching" in ledger.rows[1].why
    assert [row.verdict for row in ledger.rows[:2]] == ["kept", "kept" if is_right else "discarded"]
    assert profiled == ([] if is_right else [first[0]])
    assert len(ledger.rows) == 3
    assert ("CUDAGraph" in out.read_text()) == is_right


@pytest.mark.parametrize(("left_s", "num_trials"), [(30.0, 3), (3.0, 1)])
def test_a_slow_first_version_leaves_the_opening_what_time_there_is(
    left_s: float, num_trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trial took all but 30 seconds; the opening takes 2, and the one after it is expected to."""
    allowed: list[float] = []
    profile = {"decode.projection": 1.0, "prefill.projection": 1.0}

    def run_trial(sandbox: Any, source: str, *given: Any, seconds: float, **rest: Any) -> Outcome:
        allowed.append(seconds)
        is_first = "CUDAGraph" not in source
        if is_first:
            rest["when_right"]()
            search.ledger = Ledger(tmp_path, time.monotonic() - (100.0 - left_s))
        seconds, timings = (100.0 - left_s, timings_of(1.0)) if is_first else (2.0, timings_of(0.1))
        return Outcome("", "passed", seconds, timings=timings, profile={} if is_first else profile)

    monkeypatch.setattr("penstock.forge.search.run_trial", run_trial)
    monkeypatch.setattr("penstock.forge.search.profile_engine", lambda *given, **rest: {})
    box: Any = SimpleNamespace(enforced={}, given_up={})
    exam, out = Exam([], [], Distance(1.0)), tmp_path / "engine.py"
    given: Any = {"budget_s": 100.0, "max_trials": 3}
    search = Search(gpu_target("32x4096"), H200, exam, box, Ledger(tmp_path), out, **given)
    search.run()
    assert len(search.ledger.rows) == num_trials
    assert allowed[-1] <= (100.0 if num_trials == 1 else left_s)
    assert ("CUDAGraph" in out.read_text()) == (num_trials == 3)


def test_who_interrupts_twice_waits_for_the_report_and_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the first version and the best would be timed again for it."""
    profile = {"decode.projection": 1.0, "prefill.projection": 1.0}
    tried: list[str] = []

    def run_trial(sandbox: Any, source: str, *given: Any, seconds: float, **rest: Any) -> Outcome:
        assert seconds <= 60.0
        tried.append(source)
        timings = timings_of(1.0 if source == tried[0] else 0.5)
        return Outcome("", "passed", 1e-3, timings=timings, profile=profile)

    def interrupt(line: str) -> None:
        if "trial 1" in line:
            raise KeyboardInterrupt

    def interrupted_report(*words: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write_report(*words)

    monkeypatch.setattr("penstock.forge.search.run_trial", run_trial)
    monkeypatch.setattr("penstock.forge.search.write_report", interrupted_report)
    box: Any = SimpleNamespace(enforced={}, given_up={})
    exam, out = Exam([], [], Distance(1.0)), tmp_path / "engine.py"
    target, machine = Target.of(SMALL, Path("."), "cpu"), Machine("CPU", "cpu", "", 0, 1e10, 1e11, 1e-6)
    search = Search(target, machine, exam, box, Ledger(tmp_path), out, budget_s=60.0, say=interrupt)
    try:
        search.run()
    except KeyboardInterrupt:
        pytest.fail("the second interrupt came through")
    assert [row.verdict for row in search.ledger.rows] == ["kept", "kept"]
    assert len(tried) == 3  # the second time the first version, to confirm the gain
    assert "interrupted" in (tmp_path / "report.md").read_text()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_reply_is_waited_for_as_long_as_it_leaves_time_for_its_trial(tmp_path: Path) -> None:
    waited: list[float] = []

    class Silent(Writer):
        def propose(self, source: str, brief: str, seconds: float = 0.0) -> Proposal | str:
            waited.append(seconds)
            self._num_failures = 9
            return "no answer"

    box: Any = SimpleNamespace(enforced=())
    exam, out = Exam([], [], Distance(1.0)), tmp_path / "engine.py"
    ledger = Ledger(tmp_path, time.monotonic() - 400.0)
    target = Target.of(SMALL, Path("."), "cpu")
    search = Search(target, H200, exam, box, ledger, out, budget_s=1000.0)
    outcome = Outcome("", "passed", 1.0, timings=timings_of(1.0))
    search.best = Engine("", decisions.plain_design(), outcome, "plain", dict.fromkeys(FAMILIES, 1.0))
    search.judged_s = [100.0]
    search.improve_by_writing(Silent("http://127.0.0.1:1", "silent"))
    assert waited == [pytest.approx(1000.0 - 400.0 - 120.0, abs=5.0)]


def test_a_reference_that_is_widened_as_it_goes_is_the_one_in_float32(tmp_path: Path) -> None:
    target = make_target(tmp_path, SMALL)
    knowing = Oracle(target)
    right = knowing.reference.logits([5, 6, 7], [0, 2])
    knowing.reference = Reference(target, torch.float16)
    widened = knowing.reference.in_float32().logits([5, 6, 7], [0, 2])
    assert torch.equal(widened, right)
    trace = Trace("any", target.shape, random.Random(1))
    trace.prefill({"a": 20, "b": 7})
    trace.decode(["b", "a"])
    rounding = knowing.rounding(knowing.answer(trace))
    assert 0.0 < rounding.typical < rounding.most < 1.0


KEYS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from penstock.forge.host import know_kernels_that_moved, load_file
from triton.runtime.jit import JITFunction
know_kernels_that_moved()
found = []
for path in sys.argv[2:]:
    kernels = [each for each in vars(load_file("engine", path)).values() if isinstance(each, JITFunction)]
    lines = {each.__name__: each.fn.__code__.co_firstlineno for each in kernels}
    found.append({each.__name__: (lines[each.__name__], each.src, each.cache_key) for each in kernels})
print(json.dumps(found))
"""


def kernel_keys(paths: Sequence[Path]) -> list[dict[str, tuple[int, str, str]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", KEYS, str(ROOT), *map(str, paths)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[dict[str, tuple[int, str, str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_kernel_that_only_moved_is_not_compiled_again(tmp_path: Path) -> None:
    """What Triton knows a compiled kernel by stays the same from candidate to candidate."""
    first = decisions.decide(decisions.plain_design(), "graphs", "all")
    moved = [("vector_rows", "8"), ("split_keys", "1024"), ("graphs", "decode"), ("prefill", "flash")]
    designs = [first, *(decisions.decide(first, name, choice) for name, choice in moved)]
    paths = []
    for number, design in enumerate(designs):
        paths.append(tmp_path / f"engine_{number}.py")
        paths[-1].write_text(emit(design, "An engine." + "\n\nIt says more than the first." * number))
    before, *others = kernel_keys(paths)
    assert len(before) > 12
    for after in others:
        shared = [name for name in after if after[name][1] == before[name][1]]
        assert len(shared) >= len(after) - 1
        assert any(after[name][0] != before[name][0] for name in shared)  # or else nothing moved
        assert {name: after[name][2] for name in shared} == {name: before[name][2] for name in shared}


class Kernel:
    """Remembers how it was compiled and that it was started."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.loaded: list[str] = []
        self.started = 0

    def __str__(self) -> str:
        return f"kernel {id(self)}"

    __repr__ = __str__

    def warmup(self, *words: Any, grid: tuple[int, ...], **options: Any) -> Kernel:
        self.compiled.append((*words[1:], *options.values()))
        self.loaded.append(threading.current_thread().name)
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *words, **options: setattr(self, "started", self.started + 1)


def test_kernels_are_compiled_at_once_each_form_once_and_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    first, second = Kernel(), Kernel()

    def run() -> None:
        for rows in (4, 4, 8):
            launch.launch(first, (rows,))(torch.zeros(rows), rows, BLOCK=16)
        launch.launch(second, (1,))(torch.zeros(1), 1)

    launch.compile_at_once([run, run], torch.device("cpu"))
    assert sorted(first.compiled) == [(4, 16), (8, 16)]
    assert second.compiled == [(1,)]
    assert threading.main_thread().name not in first.loaded
    assert first.started == second.started == 0
    run()
    assert (first.started, second.started) == (3, 1)
