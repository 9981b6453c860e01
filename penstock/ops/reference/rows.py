"""How the rows of a step are cut for the reference ops. Integers only; the device is not asked.

Consecutive rows of one token each (decodes) form one piece, so that a decode step is a fixed sequence of
batched operations; a row of several tokens is a piece of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class Span(Protocol):
    """A row as the host knows it."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def context_len(self) -> int: ...

    @property
    def checkpoints(self) -> tuple[tuple[int, int], ...]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that are computed together; `span` is the only row of a piece that is not decodes."""

    rows: slice
    tokens: slice
    span: Span | None


def cut_rows(spans: Sequence[Span], *, batch_decodes: bool) -> Iterator[Piece]:
    """The rows of a step in order. Without `batch_decodes` every row is a piece with its span."""
    row = token = 0
    while row < len(spans):
        end = row
        while batch_decodes and end < len(spans) and _is_decode(spans[end]):
            end += 1
        if end > row:
            num_tokens = end - row
            yield Piece(slice(row, end), slice(token, token + num_tokens), None)
        else:
            end, num_tokens = row + 1, spans[row].num_tokens
            if num_tokens:
                yield Piece(slice(row, end), slice(token, token + num_tokens), spans[row])
        row, token = end, token + num_tokens


def _is_decode(span: Span) -> bool:
    return span.num_tokens == 1 and not span.checkpoints
