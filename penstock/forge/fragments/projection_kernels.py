# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
"""The products of a decode step: every weight is read once, and norms and activations are fused.

Very few rows are multiplied in registers, a batch on tensor cores, and many rows, which are compute
bound, by the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.forge.fragments.kernel_rows import gate_rows, scale_rows
from penstock.forge.fragments.launch import launch
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_processors,
    prefetch_l2,
    shared_memory,
    wait_for_previous,
)
from penstock.ops.triton.matmul_gemv import (
    _block_width,
    _holds_all,
    _load_block,
    _stack,
    _tile,
)
from penstock.ops.triton.matmul_product import load_inside
from penstock.ops.triton.matmul_small_gemm import SUMMED_COLUMNS, sum_parts

VECTOR_ROWS = 4  # forge: value
TENSOR_ROWS = 64
WEIGHT_ROWS = 64  # forge: value
SPARED_BYTES = 16 * 1024  # of shared memory, for everything but the stages of the loop
MAX_STAGES = 8
PREFETCHED_BYTES = 1024  # of every row, into L2, while the previous kernel still runs


def project_normed(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """x / rms(x) [T, H] by weight [N, H] -> [T, N]"""
    if len(x) > TENSOR_ROWS:
        return F.linear(scale_rows(x, eps), weight)
    if len(x) <= VECTOR_ROWS:
        return multiply_vectors(x, weight, norm_eps=eps)
    return multiply_tensors(x, weight, norm_eps=eps)


def project_gated(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """silu(gate) * up [T, F] of x / rms(x) [T, H] by weight [2F, H]"""
    if len(x) > TENSOR_ROWS:
        return gate_rows(F.linear(scale_rows(x, eps), weight))
    if len(x) <= VECTOR_ROWS:
        return multiply_vectors(x, weight, norm_eps=eps, is_gated=True)
    return multiply_tensors(x, weight, norm_eps=eps, is_gated=True)


def project_onto(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual [T, N] + x [T, M] by weight [N, M]. The sum may overwrite the residual."""
    if len(x) > TENSOR_ROWS:
        return residual.addmm_(x, weight.t())
    if len(x) <= VECTOR_ROWS:
        return multiply_vectors(x, weight, residual=residual)
    return multiply_tensors(x, weight, residual=residual)


@triton.jit
def place_rows(rows, N, IS_GATED: tl.constexpr):
    """The rows of the weight that a program multiplies; if gated, pairs of a gate and its up."""
    source = rows // 2 + rows % 2 * (N // 2) if IS_GATED else rows
    return tl.minimum(source, N - 1).to(tl.int64)


