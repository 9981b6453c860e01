"""How short requests run before bulk: in which steps long prompts take part. Never touches a
tensor.

A prompt with many tokens to compute is bulk, while it prefills and while it decodes; a reply to a
short prompt is interactive for its first tokens. While both are present, steps without bulk save up
time for it, a fixed share of the total, and bulk takes part in a step when it has saved as much as
its last step took. So bulk never stops, and a short request meets few long steps. If both have not
been present lately, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.types import Sequence

INTERACTIVE_TOKENS = 256  # of a reply: after so many, a reader no longer waits for the answer
RECENT_S = 10.0  # after an interactive request among bulk, another one is expected for so long
MAX_COUNTED_S = 1.0  # of a step: if the machine stalls, bulk does not pay for minutes
MAX_SAVED_STEPS = 2.0  # bulk that waits for memory does not save up for minutes


class BulkTurns:
    def __init__(self, share: float, bulk_tokens: int, clock: Callable[[], float]) -> None:
        self._share = share  # of the time; 1: bulk takes part in every step
        self._bulk_tokens = bulk_tokens  # a prompt with more tokens than this to compute is bulk
        self._clock = clock
        self._saved_s = 0.0
        self._bulk_step_s = 0.0  # of the last step with bulk
        self._interactive_until_s = float("-inf")  # until then an interactive request is expected
        self.is_contended = False  # both kinds are present
        self._in_flight: dict[
            int, tuple[float, bool, bool]
        ] = {}  # planned at, has bulk, was contended
        self._last_end_s = float("-inf")

    def is_bulk(self, sequence: Sequence) -> bool:
        return sequence.num_prompt_tokens - sequence.num_cached_tokens > self._bulk_tokens

    def is_interactive(self, sequence: Sequence) -> bool:
        return sequence.num_generated < INTERACTIVE_TOKENS and not self.is_bulk(sequence)

    def look(self, sequences: Iterable[Sequence]) -> None:
        """Looks at all running sequences and the next waiting ones, before a plan."""
        self.is_contended = False
        if self._share == 1:
            return
        has_bulk = has_interactive = False
        for sequence in sequences:
            if self.is_bulk(sequence):
                has_bulk = True
            elif not has_interactive and self.is_interactive(sequence):
                has_interactive = True
            if has_bulk and has_interactive:
                break
        self.is_contended = has_bulk and has_interactive
        if self.is_contended:
            self._interactive_until_s = self._clock() + RECENT_S

    @property
    def must_wait(self) -> bool:
        """Whether bulk takes no part in the next step, if other sequences can run."""
        return self.is_contended and self._saved_s < max(self._bulk_step_s, 1e-9)

    @property
    def is_interactive_near(self) -> bool:
        """Whether steps stay short, because a short request is present or may come soon."""
        return self._clock() < self._interactive_until_s

    @property
    def holds_planning(self) -> bool:
        """Whether the step in flight is a long one: requests that arrive meanwhile should be in the
        next step."""
        return self.is_interactive_near and any(
            has_bulk for _, has_bulk, _ in self._in_flight.values()
        )

    def note_planned(self, step: int, sequences: Iterable[Sequence]) -> None:
        if self._share < 1:
            has_bulk = self.is_interactive_near and any(map(self.is_bulk, sequences))
            self._in_flight[step] = self._clock(), has_bulk, self.is_contended

    def note_done(self, step: int) -> None:
        if self._share == 1:
            return
        planned_s, has_bulk, was_contended = self._in_flight.pop(step)
        now_s = self._clock()
        seconds = min(now_s - max(planned_s, self._last_end_s), MAX_COUNTED_S)
        self._last_end_s = now_s
        if has_bulk:
            self._bulk_step_s = seconds
        if was_contended and has_bulk:
            self._saved_s -= seconds
        elif was_contended:
            earned_s = seconds * self._share / (1 - self._share)
            most_s = MAX_SAVED_STEPS * max(self._bulk_step_s, earned_s)
            self._saved_s = min(self._saved_s + earned_s, most_s)
