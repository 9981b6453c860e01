"""Scheduling of short requests ahead of bulk: decides in which steps long prompts take part. Never
touches a tensor.

A prompt with many tokens to compute is bulk, while it prefills and while it decodes; a reply to a
short prompt is interactive for its first tokens. While both are present, steps without bulk earn
time credit for it, a fixed share of the total, and bulk takes part in a step once its credit covers
the time of its last step. So bulk never starves, and a short request meets few long steps. When
many short replies decode, a few bulk ones decode with them ("riders"): they cost little there, and
would otherwise hold their rows for long. If both kinds have not been present lately, nothing
changes.

A share that is too small for the arriving long prompts would make them queue up without bound. So
for each of them two times are counted: that of steps which skipped it, and that of steps with bulk
meanwhile. One that was skipped too long is overdue, and bulk gets a larger share until none is.
Once one was skipped for MAX_PASSED_S, bulk takes part in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.types import Sequence

INTERACTIVE_TOKENS = 256  # of a reply; after that, the reader no longer waits for its start
RECENT_S = 10.0  # after an interactive request among bulk, another is expected for this long
MAX_COUNTED_S = 1.0  # per step: if the machine stalls, bulk does not pay for minutes
MAX_SAVED_STEPS = 2.0  # bulk that waits for memory does not earn credit for minutes
ROWS_PER_RIDER = 4  # decoding short replies per bulk one that decodes with them

# Bulk is overdue when it was skipped for longer than PATIENCE_S, and for longer than this multiple
# of the time of steps with bulk since it arrived: other bulk ahead of it is no reason to hurry.
PATIENCE_S = 0.25
PASSED_PER_TAKEN = 1.5
OVERDUE_SHARE = 0.5
MAX_PASSED_S = 30.0


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step in flight."""

    at_s: float
    is_turn: bool  # bulk takes part
    was_contended: bool
    riders: tuple[Sequence, ...]  # bulk that decodes in a step of short requests


class BulkTurns:
    def __init__(self, share: float, bulk_tokens: int, clock: Callable[[], float]) -> None:
        self._share = share  # of the time for bulk; 1: bulk takes part in every step
        self._bulk_tokens = bulk_tokens  # a prompt with more tokens than this to compute is bulk
        self._clock = clock
        self._saved_s = 0.0
        self._bulk_step_s = 0.0  # duration of the last step with bulk
        self._interactive_until_s = float("-inf")  # until then an interactive request is expected
        self.is_contended = False  # both kinds are present
        self.is_overdue = False
        self._waits_no_longer = False
        # Total time of steps that skipped bulk, and of steps with bulk.
        self._passed_s = self._taken_s = 0.0
        # The same two totals at the arrival of each bulk sequence; riders are not skipped.
        self._met: dict[Sequence, tuple[float, float]] = {}
        self._in_flight: dict[int, _Planned] = {}
        self._last_end_s = float("-inf")

    def is_bulk(self, sequence: Sequence) -> bool:
        return sequence.num_prompt_tokens - sequence.num_cached_tokens > self._bulk_tokens

    def is_interactive(self, sequence: Sequence) -> bool:
        return sequence.num_generated < INTERACTIVE_TOKENS and not self.is_bulk(sequence)

    def look(self, sequences: Iterable[Sequence]) -> None:
        """Looks at all running sequences and the next waiting ones, before a plan."""
        self.is_contended = self.is_overdue = self._waits_no_longer = False
        if self._share == 1:
            return
        met, has_interactive, now = {}, False, (self._passed_s, self._taken_s)
        for sequence in sequences:
            if self.is_bulk(sequence):
                met[sequence] = self._met.get(sequence, now)
            elif not has_interactive and self.is_interactive(sequence):
                has_interactive = True
        self._met = met
        self.is_contended = bool(met) and has_interactive
        if self.is_contended:
            self._interactive_until_s = self._clock() + RECENT_S
            for passed_s, taken_s in met.values():
                self._note_wait(self._passed_s - passed_s, self._taken_s - taken_s)

    def _note_wait(self, passed_s: float, taken_s: float) -> None:
        """For one bulk sequence."""
        if passed_s > max(PATIENCE_S, PASSED_PER_TAKEN * taken_s):
            self.is_overdue = True
        if passed_s > MAX_PASSED_S:
            self.is_overdue = self._waits_no_longer = True

    @property
    def must_wait(self) -> bool:
        """Whether bulk is excluded from the next step, if other sequences can run."""
        has_saved = self._saved_s >= max(self._bulk_step_s, 1e-9)
        return self.is_contended and not (has_saved or self._waits_no_longer)

    @property
    def is_interactive_near(self) -> bool:
        """Whether steps stay short, because a short request is present or expected soon."""
        return self._clock() < self._interactive_until_s

    @property
    def holds_planning(self) -> bool:
        """Whether the step in flight is a long one: requests that arrive meanwhile should join the
        next step.
        """
        return self.is_interactive_near and any(one.is_turn for one in self._in_flight.values())

    def max_riders(self, decoding: Iterable[Sequence]) -> int:
        """How many bulk sequences may decode in a step without a turn for bulk."""
        return sum(not self.is_bulk(sequence) for sequence in decoding) // ROWS_PER_RIDER

    def note_planned(self, step: int, sequences: Iterable[Sequence], has_turn: bool) -> None:
        """`has_turn`: bulk may take part, not only riders."""
        if self._share < 1:
            bulk = tuple(filter(self.is_bulk, sequences)) if self.is_interactive_near else ()
            self._in_flight[step] = _Planned(
                self._clock(), has_turn and bool(bulk), self.is_contended, () if has_turn else bulk
            )

    def note_done(self, step: int) -> None:
        if self._share == 1:
            return
        planned = self._in_flight.pop(step)
        now_s = self._clock()
        seconds = min(now_s - max(planned.at_s, self._last_end_s), MAX_COUNTED_S)
        self._last_end_s = now_s
        if planned.is_turn:
            self._bulk_step_s = seconds
            self._taken_s += seconds
            if planned.was_contended:
                # Overdue bulk used time it had not earned; the next one does not pay for it.
                self._saved_s = max(self._saved_s - seconds, -seconds)
        elif planned.was_contended:
            self._passed_s += seconds
            for rider in planned.riders:
                if rider in self._met:
                    passed_s, taken_s = self._met[rider]
                    self._met[rider] = passed_s + seconds, taken_s
            share = max(self._share, OVERDUE_SHARE) if self.is_overdue else self._share
            earned_s = seconds * share / (1 - share)
            most_s = MAX_SAVED_STEPS * max(self._bulk_step_s, earned_s)
            self._saved_s = min(self._saved_s + earned_s, most_s)
