"""One trial of one candidate: screened, built, checked, timed, profiled. The same for every author."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.forge import gate, oracle
from penstock.forge.measure import Bench, Sizes, Timing, draw_benches, measure
from penstock.forge.oracle import Case, Oracle
from penstock.forge.sandbox import CandidateError, Hosted, Sandbox
from penstock.forge.screen import refusal
from penstock.forge.target import Target
from penstock.forge.traces import correctness_traces

PROFILED_CALLS = 3  # of a trace: reading a profile takes longer than what it is of


@dataclass(frozen=True, slots=True)
class Exam:
    """What every candidate of a run has to pass and is timed with. Drawn once; no candidate sees it."""

    cases: Sequence[Case]
    benches: Sequence[Bench]
    allowed: float  # distance from right answers, in units of the tolerance

    @classmethod
    def draw(cls, target: Target, seed: int, *, num_random: int = 4, sizes: Sizes | None = None) -> Exam:
        knowing = Oracle(target)
        traces = correctness_traces(target.shape, seed, num_random=num_random, max_batch=_widest(target))
        random.Random(seed).shuffle(traces)
        cases = [knowing.answer(trace) for trace in traces]
        benches = draw_benches(target, knowing, seed + 1, sizes)
        del knowing  # its weights make room for those of float32
        typical = next(case for case in cases if case.name == "batched")
        allowed = oracle.allowed_distance(oracle.rounding(target, typical))
        if target.is_cuda:
            torch.cuda.empty_cache()  # the candidates, in their own processes, find the memory free
        return cls(cases, benches, allowed)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trial. Without a fault there are timings."""

    fault: str
    gate: str  # how far it came: screen, build, check, measure, or passed
    seconds: float
    build_s: float = 0.0
    worst: float = 0.0
    peak_bytes: int = 0
    timings: Mapping[str, Timing] = field(default_factory=dict)
    profile: Mapping[str, float] = field(default_factory=dict)  # seconds by "decode.attention" and the like

    @property
    def is_passed(self) -> bool:
        return self.gate == "passed"


def run_trial(
    sandbox: Sandbox, source: str, exam: Exam, *, seconds: float = math.inf, max_build_s: float = 60.0
) -> Outcome:
    """At most these seconds, and never more than the sandbox allows."""
    started = time.monotonic()

    def failed(at: str, fault: str, **known: float) -> Outcome:
        return Outcome(fault, at, time.monotonic() - started, **known)  # type: ignore[arg-type]

    if reason := refusal(source):
        return failed("screen", reason)
    at = "build"
    try:
        with sandbox.host(source, seconds) as hosted:
            build_s = time.monotonic() - started
            if build_s > max_build_s:
                return failed(at, f"create_engine took {build_s:.0f} s; {max_build_s:.0f} are allowed")
            at = "check"
            verdict = gate.check(hosted, exam.cases, exam.allowed)
            if not verdict.is_passed:
                return failed(at, verdict.fault, worst=verdict.worst)
            at = "measure"
            timings, fault, peak_bytes = measure(hosted, exam.benches, exam.allowed)
            if fault:
                return failed(at, fault, worst=verdict.worst)
            profile = _profile(hosted, exam.benches)
    except CandidateError as error:
        return failed(at, str(error))
    taken_s = time.monotonic() - started
    return Outcome("", "passed", taken_s, build_s, verdict.worst, peak_bytes, timings, profile)


def _profile(hosted: Hosted, benches: Sequence[Bench]) -> dict[str, float]:
    """Where the time of a typical prefill and of a typical decode goes."""
    typical = {bench.family: bench for bench in benches if bench.name != "prefill 1"}
    parts: dict[str, float] = {}
    for family in ("prefill", "decode"):
        bench = typical[family]
        start, stop = bench.timed
        stop = min(stop, start + PROFILED_CALLS)
        profile = hosted.profile(bench.case.calls, (start, stop))
        parts |= {f"{family}.{kind}": seconds / (stop - start) for kind, seconds in profile.items()}
    return parts


def _widest(target: Target) -> int:
    return 64 if target.is_cuda else 24
