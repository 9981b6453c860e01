"""One trial of one candidate: screen, build, check, time, profile. The same for all authors."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.errors import CapacityError
from penstock.forge import gate
from penstock.forge.fragments.cache_slots import MAX_SLOTS, MEMORY_SHARE
from penstock.forge.measure import Bench, Sizes, Timing, draw_benches, measure, score
from penstock.forge.oracle import (
    Case,
    Distance,
    Oracle,
    allowed_distance,
    count_tokens,
    typical_case,
)
from penstock.forge.run_log import Phases
from penstock.forge.sandbox import CandidateError, Hosted, OutOfTime, Sandbox
from penstock.forge.static_check import refusal
from penstock.forge.target import Target
from penstock.forge.traces import Trace, correctness_traces

LEAST_SLOTS = 20  # for the requests of a mixed trace, and a spare one
CROWD = 65  # one more than the rows that steps are captured for
CPU_CACHE_BYTES = 4 << 30  # part of the memory that a trial on a CPU may use besides the weights
CASES_SHARE = 0.2  # of the time left, to compute the right answers of all cases
BENCHES_SHARE = 0.1
ALWAYS = ("single", "batched", "inserted in between", "removed, re-added, replaced", "refusals")
MAX_BUILD_S = 60.0
PROFILED_CALLS = 3  # per trace: reading a profile takes longer than the calls


@dataclass(frozen=True, slots=True)
class Exam:
    """The tests and benches for all candidates of a run. Drawn once; hidden from candidates."""

    cases: Sequence[Case]
    benches: Sequence[Bench]
    allowed: Distance  # from right answers
    left_out: Sequence[str] = ()  # situations for which there was no time

    @classmethod
    def draw(
        cls,
        target: Target,
        seed: int,
        *,
        num_random: int = 4,
        sizes: Sizes | None = None,
        phases: Phases | None = None,
        seconds: float = math.inf,
    ) -> Exam:
        """Computing right answers takes a share of the run's remaining `seconds`: situations that
        would need more are left out, but never the common ones.
        """
        phases = phases or Phases()
        crowd = CROWD if _has_room(target) else 0  # before the oracle takes memory
        num_slots = count_slots(target)
        knowing = Oracle(target)
        phases.end("weights")
        max_batch = widest_batch(num_slots) if target.is_cuda else 24
        traces = correctness_traces(
            target.shape, seed, num_random=num_random, max_batch=max_batch, crowd=crowd
        )
        cases = answer_in_time(knowing, traces, CASES_SHARE * seconds)
        random.Random(seed).shuffle(cases)
        phases.end("cases")
        sizes = sizes or Sizes.of(target)
        sizes = replace(sizes, batches=tuple(batch for batch in sizes.batches if batch < num_slots))
        benches = draw_benches(target, knowing, seed + 1, sizes, BENCHES_SHARE * seconds)
        phases.end("benches")
        allowed = allowed_distance(knowing.rounding(typical_case(cases)))
        del knowing
        if target.is_cuda:
            torch.cuda.empty_cache()  # frees the memory for the candidates' processes
        phases.end("rounding")
        return cls(cases, benches, allowed, tuple(left_out(traces, cases)))


def answer_in_time(knowing: Oracle, traces: Sequence[Trace], seconds: float) -> list[Case]:
    """Answers the traces in `ALWAYS`, then the others, cheapest first, while there is time."""
    cases: list[Case] = []
    started, num_answered = time.monotonic(), 0
    for trace in sorted(traces, key=lambda one: (one.name not in ALWAYS, count_tokens(one))):
        num_tokens = count_tokens(trace)
        taken_s = time.monotonic() - started
        expected_s = taken_s * num_tokens / num_answered if num_answered else 0.0
        if trace.name in ALWAYS or taken_s + expected_s <= seconds:
            cases.append(knowing.answer(trace))
            num_answered += num_tokens
    return cases


def left_out(traces: Sequence[Trace], cases: Sequence[Case]) -> list[str]:
    asked = {case.name for case in cases}
    return [trace.name for trace in traces if trace.name not in asked]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial. Without a fault, it has timings of every bench."""

    fault: str
    gate: str  # how far it came: screen, build, check, measure, profile, or passed
    seconds: float
    build_s: float = 0.0
    worst: float = 0.0
    peak_bytes: int = 0
    timings: Mapping[str, Timing] = field(default_factory=dict)
    # Seconds by "decode.attention" and the like.
    profile: Mapping[str, float] = field(default_factory=dict)
    # Seconds: start, build, gate, measure, profile.
    phases: Mapping[str, float] = field(default_factory=dict)
    is_cut_short: bool = False  # correct, but there was no time to measure it

    @property
    def is_passed(self) -> bool:
        return self.gate == "passed"


@dataclass(frozen=True, slots=True)
class Bar:
    """The timings to compare with: a clearly slower candidate is not timed to the end, and only one
    that may be kept is profiled.
    """

    timings: Mapping[str, Timing]
    least_gain: float


