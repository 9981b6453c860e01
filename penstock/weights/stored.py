"""A tensor as a checkpoint describes it: known by name and shape at once, read only when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[slice | None], Tensor]  # some rows of it, or all: a CPU tensor, the caller's alone

    def load(self, rows: slice | None = None) -> Tensor:
        """The tensor, or only these rows of it."""
        return self.read(rows)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
