"""Checks an engine: plays every case and compares every answer. Frozen while a search runs.

A `Player` plays calls: a candidate in its sandbox, or an engine in this process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.forge.oracle import Case, Distance, distance
from penstock.forge.sandbox import CandidateError, Played
from penstock.forge.traces import Call


class Player(Protocol):
    def play(
        self,
        calls: Sequence[Call],
        *,
        keep: Collection[int],
        timed: tuple[int, int] = (-1, -1),
        on_device: bool = True,
    ) -> Played: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    fault: str  # empty if the engine is correct
    worst: float  # the largest distance from a right answer, in units of the tolerance
    num_calls: int

    @property
    def is_passed(self) -> bool:
        return not self.fault


def check(player: Player, cases: Sequence[Case], allowed: Distance) -> Verdict:
    """Stops at the first case with a fault. Tokens are alternately on the CPU and the device."""
    worst, num_calls = 0.0, 0
    for number, case in enumerate(cases):
        try:
            played = player.play(case.calls, keep=case.answers, on_device=number % 2 == 0)
        except CandidateError as error:
            return Verdict(f"{case.name}: {error}", worst, num_calls)
        fault, distance_here = compare(case, played, allowed)
        worst, num_calls = max(worst, distance_here), num_calls + len(case.calls)
        if fault:
            return Verdict(f"{case.name}: {fault}", worst, num_calls)
    return Verdict("", worst, num_calls)


def compare(case: Case, played: Played, allowed: Distance) -> tuple[str, float]:
    """The fault in the answers to a case, or empty, and the largest distance."""
    worst = 0.0
    for number, (call, error) in enumerate(zip(case.calls, played.errors)):
        what = f"call {number}, {call.kind} of {len(call.ids)}"
        if call.is_refused:
            if error is None:
                return f"{what} should have been refused, but was answered", worst
            continue
        if error is not None:
            return f"{what}: {error}", worst
        if number not in case.answers:
            continue
        answer, logits = case.answers[number], played.logits.get(number)
        if logits is None or logits.shape != answer.shape:
            seen = "nothing" if logits is None else list(logits.shape)
            return f"{what}: answered {seen}, expected {list(answer.shape)}", worst
        rows = case.rows(number)
        off = distance(logits[rows], answer[rows])
        worst = max(worst, off.most)
        if not off.is_within(allowed):
            return f"{what}: logits are off by {_spelled(off, allowed)}", worst
    return "", worst


def _spelled(off: Distance, allowed: Distance) -> str:
    """The distance that exceeds its limit, in units of the tolerance."""
    if off.most > allowed.most:
        return f"{off.most:.2f} of the tolerance; {allowed.most:.2f} is allowed"
    return (
        f"{off.typical:.2f} of the tolerance in the root mean square; {allowed.typical:.2f} is "
        "allowed"
    )
