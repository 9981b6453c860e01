"""Root-mean-square norms. The weights given here are final: a model whose checkpoint stores `w` of
`1 + w` adds the one at load.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.cpu import decode
from penstock.ops.reference.activation import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., D], weight [D] float32 -> [.., D] like x. Float32 inside, rounded once."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rms_norm_pair(
    first: Tensor,  # [T, D]
    first_weight: Tensor,  # [D] float32
    second: Tensor,  # [T, D]
    second_weight: Tensor,  # [D] float32
    eps: float,
) -> Tensor:  # [T, 2D]
    """Both norms, one beside the other."""
    normed = (rms_norm(first, first_weight, eps), rms_norm(second, second_weight, eps))
    return torch.cat(normed, dim=-1)


def norm_tokens(x: Tensor, weight: Tensor, eps: float, deterministic: bool) -> Tensor:
    """`rms_norm` of x [T, K] for ops that are not required to be bit-reproducible."""
    if decode.is_alone(x, deterministic):
        return decode.rms_norm(x, weight, eps)
    norm = decode.rms_norm_of_few if decode.are_few(x, deterministic) else rms_norm
    return norm(x, weight, eps)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, deterministic: bool = False
) -> Tensor:
    """x [.., D], gate [.., D], weight [D] float32 -> [.., D] like the gate: norm, then times
    silu(gate).
    """
    normed = F.rms_norm(x.float(), weight.shape, weight, eps)
    return (normed * silu(gate, deterministic)).to(gate.dtype)
