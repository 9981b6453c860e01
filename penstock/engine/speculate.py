"""Who drafts, and how many tokens of a sequence the next step verifies. Never touches a tensor.

A drafter of the host proposes tokens when a step is planned, so it must know all tokens so far. The
drafting head runs on the device: here only the number of its drafts is decided. Where a grammar
leaves no choice, what it forces is the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.config import Speculation
from penstock.engine.ngram_drafter import NgramDrafter
from penstock.types import Sequence

Propose = Callable[[Sequence, int], tuple[int, ...]]


class HostDrafter(Protocol):
    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Tokens that may follow those of the sequence, at most so many."""


class Speculator:
    def __init__(self, speculation: Speculation, forced_ids: Propose = lambda *_: ()) -> None:
        self.speculation = speculation
        self.drafter: HostDrafter | None = NgramDrafter() if speculation.kind == "ngram" else None
        self._forced_ids = forced_ids

    @property
    def decode_tokens(self) -> int:
        """That a step brings at most: its drafts, and one more."""
        return 1 + self.speculation.num_drafts

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the next step can be planned only when the tokens of the last one are known."""
        return self.drafter is not None

    def drafts(self, sequence: Sequence, most: int) -> tuple[int, tuple[int, ...]]:
        """How many, and which if the host has them."""
        draft_ids: tuple[int, ...] = ()
        knows_all = not sequence.steps_in_flight
        if knows_all and sequence.request.sampling.grammar is not None:
            draft_ids = self._forced_ids(sequence, most)
        if not draft_ids and knows_all and self.drafter is not None:
            draft_ids = self.drafter.propose(sequence, most)
        if draft_ids or self.drafter is not None:
            return len(draft_ids), draft_ids
        # The mask of a place depends on the draft before it, which only the device has.
        is_constrained = sequence.request.sampling.grammar is not None or sequence.request.banned
        return (0 if is_constrained else most), ()
