"""Drafts from the model's own drafting (MTP) head, on the device.

After a step the head reads the hidden states of all its tokens, each with the next token, and
writes its own KV to the pages of the sequences (`follow`). Its state after a row's last token is
stored. The next step starts with the drafts that its plan asks for (`draft`): the first from that
state, each further one from the head's own last state. KV of rejected drafts lies beyond the end of
the row and is overwritten.

`draft` and `follow` take any plan. `draft_all` and `follow_all` are the same for rows with equal
numbers of positions, and need nothing from the host: `DraftStep` uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock import ops
from penstock.engine.row_table import RowTable
from penstock.layers.inputs import ChosenTokens, KVCache, RowSpan, StepInputs
from penstock.ops import PlacedDrafts, TokenBlocks, Weight
from penstock.types import RowPlan


def drafting_rows(model: Any, num_tokens: int) -> Weight:
    """The rows of the model's head that drafts are among: the first ones; 0: all of them."""
    weight: Weight = model.head.weight
    return weight.first_rows(num_tokens) if num_tokens else weight


@dataclass(frozen=True, slots=True)
class MTPDrafter:
    model: Any  # with a drafting head
    cache: KVCache
    rows: RowTable
    hidden: Tensor  # [rows, H]  the head's, after the last token of each row
    deterministic: bool
    # The output rows that drafts are chosen from; None: all, over several ranks.
    vocabulary: Weight | None = None

    @classmethod
    def of(
        cls, model: Any, cache: KVCache, rows: RowTable, deterministic: bool, num_tokens: int = 0
    ) -> MTPDrafter:
        """Drafts are among the first `num_tokens` token ids; 0: all of them."""
        shape = (rows.max_rows + 1, model.config.hidden_size)
        hidden = torch.zeros(shape, dtype=model.dtype, device=model.device)
        vocabulary = None
        if model.ranks.is_alone:
            vocabulary = model.mtp.vocabulary or drafting_rows(model, num_tokens)
        return cls(model, cache, rows, hidden, deterministic, vocabulary)

    def draft(self, plans: Sequence[RowPlan]) -> None:
        """Writes as many drafts to the row table as each row of the plan asks for."""
        drafting = [row for row in plans if row.num_drafts and not row.draft_ids]
        if not drafting:
            return
        table, rows = self.rows, self.rows.upload([row.row for row in drafting])
        spans = table.spans_of([RowPlan.decode(row.row) for row in drafting])
        hidden = ops.take_rows(rows, self.hidden)
        token_ids = self._draft_token(hidden, rows, 0)
        for place in range(1, max(row.num_drafts for row in drafting)):
            more = [index for index, row in enumerate(drafting) if row.num_drafts > place]
            if len(more) < len(drafting):  # others own no page that far ahead
                kept = table.upload(more)
                rows, hidden, token_ids = rows[kept], hidden[kept], token_ids[kept]
                drafting = [drafting[index] for index in more]
                spans = tuple(spans[index] for index in more)
            inputs = self._inputs(rows, spans, place - 1)
            hidden = self.model.draft(inputs, token_ids, hidden, self.cache)
            token_ids = self._draft_token(hidden, rows, place)

    def draft_all(
        self,
        rows: Tensor,  # [R] of the row table
        placed: PlacedDrafts,
        num_drafts: int,
        query_start: Tensor,  # [R + 1]  one token per row
        spans: Sequence[tuple[RowSpan, ...]],  # by position
        no_blocks: TokenBlocks,
    ) -> None:
        """Writes this many drafts of each row to the row table."""
        hidden = ops.take_rows(rows, self.hidden)
        pages = placed.row_pages.unflatten(0, (len(rows), -1))[:, 0]
        for place in range(num_drafts):
            token_ids = self._draft_token(hidden, rows, place)
            if place == num_drafts - 1:
                return
            positions, kv_index, context_lens = placed.by_place[:, place].unbind()
            inputs = StepInputs(
                token_ids=positions,  # unused: the head is given its tokens
                positions=positions,
                query_start=query_start,
                context_lens=context_lens,
                page_table=pages,
                kv_index=kv_index,
                state_slots=rows,
                initial_slots=rows,
                spans=spans[place],
                blocks=no_blocks,
                deterministic=self.deterministic,
            )
            hidden = self.model.draft(inputs, token_ids, hidden, self.cache)

    def _draft_token(
        self,
        hidden: Tensor,  # [R, H]
        rows: Tensor,  # [R]
        place: int,
    ) -> Tensor:  # [R] int64
        """Writes it to the row table, too."""
        drafts = self.rows.drafts.select(1, place)
        if self.vocabulary is not None:
            scores = ops.linear(hidden, self.vocabulary, deterministic=self.deterministic)
            return ops.likeliest(scores, rows, drafts)
        token_ids: Tensor = self.model.likeliest_draft(hidden, deterministic=self.deterministic)
        drafts.index_copy_(0, rows, token_ids)
        return token_ids

    def follow(
        self,
        plans: Sequence[RowPlan],
        inputs: StepInputs,  # of the step that ran
        hidden: Tensor,  # [T, H]  its hidden states
        sampled: Tensor,  # [L]
        num_new: Tensor | None,  # [R]  tokens that each sampling row gained; None: one
    ) -> None:
        ends: list[int] = []  # per row: the first token whose next one is sampled, or the last
        sampling: list[int] = []
        others: list[tuple[int, int]] = []
        first = 0
        for row in plans:
            first += row.num_tokens
            if row.samples:
                ends.append(first - row.max_tokens)
                sampling += range(first - row.max_tokens, first)
            else:
                ends.append(first - 1)
                others.append((first - 1, row.next_token))
        next_ids = inputs.token_ids.roll(-1)
        next_ids[self.rows.upload(sampling)] = sampled
        if others:
            places, token_ids = self.rows.upload(others).unbind(1)
            next_ids[places] = token_ids
        numbers = [number for number, row in enumerate(plans) if row.samples]
        places, rows = self.rows.upload([ends, [row.row for row in plans]])
        samples = self.rows.upload(numbers)
        if num_new is not None:
            places = places.index_add(0, samples, num_new - 1)
        seen = self.model.final_norm(hidden)
        said = self.model.draft(inputs, next_ids, seen, self.cache, inputs.choose(places))
        self.hidden[rows[samples]] = said[samples]

    def follow_all(
        self,
        rows: Tensor,  # [R]
        inputs: StepInputs,  # of the step that ran: R rows of W positions
        hidden: Tensor,  # [R * W, H]
        sampled: Tensor,  # [R * W]
        chosen: ChosenTokens,  # the last one that each row gained
    ) -> None:
        seen = self.model.final_norm(hidden)
        said = self.model.draft(inputs, sampled, seen, self.cache, chosen)
        ops.put_rows(rows, said, self.hidden)

    def follow_prompts(
        self,
        rows: Tensor,  # [R]
        inputs: StepInputs,  # of a step without drafts
        hidden: Tensor,  # [T, H]
        next_ids: Tensor,  # [R]  after the last token of each row
    ) -> None:
        chosen = inputs.choose(inputs.last_tokens)  # an empty row gets that of another
        behind = inputs.token_ids.roll(-1).index_copy(0, chosen.tokens, next_ids)
        seen = self.model.final_norm(hidden)
        said = self.model.draft(inputs, behind, seen, self.cache, chosen)
        ops.put_rows(rows, said, self.hidden)

    def _inputs(self, rows: Tensor, spans: tuple[RowSpan, ...], ahead: int) -> StepInputs:
        """One token of each row, `ahead` positions after its last one."""
        table = self.rows
        positions = table.context_len[rows] - 1 + ahead
        pages = table.page_table[rows]
        page_size = table.page_size
        page = pages.gather(1, (positions // page_size)[:, None])[:, 0].long()
        ahead_spans = tuple(RowSpan(1, span.context_len + ahead) for span in spans)
        return StepInputs(
            token_ids=positions,  # unused: the head is given its tokens
            positions=positions,
            query_start=torch.arange(len(rows) + 1, device=rows.device),
            context_lens=positions + 1,
            page_table=pages,
            kv_index=page * page_size + positions % page_size,
            state_slots=rows,
            initial_slots=rows,
            spans=ahead_spans,
            blocks=TokenBlocks.of((), rows.device),
            deterministic=self.deterministic,
        )