@triton.jit
def gate_pairs(b_out, T: tl.constexpr, BLOCK_N: tl.constexpr):
    """[T, BLOCK_N] -> silu(gate) * up, [T, BLOCK_N / 2]"""
    b_gate, b_up = tl.split(tl.reshape(b_out, [T, BLOCK_N // 2, 2]))
    return b_gate / (1.0 + tl.exp(-b_gate)) * b_up


def multiply_vectors(
    x: Tensor,  # [T, M]
    weight: Tensor,  # [N, M]
    *,
    norm_eps: float | None = None,
    residual: Tensor | None = None,  # [T, N]
    is_gated: bool = False,
) -> Tensor:  # [T, N], or [T, N / 2] when is_gated
    (N, M), num_rows = weight.shape, len(x)
    out = torch.empty(num_rows, N // 2 if is_gated else N, dtype=x.dtype, device=x.device)
    tile = choose_vector_tile(weight, num_rows)
    launch(vector_product_kernel, (cdiv(N, tile["block_n"]),))(
        x,
        weight,
        residual,
        out,
        num_rows,
        N,
        norm_eps,
        M=M,
        IS_GATED=is_gated,
        BLOCK_T=next_power_of_2(num_rows),
        BLOCK_N=tile["block_n"],
        BLOCK_M=tile["block_k"],
        HELD=tile["held"],
        num_warps=tile["num_warps"],
        **launch_options(x.device),
    )
    return out


def choose_vector_tile(weight: Tensor, num_rows: int) -> Mapping[str, int]:
    """Many rows of a weight per program save loads of inputs; fewer if whole rows can be held, or
    to fill the device: at least three programs per processor.
    """
    N, M = weight.shape
    tiles = [_tile(block_n, _block_width(M), M, num_rows) for block_n in (8, 4, 2)]
    if num_rows > 1 or (_holds_all(tiles[1], M) and not _holds_all(tiles[0], M)):
        del tiles[0]
    enough = 3 * num_processors(weight.device)
    return next((tile for tile in tiles if cdiv(N, tile["block_n"]) >= enough), tiles[-1])


@triton.jit(do_not_specialize=["num_rows"])
def vector_product_kernel(
    p_x,
    p_weight,
    p_residual,
    p_out,
    num_rows,
    N,
    norm_eps,
    M: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few rows of the weight by chunks of columns. The first HELD loads start before the wait."""
    let_next_start(PDL)
    STRIDE: tl.constexpr = HELD * BLOCK_M
    IS_WHOLE: tl.constexpr = M % STRIDE == 0
    # Elements per 16-byte load.
    GROUP: tl.constexpr = 128 // p_weight.dtype.element_ty.primitive_bitwidth
    NUM_GROUPS: tl.constexpr = BLOCK_M // GROUP
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    p_rows = p_weight + place_rows(rows, N, IS_GATED)[:, None] * M
    weights = ()
    for i in tl.static_range(HELD):
        columns = i * BLOCK_M + tl.arange(0, BLOCK_M)
        weights += (_load_block(p_rows, columns[None, :], M, IS_WHOLE),)

    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    out_width = N // 2 if IS_GATED else N
    tokens = tl.arange(0, BLOCK_T)[:, None]
    places = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = (tokens < num_rows) & (places < out_width)
    wait_for_previous(PDL)
    b_added = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    if p_residual is not None:
        b_added += tl.load(p_residual + tokens * out_width + places, mask=inside, other=0.0).to(
            tl.float32
        )

    sums = ()
    squares = ()
    for _ in tl.static_range(BLOCK_T):
        sums += (tl.zeros([BLOCK_N, NUM_GROUPS], tl.float32),)
        squares += (tl.zeros([NUM_GROUPS], tl.float32),)
    for start in tl.range(0, M, STRIDE):
        next_weights = ()
        for i in tl.static_range(HELD):
            columns = start + i * BLOCK_M + tl.arange(0, BLOCK_M)
            b_weight = weights[i].to(tl.float32)
            new_sums = ()
            new_squares = ()
            for t in tl.static_range(BLOCK_T):
                b_x = load_inside(
                    p_x + tl.minimum(t, num_rows - 1) * M + columns, columns < M, IS_WHOLE
                )
                b_x = b_x.to(tl.float32)
                if norm_eps is not None:
                    new_squares += (
                        squares[t] + tl.sum(tl.reshape(b_x * b_x, [NUM_GROUPS, GROUP]), axis=1),
                    )
                b_products = tl.reshape(b_weight * b_x[None, :], [BLOCK_N, NUM_GROUPS, GROUP])
                new_sums += (sums[t] + tl.sum(b_products, axis=2),)
            sums = new_sums
            if norm_eps is not None:
                squares = new_squares
            if STRIDE < M:
                columns += STRIDE
                next_weights += (_load_block(p_rows, columns[None, :], M, False),)
        if STRIDE < M:
            weights = next_weights

    # All rows at once: a sum across the program's threads needs a barrier.
    b_out = tl.trans(
        tl.sum(tl.reshape(_stack(sums, BLOCK_T), [BLOCK_N, NUM_GROUPS, BLOCK_T]), axis=1)
    )
    if norm_eps is not None:
        b_squares = tl.sum(tl.reshape(_stack(squares, BLOCK_T), [NUM_GROUPS, BLOCK_T]), axis=0)
        b_out = b_out * tl.rsqrt(b_squares / M + norm_eps)[:, None]
    if IS_GATED:
        b_out = gate_pairs(b_out, BLOCK_T, BLOCK_N)
    tl.store(
        p_out + tokens * out_width + places,
        (b_out + b_added).to(p_out.dtype.element_ty),
        mask=inside,
    )


class TensorTile(NamedTuple):
    block_t: int
    block_n: int
    block_m: int
    num_splits: int
    num_stages: int


def choose_tile(weight: Tensor, num_rows: int, can_split: bool) -> TensorTile:
    """Splits the columns of a weight if its rows make too few programs. A program that is alone on
    a processor has all its shared memory, and so more loads in flight.
    """
    N, M = weight.shape
    block_t = max(16, next_power_of_2(num_rows))
    block_m = 256 // weight.dtype.itemsize
    num_programs, filling = cdiv(N, WEIGHT_ROWS), num_processors(weight.device)
    # Fewer than four iterations do not fill a pipeline.
    most_splits = max(1, M // (4 * block_m)) if can_split else 1
    num_splits = min(max(1, round(filling / num_programs)), most_splits)
    room = (shared_memory(weight.device) - SPARED_BYTES) // (
        1 if num_programs * num_splits <= filling else 2
    )
    num_stages = max(2, min(MAX_STAGES, room // ((WEIGHT_ROWS + block_t) * 256)))
    return TensorTile(block_t, WEIGHT_ROWS, block_m, num_splits, num_stages)


def multiply_tensors(
    x: Tensor,  # [T, M]
    weight: Tensor,  # [N, M]
    *,
    norm_eps: float | None = None,
    residual: Tensor | None = None,  # [T, N]
    is_gated: bool = False,
) -> Tensor:  # [T, N], or [T, N / 2] when is_gated
    (N, M), num_rows = weight.shape, len(x)
    # The norm of a row needs all its columns.
    tile = choose_tile(weight, num_rows, can_split=norm_eps is None)
    out = torch.empty(num_rows, N // 2 if is_gated else N, dtype=x.dtype, device=x.device)
    parts = out
    if tile.num_splits > 1:
        parts = torch.empty(tile.num_splits, num_rows, N, dtype=torch.float32, device=x.device)
    launch(tensor_product_kernel, (cdiv(N, tile.block_n), tile.num_splits))(
        x,
        weight,
        residual if parts is out else None,
        parts,
        num_rows,
        N,
        norm_eps,
        M=M,
        IS_GATED=is_gated,
        BLOCK_T=tile.block_t,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        NUM_SPLITS=tile.num_splits,
        PREFETCHED=PREFETCHED_BYTES,
        num_warps=4,
        num_stages=tile.num_stages,
        **launch_options(x.device),
    )
    if parts is not out:
        launch(sum_parts, (num_rows, cdiv(N, SUMMED_COLUMNS)))(
            parts,
            None,  # no bias
            residual,
            out,
            num_rows,
            N,
            N,  # from row to row of the residual
            N,  # and of the output
            NUM_SPLITS=tile.num_splits,
            BLOCK_N=SUMMED_COLUMNS,
            num_warps=4,
            **launch_options(x.device),
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def tensor_product_kernel(
    p_x,
    p_weight,
    p_residual,
    p_out,
    num_rows,
    N,
    norm_eps,
    M: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PREFETCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weight is the left operand: its rows fill an instruction, whose other side is as narrow
    as the batch.

    Inputs are multiplied as loaded, so that tensor cores read them from shared memory; the norm's
    divisor is applied to the sums. With several splits, the output has one part per split,
    [NUM_SPLITS, T, N].
    """
    let_next_start(PDL)
    IS_WHOLE: tl.constexpr = M % BLOCK_M == 0
    SPLIT: tl.constexpr = (M + NUM_SPLITS * BLOCK_M - 1) // (NUM_SPLITS * BLOCK_M) * BLOCK_M
    tokens = tl.arange(0, BLOCK_T)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * SPLIT
    p_rows = p_weight + place_rows(rows, N, IS_GATED)[:, None] * M
    # Elements in 128 bytes.
    LINE: tl.constexpr = 1024 // p_weight.dtype.element_ty.primitive_bitwidth
    prefetch_l2(
        p_rows + tl.minimum(start + tl.arange(0, PREFETCHED // 128) * LINE, M - 1)[None, :], PDL
    )
    wait_for_previous(PDL)

    b_sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    b_squares = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for first in tl.range(start, tl.minimum(start + SPLIT, M), BLOCK_M):
        columns = first + tl.arange(0, BLOCK_M)
        b_weight = load_inside(p_rows + columns[None, :], columns[None, :] < M, IS_WHOLE)
        is_input = (tokens[:, None] < num_rows) & (columns[None, :] < M)
        b_x = tl.load(p_x + tokens[:, None] * M + columns[None, :], mask=is_input, other=0.0)
        if norm_eps is not None:
            b_squares += b_x.to(tl.float32) * b_x.to(tl.float32)
        b_sums = tl.dot(b_weight, tl.trans(b_x), b_sums, input_precision="ieee")

    if norm_eps is not None:
        b_sums = b_sums * tl.rsqrt(tl.sum(b_squares, axis=1) / M + norm_eps)[None, :]
    if IS_GATED:
        b_sums = tl.trans(gate_pairs(tl.trans(b_sums), BLOCK_T, BLOCK_N))
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    out_width = N // 2 if IS_GATED else N
    places = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH))[:, None]
    inside = (places < out_width) & (tokens[None, :] < num_rows)
    if p_residual is not None:
        p_taken = p_residual + tokens[None, :] * out_width + places
        b_sums += tl.load(p_taken, mask=inside, other=0.0).to(tl.float32)
    i_row = tl.program_id(1) * num_rows + tokens
    tl.store(
        p_out + i_row[None, :] * out_width + places, b_sums.to(p_out.dtype.element_ty), mask=inside
    )
