"""The weight of a product: its values, and how they are stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Weight(nn.Module):
    """A matrix [N, K], or one for each expert [E, N, K]. Ops take it whole and know by it how it is stored.

    It is a module so that a model's parameters, its memory and its checkpoint include it.
    """

    values: nn.Parameter

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=False)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def rows(self, ids: Tensor) -> Tensor:  # [...] -> [..., K]
        """Of an embedding: the rows of these tokens."""
        return F.embedding(ids, self.values)

    def pack(self) -> None:
        """Rearranges the matrix for this CPU's products, where that is a gain. Nothing else changes."""
        from penstock.ops.reference.packed import pack

        self.values = nn.Parameter(pack(self.values), requires_grad=False)
