"""The products of a layer by torch, with separate kernels for the operations between them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.forge.fragments.kernel_rows import gate_rows, scale_rows


def project_normed(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """x / rms(x) [T, H] by weight [N, H] -> [T, N]"""
    return F.linear(scale_rows(x, eps), weight)


def project_gated(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """silu(gate) * up [T, F] of x / rms(x) [T, H] by weight [2F, H]"""
    return gate_rows(F.linear(scale_rows(x, eps), weight))


def project_onto(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual [T, N] + x [T, K] by weight [N, K], in place of the residual"""
    return residual.addmm_(x, weight.t())
