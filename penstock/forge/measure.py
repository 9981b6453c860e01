"""Measures an engine's speed: times parts of traces, and checks some of their answers. Frozen like
the gate.

An engine cannot gain by being wrong while it is timed: each timed trace has a few calls whose
logits must be right, and the engine does not know which. Nor by caching answers: every play of a
trace has other tokens.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.forge.gate import Player, compare
from penstock.forge.oracle import Case, Distance, Oracle
from penstock.forge.target import Target
from penstock.forge.traces import Trace

FAMILIES = ("prefill", "decode", "mixed")
CHECKED_CALLS = 3
ENOUGH_S = 0.4  # of timed calls: more would add little precision
LONG_S = 1.0  # in so long a play, warming up does not matter
HOPELESS_GAIN = 1 / 1.5  # over the best engine, at the most optimistic for benches not yet timed


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to time: enough to load the device, little enough to be repeated.

    `repeats`: how often at most a bench is played after the first time.
    """

    prompt_len: int
    context_len: int
    steps: int
    batches: tuple[int, ...]
    mixed_calls: int
    repeats: int

    @classmethod
    def of(cls, target: Target) -> Sizes:
        longest = target.shape.max_len
        if target.is_cuda:
            return cls(min(1024, longest // 2), min(512, longest // 2), 24, (1, 8, 32), 64, 3)
        return cls(min(64, longest // 2), min(48, longest // 2), 8, (1, 8), 24, 5)


@dataclass(frozen=True, slots=True)
class Bench:
    name: str
    family: str
    case: Case
    timed: tuple[int, int]
    repeats: Sequence[Case]  # the same calls with other tokens, for each further play

    @property
    def plays(self) -> Sequence[Case]:
        return (self.case, *self.repeats)

    @property
    def num_tokens(self) -> int:
        return sum(call.num_tokens for call in self.case.calls[slice(*self.timed)])

    @property
    def num_decoded(self) -> int:
        """The tokens of decode calls among these: prompts may be timed with them."""
        calls = self.case.calls[slice(*self.timed)]
        return sum(call.num_tokens for call in calls if call.kind == "decode")


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one bench: its quickest repeat, which other processes disturbed least."""

    family: str
    seconds: float
    num_tokens: int
    num_calls: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def call_ms(self) -> float:
        return 1e3 * self.seconds / self.num_calls


def draw_benches(
    target: Target, oracle: Oracle, seed: int, sizes: Sizes | None = None, seconds: float = math.inf
) -> list[Bench]:
    """Benches with at least two plays each, and more while computing answers takes < `seconds`."""
    rng = random.Random(seed)
    sizes = sizes or Sizes.of(target)
    started = time.monotonic()

    def bench(name: str, family: str, trace: Trace, timed: tuple[int, int]) -> Bench:
        first = oracle.answer(trace, _checked(trace, range(*timed)))
        repeats: list[Case] = []
        while len(repeats) < sizes.repeats and (
            not repeats or time.monotonic() - started < seconds
        ):
            repeats.append(_answer_one(oracle, trace.redrawn(), range(*timed)))
        return Bench(name, family, first, timed, repeats)

    def new(name: str) -> Trace:
        return Trace(name, target.shape, rng)

    trace = new("prefill")
    trace.prefill({f"r{i}": rng.randint(sizes.prompt_len // 2, sizes.prompt_len) for i in range(8)})
    benches = [bench("prefill 8", "prefill", trace.end(), (0, 1))]
    trace = new("prefill 1")
    trace.prefill({"r": sizes.prompt_len // 2})
    benches.append(bench("prefill 1", "prefill", trace.end(), (0, 1)))
    for batch in sizes.batches:
        trace = new("decode")
        ids = [f"r{i}" for i in range(batch)]
        trace.prefill({id: rng.randint(sizes.context_len // 4, sizes.context_len) for id in ids})
        trace.decode(ids, steps=sizes.steps)
        benches.append(bench(f"decode {batch}", "decode", trace.end(), (1, 1 + sizes.steps)))
    trace = _mixed(new("mixed"), sizes)
    benches.append(bench("mixed", "mixed", trace, (0, len(trace.calls))))
    return benches


def _checked(trace: Trace, numbers: Sequence[int]) -> frozenset[int]:
    """A few of these calls."""
    asked = [number for number in numbers if trace.calls[number].kind != "remove"]
    return frozenset(trace.rng.sample(asked, min(CHECKED_CALLS, len(asked))))


def _answer_one(oracle: Oracle, trace: Trace, numbers: Sequence[int]) -> Case:
    """Computes right answers for one request only, since its text is most of their cost."""
    (some_call, *_) = _checked(trace, numbers)
    id = trace.rng.choice(trace.calls[some_call].ids)
    its_calls = [number for number in numbers if id in trace.calls[number].ids]
    return oracle.answer(trace, _checked(trace, its_calls), frozenset([id]))


def _mixed(trace: Trace, sizes: Sizes) -> Trace:
    """Requests come and go while others decode."""
    rng, number = trace.rng, 0
    while len(trace.calls) < sizes.mixed_calls:
        growing = [id for id in trace.alive if len(trace.alive[id]) < trace.shape.max_len]
        if not growing or (len(trace.alive) < 16 and rng.random() < 0.2):
            longest = max(2, sizes.context_len // 2)
            new_ids = [f"r{number + i}" for i in range(rng.randint(1, 4))]
            trace.prefill({id: rng.randint(1, longest) for id in new_ids})
            number += len(new_ids)
        elif rng.random() < 0.1:
            trace.remove([rng.choice(sorted(trace.alive))])
        else:
            trace.decode(growing)
    return trace.end()


def measure(
    player: Player,
    benches: Sequence[Bench],
    allowed: Distance,
    to_beat: Mapping[str, Timing] | None = None,
) -> tuple[dict[str, Timing], str, int]:
    """Timings by bench, why they ended early (or empty), and the peak memory."""
    timings: dict[str, Timing] = {}
    peak_bytes = 0
    for bench in benches:
        seconds, fault, bench_bytes = _time(player, bench, allowed)
        peak_bytes = max(peak_bytes, bench_bytes)
        if fault:
            return timings, f"{bench.name}, while timed: {fault}", peak_bytes
        num_calls = bench.timed[1] - bench.timed[0]
        timings[bench.name] = Timing(bench.family, seconds, bench.num_tokens, num_calls)
        if to_beat and len(timings) < len(benches) and is_hopeless(timings, to_beat):
            return timings, f"slower: {_slowest(timings, to_beat)}", peak_bytes
    return timings, "", peak_bytes


def _time(player: Player, bench: Bench, allowed: Distance) -> tuple[float, str, int]:
    """The quickest of at least two plays, since the first may warm up; or a single long play."""
    seconds: list[float] = []
    peak_bytes = 0
    for case in bench.plays:
        if sum(seconds) >= (LONG_S if len(seconds) < 2 else ENOUGH_S):
            break
        played = player.play(case.calls, keep=case.answers, timed=bench.timed)
        fault, _ = compare(case, played, allowed)
        if fault:
            return 0.0, fault, peak_bytes
        seconds.append(played.seconds)
        peak_bytes = max(peak_bytes, played.peak_bytes)
    return min(seconds), "", peak_bytes


def is_hopeless(timings: Mapping[str, Timing], to_beat: Mapping[str, Timing]) -> bool:
    """Whether the engine stays clearly slower, even if the benches not yet timed gain as much as
    the best one so far.

    Checked once prompts and two sizes of decode steps are timed: one size may be an exception.
    """
    families = [timing.family for timing in timings.values()]
    if "prefill" not in families or families.count("decode") < 2:
        return False
    gained = gains(timings, to_beat)
    hoped = {family: gained.get(family, max(gained.values())) for family in FAMILIES}
    return statistics.geometric_mean(hoped.values()) < HOPELESS_GAIN


def _slowest(timings: Mapping[str, Timing], to_beat: Mapping[str, Timing]) -> str:
    name = max(timings, key=lambda name: timings[name].seconds / to_beat[name].seconds)
    return f"{name} {timings[name].call_ms:.3g} ms per call against {to_beat[name].call_ms:.3g}"


def gains(timings: Mapping[str, Timing], before: Mapping[str, Timing]) -> dict[str, float]:
    """The speed-up per family: the geometric mean over its benches."""
    ratios: dict[str, list[float]] = {}
    for name, timing in timings.items():
        ratios.setdefault(timing.family, []).append(before[name].seconds / timing.seconds)
    return {family: statistics.geometric_mean(values) for family, values in ratios.items()}


def score(timings: Mapping[str, Timing], before: Mapping[str, Timing]) -> float:
    """A single number for comparisons: every family has the same weight."""
    return statistics.geometric_mean(gains(timings, before).values())
