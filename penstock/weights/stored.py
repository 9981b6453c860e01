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
    load: Callable[[], Tensor]  # a CPU tensor of that shape and dtype; the caller's alone

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
