# mypy: disable-error-code="no-untyped-def"
"""The standalone root-mean-square norm; most norms are fused into the next projection."""

from __future__ import annotations

import torch
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
    _launch(rows, weight, eps, out)
    return out.view(x.shape)


def rms_norm_pair(
    first: Tensor,  # [T, D]
    first_weight: Tensor,  # [D] float32
    second: Tensor,  # [T, D]
    second_weight: Tensor,  # [D] float32
    eps: float,
) -> Tensor:  # [T, 2D]
    num_tokens, dim = first.shape
    assert first.stride(1) == second.stride(1) == 1
    out = first.new_empty(num_tokens, 2 * dim)
    _rms_norm_pair_kernel[num_tokens, 2](
        first,
        first_weight,
        second,
        second_weight,
        out,
        eps,
        first.stride(0),
        second.stride(0),
        DIM=dim,
        **_tile(dim),
        **launch_options(first.device),
    )
    return out


def rms_norm_and_gate(
    x: Tensor,  # [T, D]
    weight: Tensor,  # [D] float32
    eps: float,
    gate: Tensor,  # [1, D]
    gate_weight: Tensor,  # [T, 1] float32  written: the sigmoid of the normed tokens' gate
) -> Tensor:  # [T, D]
    out = torch.empty_like(x)
    _launch(x, weight, eps, out, gate, gate_weight)
    return out


def _launch(
    rows: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    gate: Tensor | None = None,
    gate_weight: Tensor | None = None,
) -> None:
    _rms_norm_kernel[(len(rows),)](
        rows,
        weight,
        out,
        gate,
        gate_weight,
        eps,
        rows.stride(0),
        DIM=rows.shape[1],
        **_tile(rows.shape[1]),
        **launch_options(rows.device),
    )


def _tile(dim: int) -> dict[str, int]:
    """A row is one tile; chosen by its width alone, so that it sums in the same order in every
    step.
    """
    block = next_power_of_2(dim)
    return {"BLOCK": block, "num_warps": max(1, min(block // 256, 16))}


@triton.jit
def _normed(b_x, b_weight, eps, DIM: tl.constexpr):
    mean_square = tl.sum(b_x * b_x, axis=0) / DIM
    return b_x * tl.rsqrt(mean_square + eps) * b_weight


@triton.jit
def _rms_norm_kernel(
    p_x,
    p_weight,
    p_out,
    p_gate,  # or None
    p_gate_weight,
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
    b_gate = b_weight
    if p_gate is not None:
        b_gate = tl.load(p_gate + dims, mask=is_inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    b_x = tl.load(p_x + i_row * row_stride + dims, mask=is_inside, other=0.0).to(tl.float32)
    b_out = _normed(b_x, b_weight, eps, DIM).to(p_out.dtype.element_ty)
    tl.store(p_out + i_row * DIM + dims, b_out, mask=is_inside)
    if p_gate is not None:
        gate = tl.sum(b_out.to(tl.float32) * b_gate, axis=0)
        tl.store(p_gate_weight + i_row, 1.0 / (1.0 + tl.exp(-gate)))


@triton.jit
def _rms_norm_pair_kernel(
    p_first,
    p_first_weight,
    p_second,
    p_second_weight,
    p_out,
    eps,
    first_stride,
    second_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, i): token t of the first or of the second."""
    let_next_start(PDL)
    i_row, i_of_pair = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    is_inside = dims < DIM
    p_weight = tl.where(i_of_pair == 0, p_first_weight, p_second_weight)
    b_weight = tl.load(p_weight + dims, mask=is_inside, other=0.0)
    wait_for_previous(PDL)
    stride = tl.where(i_of_pair == 0, first_stride, second_stride)
    p_row = tl.where(i_of_pair == 0, p_first, p_second) + i_row * stride
    b_x = tl.load(p_row + dims, mask=is_inside, other=0.0).to(tl.float32)
    b_out = _normed(b_x, b_weight, eps, DIM).to(p_out.dtype.element_ty)
    tl.store(p_out + (2 * i_row + i_of_pair) * DIM + dims, b_out, mask=is_inside)
