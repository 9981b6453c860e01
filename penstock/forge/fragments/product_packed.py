"""Products on a CPU by oneDNN, with weights packed once; a BLAS packs them for every product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

USUAL_ROWS = 8  # weights are packed for this many; any number works
LEAST_ELEMENTS = 1 << 17  # of a weight: for a smaller one, the call costs more than it saves


def pack(weight: Tensor) -> Tensor:
    """[N, K] as oneDNN reads it fastest; unchanged on a GPU, and if torch has no oneDNN"""
    is_possible = (
        weight.is_cpu and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    )
    if not is_possible or weight.numel() < LEAST_ELEMENTS:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, USUAL_ROWS)
    return packed


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., K] by weight [N, K] -> [.., N]"""
    if not weight.is_mkldnn:
        return F.linear(x, weight)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight, None, "none", [], ""
    )
    return product
