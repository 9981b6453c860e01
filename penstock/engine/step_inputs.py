"""Packs a step's integers into one host array, so that they reach the device in one copy. Knows no
tensor.

A step is packed as it is, or padded to a `StepSize`, a fixed layout with decodes first, in which
every value has a fixed position. The host does not know where a decode starts: it packs offsets
that the device adds to the row's values. A prompt's offsets are added to those of the padding row,
which never change: it has one token, with id 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.layers.inputs import RowSpan
from penstock.ops import BLOCK_TOKENS, cut_blocks
from penstock.types import RowPlan

PADDING_LEN = 1  # tokens of the padding row


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The numbers of rows, tokens and blocks in a step."""

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
    """Capacity for decodes, and for prefills: rows whose tokens the host has."""

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
        """A prefill may begin and end inside an aligned block."""
        return self.num_prompt_tokens // BLOCK_TOKENS + self.num_prompts

    def spans(self, spans: Sequence[RowSpan]) -> tuple[RowSpan, ...]:
        """The rows as the host knows them, at their positions. Kernels may rely only on which of
        them are decodes: that holds for every step of this size.
        """
        decodes = [span for span in spans if span.is_decode]
        prompts = [span for span in spans if not span.is_decode]
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
        """The index of each row of a plan."""
        decodes, prompts = (
            iter(range(self.num_decodes)),
            iter(range(self.num_decodes, self.num_rows)),
        )
        return [next(decodes if row.is_decode else prompts) for row in rows]


@dataclass(frozen=True, slots=True)
class PackedStep:
    parts: dict[str, np.ndarray]  # int64, in packing order

    @property
    def numbers(self) -> np.ndarray:
        return np.concatenate(list(self.parts.values()))

    @property
    def lengths(self) -> dict[str, int]:
        return {name: len(part) for name, part in self.parts.items()}


def span_of(row: RowPlan, context_len: int = 1) -> RowSpan:
    """For a decode with that context length; only the device knows it, and only reference ops need
    it.
    """
    if row.is_decode:
        num_drafts = row.num_drafts
        return RowSpan(1 + num_drafts, context_len + num_drafts, num_drafts=num_drafts)
    return RowSpan(row.num_tokens, row.start + row.num_tokens, row.checkpoints, is_prompt=True)


def pack_step(rows: Sequence[RowPlan], padding_row: int) -> PackedStep:
    return _join(_pack(rows, padding_row))


@dataclass(frozen=True, slots=True)
class DraftPlaces:
    """The positions of decode tokens in a step with drafts, and the rows that attention sees."""

    places: list[int]  # of drafts among the step's tokens
    rows: list[int]  # table rows of these drafts
    columns: list[int]  # 0 is a row's first draft
    row_of_query: list[int]  # the plan's row of every attention row
    queries: list[int]  # first token of each of them, and one past the last
    spans: tuple[RowSpan, ...]

    @classmethod
    def of(cls, rows: Sequence[RowPlan], spans: Sequence[RowSpan]) -> DraftPlaces:
        drafts, seen = [], []
        first = 0
        for number, (row, span) in enumerate(zip(rows, spans)):
            drafts += [(first + 1 + column, row.row, column) for column in range(row.num_drafts)]
            if row.is_decode:
                start = span.context_len - span.num_tokens
                seen += [
                    (number, first + i, RowSpan(1, start + i + 1, num_newest=span.num_tokens))
                    for i in range(span.num_tokens)
                ]
            else:
                seen.append((number, first, span))
            first += row.num_tokens
        places, numbers, columns = (list(part) for part in zip(*drafts))
        row_of_query, queries, seen_spans = zip(*seen)
        return cls(
            places, numbers, columns, list(row_of_query), [*queries, first], tuple(seen_spans)
        )


def pack_padded(rows: Sequence[RowPlan], size: StepSize, padding_row: int) -> PackedStep:
    decodes = [row for row in rows if row.is_decode]
    prompts = [row for row in rows if not row.is_decode]
    padding = [RowPlan.decode(padding_row)] * (size.num_decodes - len(decodes))
    parts = _pack([*decodes, *padding, *prompts], padding_row)
    num_used = parts["query_start"][-1]
    lengths_and_fills = {
        "token_ids": (size.num_tokens, 0),
        "row_of_token": (size.num_tokens, padding_row),
        "positions": (size.num_tokens, -PADDING_LEN),
        "position_bases": (size.num_tokens, padding_row),
        "query_start": (size.num_rows + 1, num_used),
        "context_lens": (size.num_rows, 0),
        "context_bases": (size.num_rows, padding_row),
        "rows": (size.num_rows, padding_row),
        "state_slots": (size.num_rows, 0),
        "initial_slots": (size.num_rows, 0),
        "keep_at": (size.num_rows, 0),
        "keep_slots": (size.num_rows, 0),
        "blocks": (4 * size.num_blocks, 0),
        "block_rows": (2 * size.num_prompts, 0),
    }
    return _join({name: _pad(parts[name], *given) for name, given in lengths_and_fills.items()})


def _join(parts: dict[str, np.ndarray]) -> PackedStep:
    """Positions and lengths are adjacent: the device adds their bases in one operation."""
    parts["places"] = np.concatenate((parts.pop("positions"), parts.pop("context_lens")))
    parts["bases"] = np.concatenate((parts.pop("position_bases"), parts.pop("context_bases")))
    return PackedStep(parts)


def _pack(rows: Sequence[RowPlan], padding_row: int) -> dict[str, np.ndarray]:
    blocks, block_rows = cut_blocks([span_of(row) for row in rows])
    num_tokens = np.array([row.num_tokens for row in rows], dtype=np.int64)
    query_start = np.concatenate(([0], num_tokens.cumsum()))
    row_ids = np.array([row.row for row in rows], dtype=np.int64)
    bases = np.array([row.row if row.is_decode else padding_row for row in rows], dtype=np.int64)
    # Minus the length of its base: a decode's last token is the last one of its context.
    starts = np.array([-1 if row.is_decode else row.start - PADDING_LEN for row in rows], np.int64)
    token_ids = [row.token_ids or (0,) * row.num_tokens for row in rows]
    return {
        "token_ids": np.concatenate(token_ids) if token_ids else num_tokens,
        "row_of_token": row_ids.repeat(num_tokens),
        "positions": np.arange(query_start[-1]) - (query_start[:-1] - starts).repeat(num_tokens),
        "position_bases": bases.repeat(num_tokens),
        "query_start": query_start,
        "context_lens": starts + num_tokens,
        "context_bases": bases,
        "rows": row_ids,
        "state_slots": np.array([row.slot for row in rows], dtype=np.int64),
        "initial_slots": np.array([row.initial_slot for row in rows], dtype=np.int64),
        "keep_at": np.array([row.keep.num_tokens for row in rows], dtype=np.int64),
        "keep_slots": np.array([row.keep.slot for row in rows], dtype=np.int64),
        "blocks": np.array(blocks, dtype=np.int64).flatten(),
        "block_rows": np.array(block_rows, dtype=np.int64).flatten(),
    }


def _pad(part: np.ndarray, length: int, fill: int) -> np.ndarray:
    padded = np.full(length, fill, dtype=np.int64)
    padded[: len(part)] = part
    return padded
