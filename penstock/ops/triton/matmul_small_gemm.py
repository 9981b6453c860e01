# mypy: disable-error-code="no-untyped-def"
"""GEMMs on tensor cores for a batch of tokens, still bound by reading the weight.

A program owns a block of weight rows and a block of tokens and iterates over K in a pipelined loop.
The weight is the left operand, so that its rows fill an instruction whose other side is as narrow
as the batch. If the rows give too few programs for the device, K is split, and a second kernel adds
the partial sums, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.product import Product
from penstock.ops.triton.launch import (
    LARGE_MEMORY,
    SMALL_MEMORY,
    cdiv,
    launch_options,
    let_next_start,
    num_processors,
    prefetch_l2,
    shared_memory,
    wait_for_previous,
)
from penstock.ops.triton.matmul_product import (
    columns_of,
    load_inside,
)
from penstock.ops.tuning import Tile, bucket

OTHER_BYTES = 3 * 1024  # of shared memory not used for pipeline stages
MAX_STAGES = 8
PREFETCHED_BYTES = 1024  # of every row, prefetched into L2 while the preceding kernel runs
SUMMED_COLUMNS = 512  # per token and program of the second kernel

# A token's sums are the same in every batch, because none of these depends on the batch.
FIXED_TILE: Tile = {
    "block_m": 16,
    "block_n": 32,
    "block_k": 128,
    "num_splits": 1,
    "num_warps": 4,
    "num_stages": 4,
}


@triton.jit(do_not_specialize=["num_tokens"])
def small_gemm_kernel(
    p_x,
    p_weight,
    p_bias,
    p_residual,
    p_out,
    num_tokens,
    N,
    x_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PREFETCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """With several splits the output is one partial sum each, [NUM_SPLITS, T, N]."""
    let_next_start(PDL)
    IS_WHOLE: tl.constexpr = K % BLOCK_K == 0
    SPLIT: tl.constexpr = (K + NUM_SPLITS * BLOCK_K - 1) // (NUM_SPLITS * BLOCK_K) * BLOCK_K
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(2) * SPLIT
    p_rows = p_weight + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K
    p_tokens = p_x + tokens.to(tl.int64)[:, None] * x_stride
    LINE: tl.constexpr = (
        1024 // p_weight.dtype.element_ty.primitive_bitwidth
    )  # elements of 128 bytes
    prefetch_l2(
        p_rows + tl.minimum(start + tl.arange(0, PREFETCHED // 128) * LINE, K - 1)[None, :], PDL
    )
    wait_for_previous(PDL)

    b_sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(start, tl.minimum(start + SPLIT, K), BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        b_weight = load_inside(p_rows + columns[None, :], columns[None, :] < K, IS_WHOLE)
        inside = (tokens[:, None] < num_tokens) & (columns[None, :] < K)
        b_x = tl.load(p_tokens + columns[None, :], mask=inside, other=0.0)
        b_sums = tl.dot(b_weight, tl.trans(b_x.to(b_weight.dtype)), b_sums, input_precision="ieee")

    is_stored = (rows[:, None] < N) & (tokens[None, :] < num_tokens)
    if p_bias is not None:
        b_sums += tl.load(p_bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if p_residual is not None:
        p_taken = p_residual + tokens[None, :].to(tl.int64) * residual_stride + rows[:, None]
        b_sums += tl.load(p_taken, mask=is_stored, other=0.0).to(tl.float32)
    i_token = tl.program_id(2) * num_tokens + tokens
    p_stored = p_out + i_token[None, :].to(tl.int64) * out_stride + rows[:, None]
    tl.store(p_stored, b_sums.to(p_out.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_parts(
    p_parts,
    p_bias,
    p_residual,
    p_out,
    num_tokens,
    N,
    residual_stride,
    out_stride,
    NUM_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    b_sums = tl.zeros([BLOCK_N], tl.float32)
    if p_bias is not None:
        b_sums += tl.load(p_bias + rows, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    for i in tl.static_range(NUM_SPLITS):
        b_sums += tl.load(p_parts + (i * num_tokens + i_token) * N + rows, mask=inside, other=0.0)
    if p_residual is not None:
        b_sums += tl.load(p_residual + i_token * residual_stride + rows, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(p_out + i_token * out_stride + rows, b_sums.to(p_out.dtype.element_ty), mask=inside)


def multiply_small_gemm(product: Product, tile: Tile, out: Tensor | None = None) -> Tensor:
    """tile: block_m, block_n, block_k, num_splits, num_warps, num_stages. out: [T, N], may be
    a slice of wider rows.
    """
    assert product.norm_weight is None, "a norm is a separate kernel before this one"
    assert not product.is_swiglu, "an activation too"
    out = product.new_out() if out is None else out
    num_splits = tile["num_splits"]
    if num_splits == 1:
        _launch(product, tile, out, product.bias, product.residual)
        return out
    num_tokens, N = out.shape
    parts = torch.empty(num_splits, num_tokens, N, dtype=torch.float32, device=out.device)
    _launch(product, tile, parts, None, None)
    sum_parts[(num_tokens, cdiv(N, SUMMED_COLUMNS))](
        parts,
        product.bias,
        product.residual,
        out,
        num_tokens,
        N,
        product.row_strides[1],
        out.stride(0) if num_tokens > 1 else N,
        NUM_SPLITS=num_splits,
        BLOCK_N=SUMMED_COLUMNS,
        num_warps=4,
        **launch_options(out.device),
    )
    return out


def _launch(
    product: Product, tile: Tile, out: Tensor, bias: Tensor | None, residual: Tensor | None
) -> None:
    N, K = product.shape
    x_stride, residual_stride = product.row_strides
    grid = (
        cdiv(product.num_tokens, tile["block_m"]),
        cdiv(N, tile["block_n"]),
        tile["num_splits"],
    )
    small_gemm_kernel[grid](
        product.x,
        product.weight,
        bias,
        residual,
        out,
        product.num_tokens,
        N,
        x_stride,
        residual_stride,
        out.stride(-2) if product.num_tokens > 1 else N,
        K=K,
        BLOCK_M=tile["block_m"],
        BLOCK_N=tile["block_n"],
        BLOCK_K=columns_of(tile["block_k"], product.weight.dtype),
        NUM_SPLITS=tile["num_splits"],
        PREFETCHED=PREFETCHED_BYTES,
        num_warps=tile["num_warps"],
        num_stages=tile["num_stages"],
        **launch_options(product.x.device),
    )


def small_gemm_rule(shape: tuple[int, ...], num_tokens: int, device: torch.device) -> Tile:
    N, K = shape
    block_m = min(max(16, bucket(num_tokens)), 128)
    block_n, block_k = 64, 128 if block_m <= 64 else 64
    num_programs = cdiv(N, block_n) * cdiv(num_tokens, block_m)
    most_splits = max(1, K // (4 * block_k))  # fewer than four steps do not fill a pipeline
    num_splits = min(max(1, round(num_processors(device) / num_programs)), most_splits)
    # A single program on an SM may use all of its shared memory for stages.
    memory = shared_memory(device)
    is_shared = num_programs * num_splits > num_processors(device) and memory >= 2 * SMALL_MEMORY
    return _tile(block_m, block_n, block_k, num_splits, memory // 2 if is_shared else memory)


def small_gemm_candidates(shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """With pipelines as deep as every GPU supports, and a few of the deepest."""
    N, K = shape
    block_m = min(max(16, bucket(num_tokens)), 128)
    tiles = []
    for block_n, block_k in (
        (32, 128),
        (32, 256),
        (64, 64),
        (64, 128),
        (64, 256),
        (128, 64),
        (128, 128),
    ):
        num_programs = cdiv(N, block_n) * cdiv(num_tokens, block_m)
        splits = [
            s for s in (1, 2, 4, 8) if s == 1 or (num_programs * s <= 512 and s * 4 * block_k <= K)
        ]
        tiles += [
            _tile(block_m, block_n, block_k, num_splits, SMALL_MEMORY) for num_splits in splits
        ]
        if block_n == 64:
            tiles += [_tile(block_m, block_n, block_k, s, LARGE_MEMORY) for s in splits]
    return tiles


def _tile(block_m: int, block_n: int, block_k: int, num_splits: int, shared_bytes: int) -> Tile:
    stage_bytes = (block_n + block_m) * block_k * 2
    num_stages = (shared_bytes - OTHER_BYTES) // stage_bytes
    return {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": block_k,
        "num_splits": num_splits,
        "num_warps": 4,
        "num_stages": min(MAX_STAGES, max(2, num_stages)),
    }
