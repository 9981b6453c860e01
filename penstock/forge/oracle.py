"""The right logits of a trace, and how far an engine's may be from them.

A trace's tokens do not depend on answers, so one pass of the reference over a request's whole text
gives all its answers. Distances are in units of the tolerance, |a - b| / (atol + rtol |b|); an
engine passes within a third of it. If the reference itself, rounding as the engine does, is further
from float32 than that, an engine may be twice as far as the reference. If that exceeds the
tolerance, as with many layers in bfloat16, no engine can keep it; then 2.5 times as far is allowed,
and the root mean square of an answer is limited too: it differs little between correct engines, and
much from a wrong one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.forge.reference import Reference
from penstock.forge.target import Target
from penstock.forge.traces import Call, Trace

TOLERANCE = 1e-2  # atol and rtol
MARGIN = 3.0
ROUNDING = 2.0  # an engine may be this many times as far as the reference
ROUNDING_PAST_TOLERANCE = 2.5  # two that round independently are 1.4 apart, single rows up to 1.6


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of logits from the right ones, in units of the tolerance."""

    most: float  # the largest of any logit
    typical: float = math.inf  # the root mean square of all

    def is_within(self, allowed: Distance) -> bool:
        return self.most <= allowed.most and self.typical <= allowed.typical


@dataclass(frozen=True, slots=True)
class Case:
    """A trace with the answers to its calls; None for a call that answers nothing."""

    name: str
    calls: list[Call]
    answers: list[Tensor | None]  # [R, V] float32, on the CPU
    asked: frozenset[str] | None = None  # the requests whose rows are known; None: all

    @property
    def answered(self) -> list[int]:
        """The numbers of the calls whose answers are known."""
        return [number for number, answer in enumerate(self.answers) if answer is not None]

    def rows(self, number: int) -> list[int]:
        """The rows of an answer that are known."""
        ids = self.calls[number].ids
        return [row for row, id in enumerate(ids) if self.asked is None or id in self.asked]


@dataclass(slots=True)
class Life:
    """A request from prefill to end, and which calls ask for logits at which of its positions."""

    tokens: list[int]
    asked: list[tuple[int, int, int]]  # call, row of the answer, position


class Oracle:
    def __init__(self, target: Target) -> None:
        self.reference = Reference(target, target.dtype)

    def answer(
        self, trace: Trace, calls: frozenset[int] | None = None, ids: frozenset[str] | None = None
    ) -> Case:
        """The case with answers to these calls and requests; None: to all."""
        wanted = frozenset(range(len(trace.calls))) if calls is None else calls
        answers = [
            _room(call, self.reference.shape.vocab_size) if number in wanted else None
            for number, call in enumerate(trace.calls)
        ]
        case = Case(trace.name, trace.calls, answers, ids)
        for life in _lives(trace.calls):
            if asked := _known(case, life):
                logits = self.reference.logits(
                    life.tokens, [position for _, _, position in asked]
                ).cpu()
                for (call, row, _), row_logits in zip(asked, logits):
                    answer = answers[call]
                    assert answer is not None
                    answer[row] = row_logits
        return case

    def rounding(self, case: Case) -> Distance:
        """The distance of the reference from itself in float32."""
        if self.reference.dtype == torch.float32:
            return Distance(0.0, 0.0)
        exact = self.reference.in_float32()
        strayed = []
        for life in _lives(case.calls):
            asked = _known(case, life)
            logits = exact.logits(life.tokens, [position for _, _, position in asked]).cpu()
            for (call, row, _), right in zip(asked, logits):
                answer = case.answers[call]
                assert answer is not None
                strayed.append(distance(answer[row], right))
        squares = [one.typical**2 for one in strayed]
        return Distance(max(one.most for one in strayed), statistics.mean(squares) ** 0.5)


class Allowance:
    """A time budget for right answers. Estimates the cost of the next from the last ones."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._taken_s = 0.0
        self._num_tokens = 0

    def has_room_for(self, num_tokens: int) -> bool:
        expected_s = self._taken_s / self._num_tokens * num_tokens if self._num_tokens else 0.0
        return self._taken_s + expected_s <= self.seconds

    def answer(self, knowing: Oracle, trace: Trace) -> Case:
        started = time.monotonic()
        case = knowing.answer(trace)
        self._taken_s += time.monotonic() - started
        self._num_tokens += count_tokens(trace)
        return case


def count_tokens(trace: Trace) -> int:
    """Tokens to compute for all right answers: the whole text of every request."""
    return sum(len(life.tokens) for life in _lives(trace.calls))


def typical_case(cases: Sequence[Case]) -> Case:
    """The case whose rounding is typical for all."""
    return next(case for case in cases if case.name == "batched")


def distance(logits: Tensor, right: Tensor) -> Distance:
    """Infinite where there is a NaN."""
    units = (logits - right).abs() / (TOLERANCE + TOLERANCE * right.abs())
    most, typical = float(units.max()), float(units.square().mean().sqrt())
    return Distance(most, typical) if math.isfinite(typical) else Distance(math.inf, math.inf)


def allowed_distance(rounding: Distance, share: float = 1.0 / MARGIN) -> Distance:
    """This share of the tolerance, or more if the reference itself needs more."""
    if ROUNDING * rounding.most <= 1.0:
        return Distance(max(share, ROUNDING * rounding.most))
    return Distance(
        ROUNDING_PAST_TOLERANCE * rounding.most, ROUNDING_PAST_TOLERANCE * rounding.typical
    )


def _room(call: Call, vocab_size: int) -> Tensor | None:
    if call.kind == "remove" or call.is_refused:
        return None
    return torch.empty(len(call.ids), vocab_size)


def _known(case: Case, life: Life) -> list[tuple[int, int, int]]:
    """The calls of a request whose answers the case has or needs."""
    known = {number: case.rows(number) for number in case.answered}
    return [one for one in life.asked if one[1] in known.get(one[0], ())]


def _lives(calls: list[Call]) -> list[Life]:
    ended: list[Life] = []
    alive: dict[str, Life] = {}
    for number, call in enumerate(calls):
        if call.is_refused:
            continue
        for row, id in enumerate(call.ids):
            if call.kind == "prefill":
                ended += [alive.pop(id)] if id in alive else []
                alive[id] = Life(list(call.tokens[row]), [])
            elif call.kind == "decode":
                alive[id].tokens += call.tokens[row]
            else:
                ended.append(alive.pop(id))
                continue
            alive[id].asked.append((number, row, len(alive[id].tokens) - 1))
    return [*ended, *alive.values()]
