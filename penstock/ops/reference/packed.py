"""Products on a CPU by oneDNN, which multiplies a few tokens in a fraction of the time that a BLAS
needs.

A BLAS made for square matrices rearranges a weight for every product, which takes longer than
reading it. Weights in bf16 are kept in oneDNN's own arrangement instead: `pack`, once, after
loading, unless `ops/cpu` has a kernel that reads them as they are. In float32 that is no gain for a
single token. Sums come in another order than a BLAS has them, so `deterministic` engines keep their
weights as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu import skinny_gemm

LEAST_ELEMENTS = (
    1 << 19
)  # of a weight: smaller ones stay in a cache, and the call costs more than it spares
USUAL_TOKENS = 1  # that the arrangement is made for; others are multiplied in it as well
MOST_TOKENS = 64  # of a float32 product: for more a BLAS is as good


def pack(weight: Tensor) -> Tensor:  # [N, K] -> [N, K]
    """The same matrix in another arrangement, or as it was where that is no gain or this CPU
    cannot.
    """
    is_packed = weight.dtype == torch.bfloat16 and weight.numel() >= LEAST_ELEMENTS
    if not is_packed or skinny_gemm.is_available() or not _can_multiply(weight):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), USUAL_TOKENS)
    return packed


def is_better(x: Tensor, weight: Tensor) -> bool:
    """Whether `multiply` is to be preferred for x [T, K] and a weight [N, K]; always where it is
    packed.

    Of a single token, only where the weight is wide: long sums are as quick in a BLAS."""
    if weight.is_mkldnn:
        return True
    if weight.dtype != torch.float32 or weight.numel() < LEAST_ELEMENTS:
        return False
    is_suited = 1 < x.shape[0] <= MOST_TOKENS or (
        x.shape[0] == 1 and weight.shape[0] > weight.shape[1]
    )
    return is_suited and _can_multiply(weight)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # [T, N]
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight, bias, "none", [], ""
    )
    return product


def _can_multiply(weight: Tensor) -> bool:
    if not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
