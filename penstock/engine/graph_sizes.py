"""The shapes of decode steps that are captured as graphs. Knows no tensor.

A shape is a number of rows and of drafts per row. Smaller steps are padded. Every capture takes
start-up time and memory, so with drafts only shapes that can pay off have a graph: several drafts
for few rows, one draft as long as more rows still share what a step reads anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass

FEW_ROWS = 8  # or fewer: any number of drafts
MOST_ROWS = 64  # with one draft each
MOST_PLACES = 128  # rows times tokens per row
DRAFTS = (1, 2, 3, 7, 15)  # per row; others are rounded up to the next


@dataclass(frozen=True, slots=True, order=True)
class DraftSize:
    num_rows: int
    num_drafts: int  # per row, at most

    @property
    def width(self) -> int:
        """Positions of a row: its last token, and its drafts."""
        return 1 + self.num_drafts

    @property
    def num_places(self) -> int:
        return self.num_rows * self.width


def graph_sizes(max_rows: int) -> list[int]:
    """Powers of two while steps are cheap; larger sizes are spaced so that padding costs at most an
    eighth to a quarter."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def draft_sizes(max_rows: int, num_drafts: int) -> list[DraftSize]:
    """For rows with at most `num_drafts` each."""
    counts = sorted({min(count, num_drafts) for count in DRAFTS if num_drafts})
    return [
        DraftSize(num_rows, count)
        for num_rows in graph_sizes(max_rows)
        for count in counts
        if (num_rows <= MOST_ROWS and count == 1)
        or (num_rows <= FEW_ROWS and num_rows * (1 + count) <= MOST_PLACES)
    ]


class DraftLimits:
    """The most drafts worth capturing, by the number of rows."""

    def __init__(self, sizes: Collection[DraftSize]) -> None:
        self._rows = sorted({size.num_rows for size in sizes})
        self._most = [
            max(size.num_drafts for size in sizes if size.num_rows == num_rows)
            for num_rows in self._rows
        ]

    def most(self, num_rows: int) -> int:
        place = bisect_left(self._rows, num_rows)
        return self._most[place] if place < len(self._rows) else 0
