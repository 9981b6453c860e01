"""A step's own numbers in one host array, so that they reach the device in one copy. Knows no
tensor.

A step is packed as it is, or padded to a `StepSize`, a fixed layout with decodes first. Then every
step of that size has the same numbers in the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.layers.inputs import RowSpan
from penstock.ops import BLOCK_TOKENS, cut_blocks
from penstock.types import RowPlan

FROM_LAST_SAMPLE = -1


@dataclass(frozen=True, slots=True)
class RowCounts:
    """How many rows, tokens and blocks the rows of a step have."""

    num_decodes: int
    num_prompts: int
    num_prompt_tokens: int
    num_blocks: int

    @classmethod
    def of(cls, rows: Sequence[RowPlan]) -> RowCounts:
        prompts = [row for row in rows if not row.is_decode]
        return cls(
            num_decodes=len(rows) - len(prompts),
            num_prompts=len(prompts),
            num_prompt_tokens=sum(row.num_tokens for row in prompts),
            num_blocks=len(cut_blocks([span_of(row) for row in prompts])[0]),
        )


@dataclass(frozen=True, slots=True)
class StepSize:
    """Room for decodes, and for prompts: rows whose tokens the host has."""

    num_decodes: int
    num_prompts: int
    num_prompt_tokens: int

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompt_tokens

    @property
    def num_blocks(self) -> int:
        """A prompt may begin and end inside an aligned block."""
        return self.num_prompt_tokens // BLOCK_TOKENS + self.num_prompts

    def spans(self, rows: Sequence[RowPlan]) -> tuple[RowSpan, ...]:
        """The rows as the host knows them, in their places. Kernels may rely only on which of them
        are decodes: that holds for every step of this size."""
        decodes = [span_of(row) for row in rows if row.is_decode]
        prompts = [span_of(row) for row in rows if not row.is_decode]
        decodes += [RowSpan(1, 1)] * (self.num_decodes - len(decodes))
        return (*decodes, *prompts, *[RowSpan(0, 0)] * (self.num_prompts - len(prompts)))

    def holds(self, counts: RowCounts) -> bool:
        return (
            counts.num_decodes <= self.num_decodes
            and counts.num_prompts <= self.num_prompts
            and counts.num_prompt_tokens <= self.num_prompt_tokens
            and counts.num_blocks <= self.num_blocks
        )

    def place_of(self, rows: Sequence[RowPlan]) -> list[int]:
        """The place of each row of a plan."""
        decodes, prompts = (
            iter(range(self.num_decodes)),
            iter(range(self.num_decodes, self.num_rows)),
        )
        return [next(decodes if row.is_decode else prompts) for row in rows]


@dataclass(frozen=True, slots=True)
class PackedStep:
    parts: dict[str, np.ndarray]  # int64, in the order in which they are packed

    @property
    def numbers(self) -> np.ndarray:
        return np.concatenate(list(self.parts.values()))

    @property
    def lengths(self) -> dict[str, int]:
        return {name: len(part) for name, part in self.parts.items()}


def span_of(row: RowPlan) -> RowSpan:
    return RowSpan(
        row.num_tokens, row.start + row.num_tokens, row.checkpoints, is_prompt=not row.is_decode
    )


def pack_step(rows: Sequence[RowPlan]) -> PackedStep:
    return PackedStep(_pack(rows))


def pack_padded(rows: Sequence[RowPlan], size: StepSize, padding_row: int) -> PackedStep:
    decodes = [row for row in rows if row.is_decode]
    prompts = [row for row in rows if not row.is_decode]
    padding = RowPlan(row=padding_row, start=0, token_ids=(), samples=False)
    parts = _pack([*decodes, *[padding] * (size.num_decodes - len(decodes)), *prompts])
    num_used = parts["query_start"][-1]
    lengths_and_fills = {
        "token_ids": (size.num_tokens, 0),
        "row_of_token": (size.num_tokens, padding_row),
        "positions": (size.num_tokens, 0),
        "query_start": (size.num_rows + 1, num_used),
        "context_lens": (size.num_rows, 1),
        "rows": (size.num_rows, padding_row),
        "state_slots": (size.num_rows, 0),
        "initial_slots": (size.num_rows, 0),
        "blocks": (4 * size.num_blocks, 0),
        "block_rows": (2 * size.num_prompts, 0),
    }
    return PackedStep(
        {name: _pad(parts[name], *given) for name, given in lengths_and_fills.items()}
    )


def _pack(rows: Sequence[RowPlan]) -> dict[str, np.ndarray]:
    blocks, block_rows = cut_blocks([span_of(row) for row in rows])
    num_tokens = np.array([row.num_tokens for row in rows], dtype=np.int64)
    query_start = np.concatenate(([0], num_tokens.cumsum()))
    row_ids = np.array([row.row for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    token_ids = [row.token_ids or (FROM_LAST_SAMPLE,) for row in rows]
    return {
        "token_ids": np.concatenate(token_ids) if token_ids else num_tokens,
        "row_of_token": row_ids.repeat(num_tokens),
        "positions": np.arange(query_start[-1]) - (query_start[:-1] - starts).repeat(num_tokens),
        "query_start": query_start,
        "context_lens": starts + num_tokens,
        "rows": row_ids,
        "state_slots": np.array([row.slot for row in rows], dtype=np.int64),
        "initial_slots": np.array([row.initial_slot for row in rows], dtype=np.int64),
        "blocks": np.array(blocks, dtype=np.int64).flatten(),
        "block_rows": np.array(block_rows, dtype=np.int64).flatten(),
    }


def _pad(part: np.ndarray, length: int, fill: int) -> np.ndarray:
    padded = np.full(length, fill, dtype=np.int64)
    padded[: len(part)] = part
    return padded
