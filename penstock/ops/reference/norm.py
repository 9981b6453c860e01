"""Root-mean-square norms. The weights given here are final: a model whose checkpoint stores `w` of `1 + w`
folds the one in when it loads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.reference.activation import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., D], weight [D] float32 -> [.., D] like x. Float32 inside, rounded once."""
    return (_unit_rms(x, eps) * weight).to(x.dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, deterministic: bool = False
) -> Tensor:
    """x [.., D], gate [.., D], weight [D] float32 -> [.., D] like the gate: norm first, then silu(gate)."""
    return (_unit_rms(x, eps) * weight * silu(gate, deterministic)).to(gate.dtype)


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
