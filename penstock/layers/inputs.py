"""What every layer sees: the tokens of one step and the cache of that layer.

`StepInputs` is passed as an argument, `layer(hidden, inputs, cache)`, never through a global: CUDA
graphs capture it, tests build it by hand, and it is all a reader needs to follow a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops import Backlog, Journal, Replay, TokenBlocks


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A row of the step as the host knows it: for grid sizes of kernels, and for loops of reference
    ops.
    """

    num_tokens: int
    context_len: int  # tokens visible to the row after this step
    # (tokens of this row, slot): save the state after them
    checkpoints: tuple[tuple[int, int], ...] = ()
    is_prompt: bool = False  # prefill, even of a single token
    num_drafts: int = 0  # the last tokens of a decode
    num_newest: int = 1  # most keys visible to a decode that this step writes

    @property
    def is_decode(self) -> bool:
        is_one = self.num_tokens == 1 + self.num_drafts
        return is_one and not self.checkpoints and not self.is_prompt


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rows of a step as attention sees them: every token of a decode is a separate row, so that
    a draft is computed exactly like a plain decode.
    """

    context_lens: Tensor  # [R] int64
    page_table: Tensor  # [R, P] int32
    query_start: Tensor  # [R + 1] int64
    spans: tuple[RowSpan, ...]
    blocks: TokenBlocks


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """One token of each row, for a layer in which the others only store keys and values."""

    tokens: Tensor  # [R] int64  indices among the step's tokens
    rows: AttentionRows  # as if each row had only that token


@dataclass(frozen=True, slots=True)
class StepInputs:
    token_ids: Tensor  # [T] int64     all rows, one after the other
    positions: Tensor  # [T] int64
    query_start: Tensor  # [R + 1] int64  row r owns tokens query_start[r]:query_start[r + 1]
    context_lens: Tensor  # [R] int64    tokens visible to the row after this step
    page_table: Tensor  # [R, P] int32
    kv_index: Tensor  # [T] int64     of each token's key and value: page * page_size + offset
    state_slots: Tensor  # [R] int64    where the row's recurrent state is written
    initial_slots: Tensor  # [R] int64   where it is read; ignored for a row at position 0
    spans: tuple[RowSpan, ...]  # the same rows, on the host
    blocks: TokenBlocks  # rows of several tokens, split into blocks for kernels
    deterministic: bool = False  # results do not depend on the rest of the step
    replay: Replay | None = None  # journal replay; None: nothing drafts
    with_drafts: AttentionRows | None = None  # None: no row has drafts

    @property
    def attention_rows(self) -> AttentionRows:
        return self.with_drafts or AttentionRows(
            self.context_lens, self.page_table, self.query_start, self.spans, self.blocks
        )

    @property
    def last_tokens(self) -> Tensor:  # [R] int64
        """Index of the last token of each row; any valid index for an empty row."""
        return (self.query_start[1:] - 1).clamp(min=0)

    def choose_last(self) -> ChosenTokens:
        """Each row's last token."""
        return self._chosen(self.last_tokens, self.context_lens, self.page_table, self.spans)

    def choose(
        self,
        tokens: Tensor,
        context_lens: Tensor | None = None,  # of these tokens, if known
        starts: Tensor | None = None,  # 0 to the number of rows, if known
    ) -> ChosenTokens:
        """One token of each row, given on the device."""
        if context_lens is None:
            context_lens = self.positions[tokens] + 1
        # Where every position is a separate row, all positions of a row have its pages.
        spans, pages = self.spans, self.page_table[:: len(self.page_table) // len(self.spans)]
        if tokens.is_cpu:  # reference ops need the values
            spans = tuple(RowSpan(1, length) for length in context_lens.tolist())
        return self._chosen(tokens, context_lens, pages, spans, starts)

    def _chosen(
        self,
        tokens: Tensor,
        context_lens: Tensor,
        pages: Tensor,
        spans: Sequence[RowSpan],
        starts: Tensor | None = None,
    ) -> ChosenTokens:
        if starts is None:
            starts = torch.arange(len(self.query_start), device=self.query_start.device)
        of_one = tuple(RowSpan(1, max(1, span.context_len)) for span in spans)
        blocks = TokenBlocks(table=self.blocks.table[:0], rows=self.blocks.rows[:0])
        return ChosenTokens(tokens, AttentionRows(context_lens, pages, starts, of_one, blocks))


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys (after norm and rope) and values of one attention layer. Page 0 is padding. With 8 bits
    they have a scale per token and head (`ops/reference/kv_codes.py`).
    """

    keys: Tensor  # [pages, page_size, Hkv, D]
    values: Tensor  # [pages, page_size, Hkv, D]
    scales: Tensor | None = None  # [2, pages, page_size, Hkv] float32, for keys and values

    def zero_padding(self) -> None:
        self.keys[0].zero_()
        self.values[0].zero_()
        if self.scales is not None:
            self.scales[:, 0].zero_()


@dataclass(frozen=True, slots=True)
class StateCache:
    """Recurrent and convolution state of one DeltaNet layer. Padding rows use slot 0."""

    recurrent: Tensor  # [slots, Hv, K, V] float32 or float16
    conv: Tensor  # [slots, W, C]  ring buffer: the input of position p is at p % W
    journal: Journal | None = None  # None: nothing drafts
    backlog: Backlog | None = None  # None: states are written at every token

    def zero_padding(self) -> None:
        self.recurrent[0].zero_()
        self.conv[0].zero_()
        if self.backlog is not None:
            self.backlog.counts[0].zero_()


LayerCache = KVCache | StateCache
