"""What every layer sees: the tokens of one step and the cache of that layer.

`StepInputs` travels as an argument, `layer(hidden, inputs, cache)`, and is never fetched from
anywhere: it is what CUDA graphs capture, what tests build by hand, and all a reader needs to follow
a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops import TokenBlocks


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A row of the step as the host knows it; kernels use it for grid sizes, references to loop."""

    num_tokens: int
    context_len: int  # tokens visible to the row after this step
    checkpoints: tuple[
        tuple[int, int], ...
    ] = ()  # (tokens of this row, slot): save the state after them
    is_prompt: bool = False  # of one token too: it is computed like those of a longer row

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1 and not self.checkpoints and not self.is_prompt


@dataclass(frozen=True, slots=True)
class StepInputs:
    token_ids: Tensor  # [T] int64     all rows, one after the other
    positions: Tensor  # [T] int64
    query_start: Tensor  # [R + 1] int64  row r owns tokens query_start[r]:query_start[r + 1]
    context_lens: Tensor  # [R] int64    tokens visible to the row after this step
    page_table: Tensor  # [R, P] int32
    kv_index: Tensor  # [T] int64     where each token's key and value go: page * page_size + offset
    state_slots: Tensor  # [R] int64    where the row's recurrent state goes
    initial_slots: (
        Tensor  # [R] int64   where it comes from; ignored for a row that starts at position 0
    )
    spans: tuple[RowSpan, ...]  # the rows again, on the host
    blocks: TokenBlocks  # those of several tokens once more, cut for kernels
    deterministic: bool = False  # results must not depend on what else is in the step

    @property
    def last_tokens(self) -> Tensor:  # [R] int64
        """The last one of each row, and of a row that has none any other."""
        return (self.query_start[1:] - 1).clamp(min=0)

    def rows_of_one_token(self) -> tuple[Tensor, tuple[RowSpan, ...], TokenBlocks]:
        """`query_start`, `spans` and `blocks` of the step if each row had only its last token."""
        starts = torch.arange(len(self.query_start), device=self.query_start.device)
        spans = tuple(RowSpan(1, max(1, span.context_len)) for span in self.spans)
        return starts, spans, TokenBlocks(table=self.blocks.table[:0], rows=self.blocks.rows[:0])


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys (after norm and rope) and values of one attention layer. Page 0 belongs to nobody."""

    keys: Tensor  # [pages, page_size, Hkv, D]
    values: Tensor  # [pages, page_size, Hkv, D]

    def zero_padding(self) -> None:
        self.keys[0].zero_()
        self.values[0].zero_()


@dataclass(frozen=True, slots=True)
class StateCache:
    """Recurrent and convolution state of one DeltaNet layer. Slot 0 belongs to nobody."""

    recurrent: Tensor  # [slots, Hv, K, V] float32 or float16
    conv: Tensor  # [slots, W, C]  the input of position p lies at p % W

    def zero_padding(self) -> None:
        self.recurrent[0].zero_()
        self.conv[0].zero_()


LayerCache = KVCache | StateCache
