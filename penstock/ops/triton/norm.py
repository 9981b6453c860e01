# mypy: disable-error-code="no-untyped-def"
"""The standalone root-mean-square norm; most norms are fused into the next projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.launch import (
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., D], weight [D] float32 -> [.., D] like x. Float32 inside, rounded once."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = rows.new_empty(rows.shape)
    _rms_norm_kernel[(len(rows),)](
        rows,
        weight,
        out,
        eps,
        rows.stride(0),
        DIM=rows.shape[1],
        **_tile(rows.shape[1]),
        **launch_options(x.device),
    )
    return out.view(x.shape)


def _tile(dim: int) -> dict[str, int]:
    """A row is one tile; chosen by its width alone, so that it sums in the same order in every
    step.
    """
    block = next_power_of_2(dim)
    return {"BLOCK": block, "num_warps": max(1, min(block // 256, 16))}


@triton.jit
def _rms_norm_kernel(
    p_x,
    p_weight,
    p_out,
    eps,
    row_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    is_inside = dims < DIM
    b_weight = tl.load(p_weight + dims, mask=is_inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    b_x = tl.load(p_x + i_row * row_stride + dims, mask=is_inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(b_x * b_x, axis=0) / DIM
    b_out = b_x * tl.rsqrt(mean_square + eps) * b_weight
    tl.store(p_out + i_row * DIM + dims, b_out.to(p_out.dtype.element_ty), mask=is_inside)
