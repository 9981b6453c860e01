"""Chooses the drafter, and how many tokens of a sequence the next step verifies. Never touches a
tensor.

A drafter on the host proposes tokens when a step is planned, so it must know all tokens so far. The
drafting head runs on the device: only the number of its drafts is decided here. Where a grammar
leaves no choice, the forced tokens are the drafts. `DraftPace` decides how many drafts pay off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Protocol
from weakref import WeakKeyDictionary

from penstock.config import Speculation
from penstock.engine.draft_pace import FIRST_GUESS, Acceptance, DraftPace, mean_rates
from penstock.engine.ngram_drafter import NgramDrafter
from penstock.engine.suffix_drafter import SuffixDrafter
from penstock.types import DraftCount, DraftStats, Sequence, StepPlan

Propose = Callable[[Sequence, int], tuple[int, ...]]
GRAMMAR = "grammar"  # drafts that a grammar forces


class HostDrafter(Protocol):
    is_costly: bool  # a proposal takes as long as a step: made only if drafts pay off

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow those of the sequence."""

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended; it gets no more tokens."""


HOST_DRAFTERS: dict[str, Callable[[], HostDrafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
}


class Guess:
    """What the host would draft, compared with the tokens that are sampled, in one step or in
    several: measures acceptance while nothing is drafted.
    """

    def __init__(self, token_ids: tuple[int, ...], start: int) -> None:
        self.token_ids = token_ids
        self.start = start  # position of the first
        self.num_right = 0

    def settles(self, new_ids: tuple[int, ...]) -> bool:
        """Whether these tokens determine how many of the guess are right."""
        for token_id in new_ids:
            if self.token_ids[self.num_right] != token_id:
                return True
            self.num_right += 1
            if self.num_right == len(self.token_ids):
                return True
        return False


class Speculator:
    def __init__(
        self,
        speculation: Speculation,
        forced_ids: Propose = lambda *_: (),
        most_drafts: Callable[[int], int] | None = None,  # by number of rows; None: no limit
    ) -> None:
        self.speculation = speculation
        self.most_drafts = most_drafts
        new_drafter = HOST_DRAFTERS.get(speculation.kind)
        self.drafter: HostDrafter | None = None if new_drafter is None else new_drafter()
        # None: every draft pays off.
        self.pace: DraftPace | None = DraftPace() if speculation.num_drafts else None
        self._forced_ids = forced_ids
        guesses = [FIRST_GUESS] * speculation.num_drafts
        self._acceptance = Acceptance(guesses)  # of all requests
        self._of_request: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()
        self._drafted_by: WeakKeyDictionary[Sequence, str] = WeakKeyDictionary()
        self._guesses: WeakKeyDictionary[Sequence, Guess] = WeakKeyDictionary()
        self._num_rows = self._step = 0  # of the current plan
        self._common = 0  # drafts per row, the same for all of its rows
        self._beside_prompts = False  # whether the same step also prefills
        self._is_settled = True  # the last step that ended left no drafts to replay
        self._num_drafted: Counter[tuple[str, int]] = Counter()  # by drafter and position
        self._num_accepted: Counter[tuple[str, int]] = Counter()
        self._num_decodes = self._num_tokens = 0
        self._num_tokens_timed = 0
        self._saved_s = 0.0

    @property
    def decode_tokens(self) -> int:
        """The most tokens that a step adds: its drafts, and one more."""
        return 1 + self.speculation.num_drafts

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the next step can be planned only when the tokens of the last one are known."""
        return self.drafter is not None

    def start_plan(self, decoding: Collection[Sequence], beside_prompts: bool = False) -> None:
        """These sequences decode. In a graph all rows have the same number of positions, so one
        number of drafts is chosen for all of them, and none in a mixed step; without graphs, each
        has its own.
        """
        self._num_rows = num_rows = len(decoding)
        self._beside_prompts = beside_prompts
        if self.pace is None or not num_rows:
            return
        self._step = self.pace.start_step(num_rows)
        if self.most_drafts is not None:
            most = min(self.speculation.num_drafts, self.most_drafts(num_rows))
            if most and not beside_prompts:
                rates = mean_rates([self._acceptance_of(sequence).rates for sequence in decoding])
                self._common = self.pace.num_drafts(num_rows, rates, most, self._step)

    def drafts(self, sequence: Sequence, most: int) -> tuple[int, tuple[int, ...]]:
        """How many, and their ids if the host has them."""
        if self.most_drafts is not None:
            most = 0 if self._beside_prompts else min(most, self.most_drafts(self._num_rows))
        if not most:
            return 0, ()
        knows_all = not sequence.steps_in_flight
        if knows_all and sequence.request.sampling.grammar is not None:
            draft_ids = self._forced_ids(sequence, most)  # always accepted
            if draft_ids:
                self._drafted_by[sequence] = GRAMMAR
                return len(draft_ids), draft_ids
        num_drafts, draft_ids = self._proposed(sequence, most, knows_all)
        if num_drafts:  # without any, those of the step in flight are still to be noted
            self._drafted_by[sequence] = self.speculation.kind
        return num_drafts, draft_ids

    def _proposed(
        self, sequence: Sequence, most: int, knows_all: bool
    ) -> tuple[int, tuple[int, ...]]:
        """The same, by the drafter."""
        if self.drafter is not None:
            if self.drafter.is_costly:
                most = self._num_paying(sequence, most)
                draft_ids = self.drafter.propose(sequence, most) if knows_all and most else ()
                return len(draft_ids), draft_ids
            draft_ids = self.drafter.propose(sequence, most) if knows_all else ()
            if draft_ids and sequence not in self._guesses:
                self._guesses[sequence] = Guess(draft_ids, len(sequence.tokens))
            draft_ids = draft_ids[: self._num_paying(sequence, len(draft_ids))]
            return len(draft_ids), draft_ids
        # The mask of a position depends on the draft before it, which only the device has.
        is_masked = sequence.request.sampling.grammar is not None or bool(sequence.request.banned)
        return (0 if is_masked else self._num_paying(sequence, most)), ()

    def _num_paying(self, sequence: Sequence, most: int) -> int:
        """How many of up to `most` drafts pay off."""
        if self.pace is None or not most:
            return most
        if self.most_drafts is not None:
            return min(most, self._common)
        rates = self._acceptance_of(sequence).rates
        return self.pace.num_drafts(self._num_rows, rates, most, self._step)

    def note_tokens(self, sequence: Sequence, num_drafts: int, token_ids: tuple[int, ...]) -> None:
        """A decode has produced these tokens, which are not in the sequence yet."""
        self._num_decodes += 1
        self._num_tokens += len(token_ids)
        guess = self._guesses.get(sequence)
        if guess is not None and guess.start + guess.num_right != len(sequence.tokens):
            del self._guesses[sequence]  # tokens came in between that no decode sampled
        elif guess is not None and guess.settles(token_ids):
            self._note_acceptance(sequence, len(guess.token_ids), guess.num_right)
            del self._guesses[sequence]
        if not num_drafts:
            return
        name, num_right = self._drafted_by.get(sequence, self.speculation.kind), len(token_ids) - 1
        for place in range(num_drafts):
            self._num_drafted[name, place] += 1
            self._num_accepted[name, place] += place < num_right
        if name != GRAMMAR and (self.drafter is None or self.drafter.is_costly):
            self._note_acceptance(sequence, num_drafts, num_right)

    def _note_acceptance(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        for acceptance in (self._acceptance, self._acceptance_of(sequence)):
            acceptance.note(num_drafts, num_right)

    def note_end(self, sequence: Sequence) -> None:
        if self.drafter is not None:
            self.drafter.end(sequence)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step has ended and its tokens were noted."""
        num_new = self._num_tokens - self._num_tokens_timed
        self._num_tokens_timed = self._num_tokens
        was_settled, self._is_settled = self._is_settled, not plan.has_drafts
        if self.pace is None or not plan.is_decode:
            return
        num_rows = len(plan.rows)
        width = 1 + max(row.num_drafts for row in plan.rows)
        if plan.has_drafts or was_settled:  # otherwise it is not a plain step: it replayed drafts
            self.pace.note_step(num_rows, width, seconds)
        if plan.has_drafts:
            self._saved_s += self.pace.note_gain(num_rows, width, num_new, seconds)

    def stats(self) -> DraftStats:
        return DraftStats(
            num_decodes=self._num_decodes,
            num_tokens=self._num_tokens,
            saved_s=self._saved_s,
            counts=tuple(
                DraftCount(name, place + 1, n, self._num_accepted[name, place])
                for (name, place), n in sorted(self._num_drafted.items())
            ),
        )

    def _acceptance_of(self, sequence: Sequence) -> Acceptance:
        found = self._of_request.get(sequence)
        if found is None:
            found = self._of_request[sequence] = Acceptance(self._acceptance.rates)
        return found
