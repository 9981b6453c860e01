"""Forge's time budget: no redundant trial, no kernel compiled twice, a good first guess."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from penstock.forge.initial_design import opening
from penstock.forge.ledger import Ledger, write_report
from penstock.forge.local import LocalPlayer, load_module
from penstock.forge.machine import Machine
from penstock.forge.measure import Bench, Timing, measure
from penstock.forge.oracle import Case, Distance, Oracle
from penstock.forge.reference import Reference
from penstock.forge.sandbox import Played
from penstock.forge.search import Search
from penstock.forge.target import Target
from penstock.forge.traces import Call, Trace
from penstock.forge.trial import Exam, Outcome, count_slots, widest_batch
from penstock.forge.writer import Proposal, Writer
from test_forge import SIZES, SMALL, make_target

H200 = Machine("NVIDIA H200", "cuda", "9.0", 141 << 30, 4.1e12, 7e14, 6.5e-6)
NO_LAUNCHING = Machine("a GPU", "cuda", "9.0", 0, 1e12, 1e15, 1e-9)
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
    """A fake player whose benches take the given times."""

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
    cases = {name: Case(name, [Call("remove", (name,))], {}) for name in BENCHES}
    return [
        Bench(name, family, cases[name], (0, 1), [cases[name]] * 3)
        for name, family in BENCHES.items()
    ]


def timings_of(seconds: float) -> dict[str, Timing]:
    return {name: Timing(family, seconds, 1, 1) for name, family in BENCHES.items()}


class Scripted:
    """A search that runs no trials: the test gives the time of each source and the contents of the
    profile.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seconds_of: Callable[[str], float],
        profile: Mapping[str, float],
        trial_s: Callable[[str], float] = lambda source: 1e-3,
    ) -> None:
        self.seconds_of = seconds_of
        self.profile = profile
        self.trial_s = trial_s
        self.tried: list[str] = []
        self.allowed_s: list[float] = []
        self.profiled: list[str] = []
        monkeypatch.setattr("penstock.forge.search.run_trial", self.run_trial)
        monkeypatch.setattr("penstock.forge.search.profile_engine", self.profile_engine)

    def run_trial(
        self,
        sandbox: Any,
        source: str,
        exam: Exam,
        *,
        seconds: float,
        is_profiled: bool = True,
        **rest: Any,
    ) -> Outcome:
        self.tried.append(source)
        self.allowed_s.append(seconds)
        taken = self.seconds_of(source)
        if math.isinf(taken):
            return Outcome("no such kernel", "build", 1.0)
        rest.get("when_right", lambda: None)()
        profile = self.profile if is_profiled else {}
        trial_s = self.trial_s(source)
        return Outcome("", "passed", trial_s, timings=timings_of(taken), profile=profile)

    def profile_engine(
        self, sandbox: Any, source: str, exam: Exam, *, seconds: float
    ) -> Mapping[str, float]:
        self.profiled.append(source)
        return self.profile

    def search(self, target: Target, machine: Machine, folder: Path, **more: Any) -> Search:
        box: Any = SimpleNamespace(enforced={}, given_up={})
        words = {"ledger": Ledger(folder), "out": folder / "engine.py", "budget_s": 60.0, **more}
        return Search(target, machine, Exam([], [], Distance(1.0)), box, **words)


def test_a_bench_is_repeated_until_it_has_been_seen_for_long_enough() -> None:
    """At least twice, since the first run may warm up, unless it was long; the fastest counts."""
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
    """An engine that remembers answers to prompts it has seen, and what else it has seen."""

    def __init__(self, engine: Any, is_lazy: bool) -> None:
        self.engine = engine
        self.is_lazy = is_lazy  # and then gives a wrong answer to a repeated request
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
    """Each play has other tokens, and the answers of each are checked."""
    target = make_target(tmp_path, SMALL)
    benches = measuring.draw_benches(target, Oracle(target), 3, replace(SIZES, repeats=3))
    path = tmp_path / "engine.py"
    path.write_text(emit(decisions.plain_design(), "An engine."))
    module: Any = load_module(path)

    def player_of(is_lazy: bool) -> LocalPlayer:
        create: Any = SimpleNamespace(
            create_engine=lambda *words: Memory(module.create_engine(*words), is_lazy)
        )
        return LocalPlayer(create, target)

    player = player_of(is_lazy=False)
    _, fault, _ = measure(player, benches, Distance(1 / 3))
    assert not fault
    assert player.engine.num_prefills > 2 * len(benches)
    assert player.engine.num_known == 0
    _, fault, _ = measure(player_of(is_lazy=True), benches, Distance(1 / 3))
    assert "prefill 8, while timed" in fault
    assert "logits are off" in fault


