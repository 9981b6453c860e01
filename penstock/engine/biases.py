"""What is added to single logits of running rows, on the device since their admission.

A step that has the biased rows of the step before, at the same places, uploads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Upload = Callable[[object, torch.dtype], Tensor]
Entries = tuple[Tensor, Tensor, Tensor]  # places among the rows that sample, token ids, biases; all [N]


class LogitBiases:
    """Holds what requests asked for and no more: a request has a few biases or a whole vocabulary of them."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._of_row: dict[int, tuple[Tensor, Tensor]] = {}  # token ids and biases
        self._joined_rows: list[tuple[int, int]] = []  # (place, row) of those in `_joined`
        self._joined: Entries | None = None

    def set(self, row: int, biases: Mapping[int, float]) -> None:
        """For the sequence that takes the row now."""
        if self._of_row.pop(row, None) is not None:
            self._joined_rows, self._joined = [], None
        if biases:
            token_ids = self._upload(list(biases), torch.int64)
            self._of_row[row] = token_ids, self._upload(list(biases.values()), torch.float32)

    def entries(self, rows: Sequence[int | None]) -> Entries | None:
        """Of the rows that sample in a step, None for one that is left out. Of one row, every token id has at
        most one."""
        biased = [(place, row) for place, row in enumerate(rows) if row is not None and row in self._of_row]
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
            places.repeat_interleave(repeats, output_size=sum(lengths)),  # without the size it would wait
            torch.cat([token_ids for token_ids, _ in parts]),
            torch.cat([biases for _, biases in parts]),
        )