def run_trial(
    sandbox: Sandbox,
    source: str,
    exam: Exam,
    *,
    seconds: float = math.inf,
    bar: Bar | None = None,
    is_profiled: bool = True,
    when_right: Callable[[], None] = lambda: None,
) -> Outcome:
    """Takes at most these seconds, and never more than the sandbox allows. Calls `when_right` once
    the candidate has passed the gate, before it is timed.
    """
    phases = Phases()
    known: dict[str, Any] = {}

    def ended(at: str, fault: str = "", phase: str = "") -> Outcome:
        phases.end(phase or at)
        return Outcome(fault, at, phases.total_s, phases=phases.seconds, **known)

    if reason := refusal(source):
        return ended("screen", reason)
    at = "build"
    try:
        with sandbox.host(source, seconds, phases) as hosted:
            known["build_s"] = build_s = phases.seconds["build"]
            if build_s > MAX_BUILD_S:
                fault = f"create_engine took {build_s:.0f} s; {MAX_BUILD_S:.0f} are allowed"
                return ended(at, fault)
            at = "check"
            verdict = gate.check(hosted, exam.cases, exam.allowed)
            phases.end("gate")
            known["worst"] = verdict.worst
            if not verdict.is_passed:
                return ended(at, verdict.fault, "gate")
            when_right()
            at = "measure"
            to_beat = bar.timings if bar else None
            timings, fault, peak_bytes = measure(hosted, exam.benches, exam.allowed, to_beat)
            phases.end("measure")
            known |= {"timings": timings, "peak_bytes": peak_bytes}
            if fault:
                return ended(at, fault)
            may_be_kept = bar is None or score(timings, bar.timings) >= bar.least_gain
            if is_profiled and may_be_kept:
                at = "profile"
                known["profile"] = _profile(hosted, exam.benches)
                phases.end("profile")
    except CandidateError as error:
        if at == "profile" and isinstance(error, OutOfTime):
            return ended("passed", phase=at)
        known["is_cut_short"] = at == "measure" and isinstance(error, OutOfTime)
        return ended(at, str(error), "gate" if at == "check" else at)
    return ended("passed", phase="end")


def profile_engine(
    sandbox: Sandbox, source: str, exam: Exam, *, seconds: float
) -> dict[str, float]:
    """Profiles an engine that has passed before; empty if it does not finish."""
    try:
        with sandbox.host(source, seconds) as hosted:
            return _profile(hosted, exam.benches)
    except CandidateError:
        return {}


def _profile(hosted: Hosted, benches: Sequence[Bench]) -> dict[str, float]:
    """Where the time of a typical prefill and of a typical decode goes."""
    typical = {bench.family: bench for bench in benches if bench.name != "prefill 1"}
    parts: dict[str, float] = {}
    for family in ("prefill", "decode"):
        bench = typical[family]
        start, stop = bench.timed
        stop = min(stop, start + PROFILED_CALLS)
        profile = hosted.profile(bench.case.calls[:stop], (start, stop))
        parts |= {f"{family}.{kind}": seconds / (stop - start) for kind, seconds in profile.items()}
    return parts


def count_slots(target: Target) -> int:
    """How many requests of the longest length captured engines can hold at once."""
    if not target.is_cuda:
        return MAX_SLOTS
    free_bytes = torch.cuda.mem_get_info(target.device)[0] - target.weight_bytes
    slot_bytes = target.shape.max_len * target.kv_bytes_per_token
    num_slots = min(MAX_SLOTS, int(max(0, free_bytes) * MEMORY_SHARE) // slot_bytes)
    if num_slots < LEAST_SLOTS:
        raise CapacityError(
            f"{LEAST_SLOTS} requests of {target.shape.max_len:,} tokens do not fit beside the "
            "weights",
            f"Each takes {slot_bytes / 1e9:.2f} GB, and {max(0, free_bytes) / 1e9:.1f} GB would be "
            "free.",
            "Use a smaller max_position_embeddings, or a GPU with more memory.",
        )
    return num_slots


def widest_batch(num_slots: int) -> int:
    """The largest batch whose requests may all be replaced at once: new prompts go to new slots."""
    return next(batch for batch in (64, 32, 16, 8, 4) if 2 * batch < num_slots)


def _has_room(target: Target) -> bool:
    """Whether a crowd fits into the cache of every design.

    Slots are as long as the longest text. When there are too few, their number is doubled, and old
    and new slots exist at the same time for a moment.
    """
    slots = 1 << (CROWD - 1).bit_length()
    needed = 2 * slots * target.shape.max_len * target.kv_bytes_per_token
    if target.is_cuda:
        return needed + 2 * target.weight_bytes < torch.cuda.mem_get_info(target.device)[0]
    return needed < CPU_CACHE_BYTES
