"""Runs a model without engine and scheduler: builds caches, rows of tokens and StepInputs.

Caches start full of NaN, so that a read of unwritten memory shows in the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.layers.inputs import KVCache, LayerCache, RowSpan, StateCache, StepInputs
from penstock.ops import TokenBlocks
from penstock.types import CacheSpec, KVSpec

PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Row:
    """Some tokens of one sequence from a position on, with its pages from its first token on."""

    token_ids: Sequence[int]
    pages: Sequence[int]
    slot: int
    start: int = 0
    initial_slot: int | None = None  # None: the slot that is written
    checkpoints: tuple[tuple[int, int], ...] = ()


def make_cache(
    spec: CacheSpec,
    num_pages: int,
    num_slots: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
) -> LayerCache:
    if isinstance(spec, KVSpec):
        shape = (num_pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        return KVCache(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
    states = (num_slots, spec.num_value_heads, spec.key_dim, spec.value_dim)
    return StateCache(
        recurrent=torch.full(states, torch.nan, dtype=state_dtype),
        conv=torch.full((num_slots, spec.conv_width, spec.conv_channels), torch.nan, dtype=dtype),
    )


def make_inputs(rows: Sequence[Row], deterministic: bool = False) -> StepInputs:
    """Puts all tokens of the rows into one step, with logits of every token."""
    lens = torch.tensor([len(row.token_ids) for row in rows])
    context_lens = torch.tensor([row.start + len(row.token_ids) for row in rows])
    page_table = torch.zeros(len(rows), max(len(row.pages) for row in rows), dtype=torch.int32)
    for table, row in zip(page_table, rows):
        table[: len(row.pages)] = torch.tensor(row.pages)
    positions = torch.cat([torch.arange(row.start, row.start + len(row.token_ids)) for row in rows])
    owner = torch.arange(len(rows)).repeat_interleave(lens)
    page = page_table[owner, positions // PAGE_SIZE].long()
    spans = tuple(
        RowSpan(len(row.token_ids), row.start + len(row.token_ids), row.checkpoints) for row in rows
    )
    initial = [row.slot if row.initial_slot is None else row.initial_slot for row in rows]
    return StepInputs(
        token_ids=torch.tensor([token for row in rows for token in row.token_ids]),
        positions=positions,
        query_start=torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0))).int(),
        context_lens=context_lens.int(),
        page_table=page_table,
        kv_index=page * PAGE_SIZE + positions % PAGE_SIZE,
        state_slots=torch.tensor([row.slot for row in rows]),
        initial_slots=torch.tensor(initial),
        spans=spans,
        blocks=TokenBlocks.of(spans, "cpu"),
        deterministic=deterministic,
    )


class ByHand:
    """A model with room for a few sequences. Sequence i owns slot i + 1 and its own pages, out of
    order.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_sequences: int = 4,
        max_len: int = 640,
        num_checkpoints: int = 4,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
    ) -> None:
        self.model = model
        self.deterministic = deterministic
        self.num_sequences = num_sequences
        self.pages_each = -(-max_len // PAGE_SIZE)
        num_pages, num_slots = (
            1 + num_sequences * self.pages_each,
            1 + num_sequences + num_checkpoints,
        )
        self.caches = [
            make_cache(spec, num_pages, num_slots, dtype, state_dtype)
            for spec in model.cache_specs()
        ]

    def row(self, sequence: int, token_ids: Sequence[int], start: int = 0, **given: Any) -> Row:
        pages = [1 + sequence + i * self.num_sequences for i in reversed(range(self.pages_each))]
        return Row(
            token_ids,
            pages[: -(-(start + len(token_ids)) // PAGE_SIZE)],
            sequence + 1,
            start,
            **given,
        )

    def checkpoint_slot(self, index: int) -> int:
        return 1 + self.num_sequences + index

    @torch.inference_mode()
    def hidden(self, *rows: Row) -> Tensor:  # [T, H]
        return self.model(make_inputs(rows, self.deterministic), self.caches)

    @torch.inference_mode()
    def run(self, *rows: Row) -> list[Tensor]:
        """Runs one step; returns the logits [tokens, vocab] of each row."""
        logits = self.model.logits(self.hidden(*rows), deterministic=self.deterministic)
        return list(logits.split([len(row.token_ids) for row in rows]))

    def prefill(self, token_ids: Sequence[int], *lens: int, sequence: int = 0) -> Tensor:
        """Runs a prompt in chunks of the given lengths, then the rest; returns the logits of all
        tokens.
        """
        logits, start = [], 0
        for size in (*lens, len(token_ids) - sum(lens)):
            logits += self.run(self.row(sequence, token_ids[start : start + size], start))
            start += size
        return torch.cat(logits)

    def decode(self, token_ids: Sequence[int], start: int, sequence: int = 0) -> Tensor:
        """Runs given tokens, one per step; returns their logits."""
        steps = [
            self.run(self.row(sequence, [token], start + i))[0] for i, token in enumerate(token_ids)
        ]
        return torch.cat(steps)

    def generate(self, token_ids: Sequence[int], num_tokens: int, sequence: int = 0) -> list[int]:
        """Decodes greedy tokens after a prompt."""
        chosen = [int(self.prefill(token_ids, sequence=sequence)[-1].argmax())]
        while len(chosen) < num_tokens:
            position = len(token_ids) + len(chosen) - 1
            chosen.append(int(self.decode(chosen[-1:], position, sequence)[-1].argmax()))
        return chosen
