"""A step of fixed size that verifies drafts: a number of rows, each with the same number of
positions.

The first position of a row is its last token, the others are drafts from the drafting head or the
host. Everything is read from the device: the drafts, each row's length, and how many of its last
drafts were accepted. A row with fewer drafts leaves positions empty. They are computed anyway,
write to page 0, and are never accepted; what a DeltaNet layer stores for them lies beyond the end
of the row, like any rejected draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.engine.graph_sizes import DraftSize
from penstock.engine.graphs import Caches, Model
from penstock.engine.mtp_drafter import MTPDrafter
from penstock.engine.row_table import RowTable, SamplingMode
from penstock.layers.inputs import AttentionRows, ChosenTokens, RowSpan, StepInputs
from penstock.types import RowPlan

NUM_NUMBERS = 6  # integers per row, before its drafts


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a step up to its logits."""

    inputs: StepInputs
    table_rows: Tensor  # [R * W] int64  of each position
    hidden: Tensor  # [R * W, H]
    logits: Tensor  # [R * W, vocab] float32


class DraftStep:
    """Runs eagerly on any device; `DraftGraphs` captures it."""

    def __init__(
        self,
        model: Model,
        caches: Caches,
        rows: RowTable,
        drafter: MTPDrafter | None,  # None: the host drafts
        size: DraftSize,
        deterministic: bool,
    ) -> None:
        self.model = model
        self.caches = caches
        self.rows = rows
        self.drafter = drafter
        self.size = size
        self.deterministic = deterministic
        # [6 + drafts, rows]: row, tokens to sample, state slot, initial slot, which state to keep
        # and where, and the host's drafts
        self.packed = rows.upload(self._pack(()))
        width, device = size.width, rows.device
        self._first_places = torch.arange(0, size.num_places + 1, width, device=device)
        self._places = torch.arange(size.num_places + 1, device=device)
        self._ahead = torch.arange(width, device=device).repeat(size.num_rows)
        self._no_blocks = ops.TokenBlocks.of((), device)
        self._loaded: tuple[RowPlan, ...] = ()
        # Input of `follow` when sampling is not part of the graph.
        self.sampled = torch.zeros(size.num_places, dtype=torch.int64, device=device)
        self.num_new = torch.zeros(size.num_rows, dtype=torch.int64, device=device)

    def load(self, plans: tuple[RowPlan, ...]) -> None:
        """Uploads nothing if it has these plans: those of decodes are the same in most steps, and
        the device only reads them.
        """
        if plans != self._loaded:
            self.packed.copy_(self.rows.stage(self._pack(plans)), non_blocking=True)
            self._loaded = plans

    def verify(self) -> Verified:
        """Drafts, and computes the model's logits at every position."""
        table, size = self.rows, self.size
        rows, num_tokens, state_slots, initial_slots, keep_at, keep_slots = self.packed[
            :NUM_NUMBERS
        ]
        placed = ops.place_drafts(
            rows,
            num_tokens,
            size.width,
            table.context_len,
            table.num_accepted,
            table.page_table,
            table.page_size,
        )
        row_spans, place_spans = self._spans()
        if self.drafter is not None:
            one_token = self._places[: size.num_rows + 1]
            by_place = [place_spans[place :: size.width] for place in range(size.width)]
            self.drafter.draft_all(
                rows, placed, size.num_drafts, one_token, by_place, self._no_blocks
            )
        inputs = StepInputs(
            token_ids=ops.draft_tokens(
                rows, self.packed[NUM_NUMBERS:], table.last_token, table.drafts
            ),
            positions=placed.positions,
            query_start=self._first_places,
            context_lens=placed.row_lens,
            page_table=placed.row_pages,  # attention has its own rows
            kv_index=placed.kv_index,
            state_slots=state_slots,
            initial_slots=initial_slots,
            spans=row_spans,
            blocks=self._no_blocks,
            deterministic=self.deterministic,
            replay=ops.Replay(rows, placed.num_accepted, keep_at, keep_slots),
            with_drafts=AttentionRows(
                context_lens=placed.context_lens,
                page_table=placed.row_pages,
                query_start=self._places,
                spans=place_spans,
                blocks=self._no_blocks,
            ),
        )
        hidden = self.model(inputs, self.caches)
        logits = self.model.logits(hidden, deterministic=self.deterministic)
        return Verified(inputs, placed.rows, hidden, logits)

    def choose(self, verified: Verified, mode: SamplingMode) -> tuple[Tensor, ops.AcceptedDrafts]:
        """Samples tokens at every position, counts how many each row gains, and advances the
        rows.
        """
        table, rows, num_tokens = self.rows, self.packed[0], self.packed[1]
        sampled = table.draw(verified.logits, verified.table_rows, mode, self._ahead)
        return sampled, table.accept_places(rows, num_tokens, sampled, self.size.width)

    def follow(self, verified: Verified, sampled: Tensor, chosen: ChosenTokens) -> None:
        if self.drafter is not None:
            self.drafter.follow_all(
                self.packed[0], verified.inputs, verified.hidden, sampled, chosen
            )

    def follow_given(self, verified: Verified) -> Tensor:
        """The same for tokens that were sampled outside."""
        last_places = self._first_places[:-1] + (self.num_new - 1).clamp(min=0)
        self.follow(verified, self.sampled, verified.inputs.choose(last_places))
        return self.num_new

    def finish(self, verified: Verified, mode: SamplingMode) -> Tensor:  # [R, 2 + n]
        """What each row gained, for the host: `AcceptedDrafts.for_host`."""
        sampled, accepted = self.choose(verified, mode)
        starts = self._places[: self.size.num_rows + 1]
        chosen = verified.inputs.choose(accepted.last_places, accepted.last_lens, starts)
        self.follow(verified, sampled, chosen)
        return accepted.for_host

    def run(self, mode: SamplingMode) -> Tensor:  # [R, 2 + n]
        """A whole step."""
        return self.finish(self.verify(), mode)

    def _pack(self, plans: tuple[RowPlan, ...]) -> np.ndarray:
        packed = np.zeros((NUM_NUMBERS + self.size.num_drafts, self.size.num_rows), dtype=np.int64)
        packed[0] = self.rows.padding_row
        packed[NUM_NUMBERS:] = -1
        for column, plan in enumerate(plans):
            packed[:NUM_NUMBERS, column] = (
                plan.row,
                plan.max_tokens,
                plan.slot,
                plan.initial_slot,
                *plan.keep,
            )
            packed[NUM_NUMBERS : NUM_NUMBERS + len(plan.draft_ids), column] = plan.draft_ids
        return packed

    def _spans(self) -> tuple[tuple[RowSpan, ...], tuple[RowSpan, ...]]:
        """Spans of rows, and of positions. Kernels use only their number, which is the same in
        every replay.
        """
        width = self.size.width
        plain = [RowPlan.decode(plan.row) for plan in self._loaded]
        lens = [span.context_len for span in self.rows.spans_of(plain)]
        lens += [1] * (self.size.num_rows - len(lens))
        used = [plan.max_tokens for plan in self._loaded] + [1] * (len(lens) - len(self._loaded))
        of_rows = [RowSpan(width, n + width - 1, num_drafts=width - 1) for n in lens]
        of_places = [
            RowSpan(1, n + place if place < most else 1, num_newest=width)
            for n, most in zip(lens, used)
            for place in range(width)
        ]
        return tuple(of_rows), tuple(of_places)
