# mypy: disable-error-code="no-untyped-def"
"""The chosen experts of many tokens, with weights and tokens in E4M3 (`fp8.py`).

Like `moe_grouped_gemm.py`, with the same list of pairs and final sum. The gate/up kernel writes the
intermediate activations in E4M3 as well, with one scale per 128 columns of a program. Weights are
in tiles, which few tokens read faster; tokens have the same column order. On Hopper a CUDA C++
kernel is used (`ops/cuda/fp8_experts.cu`), elsewhere the one below.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.cuda import fp8_experts
from penstock.ops.tiles import STEP, TILE_ROWS, TiledRows
from penstock.ops.triton.activation import silu
from penstock.ops.triton.fp8 import (
    codes_of,
    column_in_tile,
    load_row_scales,
    multiply_steps,
    quantize_tokens,
    scales_of,
    to_codes,
)
from penstock.ops.triton.launch import (
    LARGE_MEMORY,
    cdiv,
    launch_options,
    let_next_start,
    shared_memory,
    wait_for_previous,
)
from penstock.ops.triton.moe_grouped_gemm import add_pairs
from penstock.ops.triton.moe_permute import list_pairs, load_tile
from penstock.ops.tuning import Tile

BLOCK_M = 64  # pairs per tile: taller ones leave no registers for a block's sums
GATE_UP: Tile = {"BLOCK_N": 256, "num_warps": 8, "num_stages": 3}
SMALL_GATE_UP: Tile = {"BLOCK_N": 256, "num_warps": 8, "num_stages": 2}  # with less shared memory
DOWN: Tile = {"BLOCK_N": 128, "num_warps": 4, "num_stages": 3}


def run(
    out: Tensor,  # [T, H]
    x: Tensor,  # [T, H]
    weights: Tensor,  # [T, k] float32
    ids: Tensor,  # [T, k]
    parts: Sequence[TiledRows],  # gate_up [E, 2I, H], down [E, H, I], and a shared expert's
    residual: Tensor,  # [T, H]
    shared_weight: Tensor | None,  # [T, 1] float32
    counters: Tensor | None,
) -> None:
    gate_up, down, *shared = parts
    shared_gate_up, shared_down = shared or (None, None)
    (num_tokens, k), (num_experts, width, inner_width) = ids.shape, down.shape
    slots = k + bool(shared)
    num_pairs = num_tokens * slots
    by_cuda = fp8_experts.can_multiply(parts, x)
    multiply = fp8_experts.multiply if by_cuda else _multiply
    height = fp8_experts.PAIRS if by_cuda else BLOCK_M
    order, tiles = list_pairs(ids, num_experts, slots, height, counters)
    codes, scales, _ = quantize_tokens(x, for_tiles=True)
    inner = codes.new_empty(num_pairs, inner_width)
    inner_scales = scales.new_empty(inner_width // STEP, num_pairs)
    outputs = x.new_empty(num_pairs, width)
    given, between = (codes, scales, order, tiles), (inner, inner_scales)
    multiply(*given, gate_up, shared_gate_up, *between, slots, is_down=False)
    given = (*between, order, tiles)
    multiply(*given, down, shared_down, outputs, inner_scales, slots, is_down=True)
    add_pairs(out, outputs, weights, shared_weight, residual)


def _multiply(
    codes: Tensor,  # [T, K], or [pairs, K]
    scales: Tensor,  # [K / 128, T], or [K / 128, pairs]
    order: Tensor,
    tiles: Tensor,  # [n, 4], of up to BLOCK_M pairs
    rows: TiledRows,  # [E, N, K]
    shared: TiledRows | None,  # [N, K]
    result: Tensor,  # [pairs, N], or codes [pairs, N / 2] by expert
    result_scales: Tensor,  # [N / 2 / 128, pairs]  of codes
    slots: int,  # pairs per token
    *,
    is_down: bool,
) -> None:
    is_small = shared_memory(codes.device) < LARGE_MEMORY
    tile = DOWN if is_down else SMALL_GATE_UP if is_small else GATE_UP
    own = rows if shared is None else shared
    grid = (cdiv(rows.num_rows, tile["BLOCK_N"]), len(tiles))
    _grouped_kernel[grid](
        codes,
        scales,
        order,
        tiles,
        codes_of(rows),
        scales_of(rows),
        codes_of(own),
        scales_of(own),
        result,
        result_scales,
        scales.shape[1],
        len(result),
        IS_DOWN=is_down,
        E=rows.shape[0],
        HAS_SHARED=shared is not None,
        SLOTS=slots,
        N=rows.num_rows,
        K=rows.num_columns,
        BY_BLOCK=rows.block_scales is not None,
        STEP=STEP,
        TILE_ROWS=TILE_ROWS,
        BLOCK_M=BLOCK_M,
        **tile,
        **launch_options(codes.device),
    )


@triton.jit(do_not_specialize=["source_count", "num_pairs"])
def _grouped_kernel(
    source,  # [T, K] or [pairs, K] codes
    source_scales,  # [K / STEP, source_count]
    order,
    tiles,
    expert_codes,  # [E, tiles, steps, 16 x 128]
    expert_scales,  # of blocks [E, N / STEP, K / STEP], or of rows
    shared_codes,
    shared_scales,
    result,  # [pairs, N], or codes [pairs, N / 2]
    result_scales,  # [N / 2 / STEP, pairs]
    source_count,
    num_pairs,
    IS_DOWN: tl.constexpr,
    E: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    SLOTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, i): for tile i, BLOCK_N rows of its expert's `down`, or of its `gate_up`: gates,
    and the ups of the same columns, interleaved as in `moe_grouped_gemm.py`.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert, place, first_pair, count = load_tile(tiles)
    if count == 0:
        return
    STEPS: tl.constexpr = K // STEP
    SCALES: tl.constexpr = N // STEP * STEPS if BY_BLOCK else N * STEPS  # per matrix
    HALF: tl.constexpr = N // 2
    row_codes, row_scales = expert_codes + expert * (N * K), expert_scales + expert * SCALES
    if HAS_SHARED:
        row_codes = tl.where(expert == E, shared_codes, row_codes)
        row_scales = tl.where(expert == E, shared_scales, row_scales)
    places, lanes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    is_pair = places < count
    pairs = tl.load(order + place + places, mask=is_pair, other=0)
    own = (first_pair + places).to(tl.int64)  # rows of the intermediate activations
    if IS_DOWN:
        first_row = tl.program_id(0) * BLOCK_N
        rows, tokens = first_row + lanes, own
    else:
        first_row = tl.program_id(0) * (BLOCK_N // 2)
        rows = first_row + column_in_tile(lanes // 2) + lanes % 2 * HALF  # in the order of `down`
        tokens = (pairs // SLOTS).to(tl.int64)
    p_block = row_scales + first_row // STEP * STEPS
    total = multiply_steps(
        source + tokens[:, None] * K,
        source_scales + tokens,
        source_count,
        is_pair,
        row_codes + (rows // TILE_ROWS * (TILE_ROWS * K) + rows % TILE_ROWS * 64)[None, :],
        p_block,
        p_block + HALF // STEP * STEPS,
        K,
        BY_BLOCK,
        not IS_DOWN,
        True,
        STEP,
    )
    if not BY_BLOCK:
        total *= load_row_scales(row_scales, rows, K, STEP, TILE_ROWS)[None, :]
    if IS_DOWN:
        p_result = result + pairs.to(tl.int64)[:, None] * N + rows[None, :]
        tl.store(p_result, total.to(result.dtype.element_ty), mask=is_pair[:, None])
    else:
        gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
        b_codes, b_scales = to_codes(silu(gate) * up)
        columns = first_row + tl.arange(0, BLOCK_N // 2)
        p_result = result + own[:, None] * HALF + columns[None, :]
        tl.store(p_result, b_codes, mask=is_pair[:, None])
        p_scales = result_scales + tl.program_id(0) * num_pairs + own
        tl.store(p_scales, b_scales, mask=is_pair)
