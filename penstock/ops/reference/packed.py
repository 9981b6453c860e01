"""CPU GEMMs by oneDNN, which is several times as fast as a BLAS for a few tokens.

A BLAS made for square matrices repacks a weight for every GEMM, which takes longer than reading it.
So bf16 weights are kept in oneDNN's layout (`pack`, once, after loading), unless `ops/cpu` has a
kernel that reads them directly. In float32 that is not faster for a single token. The summation
order differs from a BLAS, so `deterministic` engines do not pack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu import skinny_gemm

LEAST_ELEMENTS = (
    1 << 19
)  # per weight: smaller ones stay in a cache, and the call costs more than it saves
USUAL_TOKENS = 1  # that the layout is optimized for; others work too
MOST_TOKENS = 64  # of a float32 GEMM; for more, a BLAS is as fast


def pack(weight: Tensor) -> Tensor:  # [N, K] -> [N, K]
    """The same matrix in oneDNN's layout, or unchanged if that is slower or impossible."""
    is_packed = weight.dtype == torch.bfloat16 and weight.numel() >= LEAST_ELEMENTS
    if not is_packed or skinny_gemm.is_available() or not _can_multiply(weight):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), USUAL_TOKENS)
    return packed


def is_better(x: Tensor, weight: Tensor) -> bool:
    """Whether `multiply` is faster for x [T, K] and a weight [N, K]; always for a packed weight.

    For a single token only if N is large: a BLAS is as fast for large K.
    """
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
