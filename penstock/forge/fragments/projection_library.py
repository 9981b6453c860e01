"""The products of a layer by torch, with what stands between them as kernels of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.forge.fragments.kernel_rows import gate_rows, norm_rows


def project_normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """norm(x) [T, H] by weight [N, H] -> [T, N]"""
    return F.linear(norm_rows(x, norm, eps), weight)


def project_onto(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual [T, N] + x [T, M] by weight [N, M]"""
    return torch.addmm(residual, x, weight.t())


def project_gated(residual: Tensor, gate_up: Tensor, weight: Tensor) -> Tensor:
    """residual [T, N] + silu(gate) * up by weight [N, F], from gate_up [T, 2F]"""
    return torch.addmm(residual, gate_rows(gate_up), weight.t())
