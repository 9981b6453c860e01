"""Groups the rows of a step, for the reference ops and for kernels. On the host only.

Consecutive decodes form one group, so that a decode step is a fixed sequence of batched operations;
any other row is its own group. Kernels see those rows as blocks. A decode is one token, or that
token followed by drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

BLOCK_TOKENS = 64
LEAST_KEYS = 16  # keys of a page that attention kernels read at once


class Span(Protocol):
    """A row as the host knows it."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def context_len(self) -> int: ...

    @property
    def checkpoints(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def is_decode(self) -> bool: ...

    @property
    def num_newest(self) -> int:
        """The most keys visible to a decode that this step writes."""


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """The rows that are not decodes as kernels see them: blocks of at most 64 tokens, in order.

    A block crosses neither a multiple of 64 nor a checkpoint position.
    """

    # [n, 4] int32 row, first token in the step, tokens, slot to save the state in (0: none)
    table: Tensor
    rows: Tensor  # [m, 2] int32  a row's first block, and the one past its last

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device | str) -> TokenBlocks:
        blocks, rows = cut_blocks(spans)
        like: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return cls(torch.tensor(blocks, **like).view(-1, 4), torch.tensor(rows, **like).view(-1, 2))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are computed together: decodes, or one other row, which is `span`."""

    rows: slice
    tokens: slice
    span: Span | None


def cut_rows(spans: Sequence[Span], *, batch_decodes: bool) -> Iterator[RowGroup]:
    """The rows of a step in order. Without `batch_decodes` every row is its own group."""
    row = token = 0
    while row < len(spans):
        end = row
        while batch_decodes and end < len(spans) and spans[end].is_decode:
            end += 1
        if end > row:
            num_tokens = sum(span.num_tokens for span in spans[row:end])
            yield RowGroup(slice(row, end), slice(token, token + num_tokens), None)
        else:
            end, num_tokens = row + 1, spans[row].num_tokens
            if num_tokens:
                yield RowGroup(slice(row, end), slice(token, token + num_tokens), spans[row])
        row, token = end, token + num_tokens


def decode_runs(spans: Sequence[Span]) -> Iterator[tuple[slice, slice]]:
    """Rows and tokens of every run of decodes."""
    row = token = 0
    for are_decodes, run in itertools.groupby(spans, lambda span: span.is_decode):
        lens = [span.num_tokens for span in run]
        end_row, end_token = row + len(lens), token + sum(lens)
        if are_decodes:
            yield slice(row, end_row), slice(token, end_token)
        row, token = end_row, end_token


def are_in_blocks(spans: Sequence[Span]) -> bool:
    """Whether there are no decodes."""
    return not any(span.is_decode for span in spans)


def cut_blocks(
    spans: Sequence[Span],
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]:
    """The blocks and rows of `TokenBlocks`, on the host."""
    blocks: list[tuple[int, int, int, int]] = []
    rows: list[tuple[int, int]] = []
    token = 0
    for row, span in enumerate(spans):
        if span.num_tokens and not span.is_decode:
            first_block, begin = len(blocks), 0
            saved = dict(span.checkpoints)
            start = span.context_len - span.num_tokens
            ends = {
                *range(BLOCK_TOKENS - start % BLOCK_TOKENS, span.num_tokens, BLOCK_TOKENS),
                span.num_tokens,
                *saved,
            }
            for end in sorted(ends):
                blocks.append((row, token + begin, end - begin, saved.get(end, 0)))
                begin = end
            rows.append((first_block, len(blocks)))
        token += span.num_tokens
    return blocks, rows