def test_a_candidate_that_cannot_catch_up_is_not_timed_to_the_end() -> None:
    slow = {"prefill 8": [0.3] * 2, "decode 1": [0.35] * 2, "decode 8": [0.7] * 2}
    player = Metronome(slow)
    timings, fault, _ = measure(player, draw_benches(), Distance(1.0), to_beat=timings_of(0.2))
    assert fault == "slower: decode 8 700 ms per call against 200"
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


@pytest.mark.parametrize("name", SHAPES)
def test_the_opening_on_a_gpu_captures_steps(name: str) -> None:
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


def test_a_profile_full_of_launches_leads_to_captured_steps_and_not_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves to the design that the facts suggest, then to longer passes; never to less
    capturing.
    """
    profile = {
        "decode.launch": 0.9,
        "decode.attention": 0.1,
        "prefill.launch": 0.8,
        "prefill.projection": 0.2,
    }
    judge = Scripted(monkeypatch, lambda source: 1.0 if "CUDAGraph" not in source else 0.5, profile)
    search = judge.search(gpu_target("6x768"), NO_LAUNCHING, tmp_path)
    search.run()
    ideas = [row.idea for row in search.ledger.rows]
    guess = opening(gpu_target("6x768"), H200)
    assert guess is not None
    suggested = decisions.differences(decisions.plain_design(), {**guess[0], "passes": "short"})
    assert set(ideas[1].split("; ")) == set(suggested)
    assert ideas[2] == "passes: short → all"
    assert not any("graphs: all" in idea for idea in ideas[2:])


def test_what_no_profiler_has_seen_may_be_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alternatives are then tried in the order of their best expected gain."""
    judge = Scripted(monkeypatch, lambda source: 1.0, {"decode.unseen": 0.7, "prefill.unseen": 0.3})
    search = judge.search(gpu_target("6x768"), NO_LAUNCHING, tmp_path, max_trials=2)
    search.run()
    assert "layers: torch → kernels" in search.ledger.rows[1].idea


def test_what_has_disappointed_waits_for_what_was_never_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another best engine it may deserve a second try, but not the next one."""

    def seconds_of(source: str) -> float:
        if "CUDAGraph" not in source:
            return 3.0
        if len(judge.tried) <= 2:  # the first guess
            return 1.0
        return 0.5 if "VECTOR_ROWS = 2" in source else 2.0

    judge = Scripted(monkeypatch, seconds_of, {"decode.projection": 1.0, "prefill.projection": 1.0})
    search = judge.search(gpu_target("6x768"), H200, tmp_path, max_trials=6)
    search.run()
    ideas = [(row.idea.partition(":")[0], row.verdict) for row in search.ledger.rows[2:]]
    assert ideas[:3] == [("weight_rows", "discarded")] * 2 + [("vector_rows", "kept")]
    assert ideas[3][0] != "weight_rows"


@pytest.mark.parametrize(
    ("max_len", "num_slots", "widest"),
    [(2048, 129, 64), (8192, 57, 16), (16384, 28, 8), (131072, 0, 0)],
)
def test_an_exam_has_no_more_requests_than_captured_engines_have_place_for(
    max_len: int, num_slots: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 8 B beside others on an H200: the longer its texts may be, the fewer fit."""
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
    assert opening(gpu_target("32x4096"), NO_LAUNCHING) is None


@pytest.mark.parametrize(("packed_gain", "is_packed"), [(2.0, True), (1.0, False)])
def test_the_opening_on_a_cpu_saves_operations_all_at_once_and_packs_weights_where_that_is_quicker(
    packed_gain: float, is_packed: bool
) -> None:
    target = Target.of(SMALL, Path("."), "cpu")
    machine = replace(H200, device="cpu", one_thread_gain=2.0, packed_gain=packed_gain)
    guess = opening(target, machine)
    assert guess is not None
    changed = decisions.differences(decisions.plain_design(), guess[0])
    names = ["weights", "norm", "rope", "prefill", "decode", *["products"] * is_packed, "threads"]
    assert [one.partition(":")[0] for one in changed] == names


