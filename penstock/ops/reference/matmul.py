"""Matrix products with what belongs to them: a norm or an activation before, a residual after.

`deterministic` makes a token's result independent of the other tokens of the step: rows are multiplied in
tiles of one fixed height, because a BLAS picks its summation order by the shape it is given.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.reference.activation import silu
from penstock.ops.reference.norm import rms_norm

TILE = 16


def linear(
    x: Tensor,  # [T, M]
    weight: Tensor,  # [N, M]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N]
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    out = _tiled_linear(x, weight, bias) if deterministic else F.linear(x, weight, bias)
    return out if residual is None else residual + out


def norm_linear(
    x: Tensor,  # [T, M]
    norm_weight: Tensor,  # [M] float32
    eps: float,
    weight: Tensor,  # [N, M]
    bias: Tensor | None = None,  # [N]
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    return linear(rms_norm(x, norm_weight, eps), weight, bias, deterministic=deterministic)


def swiglu_linear(
    gate_up: Tensor,  # [T, 2F]  gate, then up
    weight: Tensor,  # [N, F]
    residual: Tensor | None = None,  # [T, N]
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    return linear(swiglu(gate_up, deterministic), weight, residual=residual, deterministic=deterministic)


def swiglu(gate_up: Tensor, deterministic: bool) -> Tensor:
    """[.., 2F] -> [.., F] : silu(gate) * up, float32 inside."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate, deterministic) * up.float()).to(gate_up.dtype)


def _tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_tokens = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -num_tokens % TILE))
    tiles = [F.linear(tile, weight, bias) for tile in padded.split(TILE)]
    return torch.cat(tiles)[:num_tokens] if tiles else x.new_empty(0, weight.shape[0])
