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
from collections.abc import Iterator, Sequence
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
    """A trace with the known answers to its calls, by their numbers."""

    name: str
    calls: list[Call]
    answers: dict[int, Tensor]  # [R, V] float32, on the CPU
    asked: frozenset[str] | None = None  # the requests whose rows are known; None: all

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
        """Returns the case with answers to these calls and requests; None means all."""
        answers = {
            number: torch.empty(len(call.ids), self.reference.shape.vocab_size)
            for number, call in enumerate(trace.calls)
            if call.kind != "remove" and not call.is_refused and (calls is None or number in calls)
        }
        case = Case(trace.name, trace.calls, answers, ids)
        for call, row, logits in _compute_rows(self.reference, case):
            answers[call][row] = logits
        return case

    def rounding(self, case: Case) -> Distance:
        """The distance of the reference from itself in float32."""
        if self.reference.dtype == torch.float32:
            return Distance(0.0, 0.0)
        strayed = [
            distance(case.answers[call][row], right)
            for call, row, right in _compute_rows(self.reference.in_float32(), case)
        ]
        squares = [one.typical**2 for one in strayed]
        return Distance(max(one.most for one in strayed), statistics.mean(squares) ** 0.5)


def count_tokens(trace: Trace) -> int:
    """Tokens to compute for all right answers: the whole text of every request."""
    return sum(len(life.tokens) for life in _lives(trace.calls))


def typical_case(cases: Sequence[Case]) -> Case:
    """The case whose rounding is typical for all."""
    return next(case for case in cases if case.name == "batched")


def distance(logits: Tensor, right: Tensor) -> Distance:
    """Infinite if there is a NaN."""
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


def _compute_rows(reference: Reference, case: Case) -> Iterator[tuple[int, int, Tensor]]:
    """Computes the rows of the case's answers: call, row, logits [V]. A text without known rows is
    not run.
    """
    known = {number: case.rows(number) for number in case.answers}
    for life in _lives(case.calls):
        asked = [one for one in life.asked if one[1] in known.get(one[0], ())]
        if asked:
            logits = reference.logits(life.tokens, [position for _, _, position in asked]).cpu()
            yield from ((call, row, one) for (call, row, _), one in zip(asked, logits))


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
