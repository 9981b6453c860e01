"""Logit biases of running rows, kept on the device from their admission on.

A step with the same biased rows at the same positions as the previous step uploads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Upload = Callable[[object, torch.dtype], Tensor]
# Indices among the sampling rows, token ids, biases; all [N].
Entries = tuple[Tensor, Tensor, Tensor]


class LogitBiases:
    """Stores only the biases that requests set, from a few to a whole vocabulary of them."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._of_row: dict[int, tuple[Tensor, Tensor]] = {}  # token ids and biases
        self._joined_rows: list[tuple[int, int]] = []  # (index, row) of those in `_joined`
        self._joined: Entries | None = None

    def set(self, row: int, biases: Mapping[int, float]) -> None:
        """For the sequence that takes the row now."""
        if self._of_row.pop(row, None) is not None:
            self._joined_rows, self._joined = [], None
        if biases:
            token_ids = self._upload(list(biases), torch.int64)
            self._of_row[row] = token_ids, self._upload(list(biases.values()), torch.float32)

    def entries(self, rows: Sequence[int | None]) -> Entries | None:
        """For the rows that sample in a step; None for a row to skip. A token id occurs at most
        once per row.
        """
        biased = [
            (place, row)
            for place, row in enumerate(rows)
            if row is not None and row in self._of_row
        ]
        if not biased:
            return None
        if self._joined is None or biased != self._joined_rows:
            self._joined_rows, self._joined = biased, self._join(biased)
        return self._joined

    def _join(self, biased: list[tuple[int, int]]) -> Entries:
        parts = [self._of_row[row] for _, row in biased]
        lengths = [len(token_ids) for token_ids, _ in parts]
        places, repeats = self._upload([[place for place, _ in biased], lengths], torch.int64)
        return (
            # Without the size this would wait for the device.
            places.repeat_interleave(repeats, output_size=sum(lengths)),
            torch.cat([token_ids for token_ids, _ in parts]),
            torch.cat([biases for _, biases in parts]),
        )