@pytest.mark.parametrize("is_right", [True, False])
def test_after_the_first_version_the_opening_is_tried_and_the_first_is_profiled_only_if_it_fails(
    is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds_of(source: str) -> float:
        if "CUDAGraph" in source and is_right:
            return 0.1
        return 1.0 if len(judge.tried) == 1 else math.inf

    judge = Scripted(monkeypatch, seconds_of, {"decode.projection": 1.0, "prefill.projection": 1.0})
    search = judge.search(gpu_target("6x768"), H200, tmp_path, max_trials=3)
    search.run()
    first, second, *_ = judge.tried
    assert "CUDAGraph" not in first
    assert "CUDAGraph" in second
    rows = search.ledger.rows
    assert "launching" in rows[1].why
    assert [row.verdict for row in rows[:2]] == ["kept", "kept" if is_right else "discarded"]
    assert judge.profiled == ([] if is_right else [first])
    assert len(rows) == 3
    assert ("CUDAGraph" in search.out.read_text()) == is_right


@pytest.mark.parametrize(("left_s", "num_trials"), [(30.0, 3), (3.0, 1)])
def test_a_slow_first_version_leaves_the_opening_what_time_there_is(
    left_s: float, num_trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trial took all but 30 seconds; the opening takes 2, and later trials are expected to."""

    def trial_s(source: str) -> float:
        if "CUDAGraph" in source:
            return 2.0
        search.ledger = Ledger(tmp_path, time.monotonic() - (100.0 - left_s))
        return 100.0 - left_s

    profile = {"decode.projection": 1.0, "prefill.projection": 1.0}
    judge = Scripted(
        monkeypatch, lambda source: 0.1 if "CUDAGraph" in source else 1.0, profile, trial_s=trial_s
    )
    search = judge.search(gpu_target("32x4096"), H200, tmp_path, budget_s=100.0, max_trials=3)
    search.run()
    assert len(search.ledger.rows) == num_trials
    assert judge.allowed_s[-1] <= (100.0 if num_trials == 1 else left_s)
    assert ("CUDAGraph" in search.out.read_text()) == (num_trials > 1)


def test_a_second_interrupt_skips_all_but_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, the first version and the best would otherwise be timed again for it."""
    profile = {"decode.projection": 1.0, "prefill.projection": 1.0}
    judge = Scripted(monkeypatch, lambda source: 1.0 if source == judge.tried[0] else 0.5, profile)

    def interrupt(line: str) -> None:
        if "trial 1" in line:
            raise KeyboardInterrupt

    def interrupted_report(*words: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write_report(*words)

    monkeypatch.setattr("penstock.forge.search.write_report", interrupted_report)
    target, machine = (
        Target.of(SMALL, Path("."), "cpu"),
        Machine("CPU", "cpu", "", 0, 1e10, 1e11, 1e-6),
    )
    search = judge.search(target, machine, tmp_path, say=interrupt)
    before = signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    try:
        search.run()
    except KeyboardInterrupt:
        pytest.fail("the second interrupt came through")
    assert [row.verdict for row in search.ledger.rows] == ["kept", "kept"]
    assert len(judge.tried) == 3  # the second run of the first version would confirm the gain
    assert "interrupted" in (tmp_path / "report.md").read_text()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reply_is_waited_for_as_long_as_it_leaves_time_for_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    class Silent(Writer):
        is_exhausted = property(lambda self: bool(waited))  # type: ignore[assignment]

        def plan(self, *words: Any) -> str:
            return "no plan"

        def propose(self, source: str, brief: str, seconds: float = 0.0) -> Proposal | str:
            waited.append(seconds)
            return "no answer"

    judge = Scripted(monkeypatch, lambda source: 1.0, {}, trial_s=lambda source: 100.0)
    ledger, writer = (
        Ledger(tmp_path, time.monotonic() - 400.0),
        Silent("http://127.0.0.1:1", "silent"),
    )
    target = gpu_target("6x768")
    judge.search(
        target, NO_LAUNCHING, tmp_path, budget_s=1000.0, ledger=ledger, writer=writer
    ).run()
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
from penstock.forge.candidate_process import know_kernels_that_moved, load_file
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
    """The key of Triton's cache stays the same from candidate to candidate."""
    first = decisions.decide(decisions.plain_design(), "graphs", "all")
    moved = [
        ("vector_rows", "8"),
        ("split_keys", "1024"),
        ("graphs", "decode"),
        ("prefill", "flash"),
    ]
    designs = [first, *(decisions.decide(first, name, choice) for name, choice in moved)]
    paths = []
    for number, design in enumerate(designs):
        paths.append(tmp_path / f"engine_{number}.py")
        paths[-1].write_text(
            emit(design, "An engine." + "\n\nIt says more than the first." * number)
        )
    before, *others = kernel_keys(paths)
    assert len(before) > 12
    for after in others:
        shared = [name for name in after if after[name][1] == before[name][1]]
        assert len(shared) >= len(after) - 1
        assert any(after[name][0] != before[name][0] for name in shared)  # or else nothing moved
        assert {name: after[name][2] for name in shared} == {
            name: before[name][2] for name in shared
        }


class Kernel:
    """Records how it was compiled and that it was launched."""

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


def test_kernels_are_compiled_at_once_each_form_once_and_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
