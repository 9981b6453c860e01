# mypy: disable-error-code="no-untyped-def"
"""Logits of a batch with a head in E4M3, on Hopper. Codes become the tokens' dtype in registers,
exactly; tokens are never quantized for logits (`ops/float8.py`).

A program owns a block of rows and a block of tokens. The head is the left operand, which tensor
cores take from registers. Programs with the same rows are adjacent, so the head is read from memory
once, where `ops/cuda/quantized_gemm.cu` reads it for each 64 tokens. Rows are dequantized for each
block of tokens: for many blocks, dequantizing the head first is faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops import float8
from penstock.ops.product import Product
from penstock.ops.tiles import STEP, TILE_ROWS, TiledRows
from penstock.ops.triton.fp8 import codes_of, load_row_scales, scales_of
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    wait_for_previous,
)
from penstock.ops.tuning import Tile
from penstock.ops.weight import Part

FEW_TOKENS, MOST_TOKENS = 32, 256


def can_multiply(parts: tuple[Part, ...], product: Product) -> bool:
    """Whether these are logits, which alone are float32 and have no residual, of some tokens."""
    is_some = FEW_TOKENS < product.num_tokens <= MOST_TOKENS
    if not is_some or product.out_dtype != torch.float32:
        return False
    are_known = all(
        isinstance(part, TiledRows) and part.is_row_major and float8.can_take(part)
        for part in parts
    )
    x = product.x
    return are_known and x.dtype in float8.DTYPES and float8.is_hopper(x.device)


def multiply_parts(parts: tuple[Part, ...], product: Product) -> Tensor:
    """After the norm."""
    out = product.new_out()
    for part, own in zip(parts, out.split([part.shape[0] for part in parts], dim=1)):
        assert isinstance(part, TiledRows)
        multiply(product.x, part, own)
    if product.bias is not None:
        out += product.bias
    return out


def rule(num_tokens: int) -> Tile:
    """Two small programs per SM while memory is the bound: one loads while the other multiplies."""
    if num_tokens <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}


def multiply(
    x: Tensor,  # [T, K]
    rows: TiledRows,  # [N, K]  row-major
    out: Tensor,  # [T, N]  may be a slice
) -> None:
    num_tokens, K = x.shape
    tile = rule(num_tokens)
    grid = (cdiv(num_tokens, tile["BLOCK_M"]), cdiv(rows.num_rows, tile["BLOCK_N"]))
    _logits_kernel[grid](
        x,
        codes_of(rows),
        scales_of(rows),
        out,
        num_tokens,
        x.stride(0),
        out.stride(0),
        N=rows.num_rows,
        K=K,
        STEP=STEP,
        TILE_ROWS=TILE_ROWS,
        BY_BLOCK=rows.block_scales is not None,
        **tile,
        **launch_options(x.device),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x,
    codes,
    scales,
    out,
    num_tokens,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, n): the t-th BLOCK_M tokens and the n-th BLOCK_N rows."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    tl.static_assert(not BY_BLOCK or STEP % BLOCK_N == 0, "a tile of rows is in one block")
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_row = tl.program_id(1) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    own = tl.minimum(rows, N - 1)
    is_token, columns = tokens < num_tokens, tl.arange(0, STEP)
    p_codes = codes + own.to(tl.int64)[:, None] * K + columns[None, :]
    p_x = x + tokens.to(tl.int64)[None, :] * x_stride + columns[:, None]
    p_scale = scales + first_row // STEP * (K // STEP)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i in range(K // STEP):
        b_codes = tl.load(p_codes + i * STEP)
        b_x = tl.load(p_x + i * STEP, mask=is_token[None, :], other=0.0)
        if BY_BLOCK:
            total += tl.dot(b_codes.to(b_x.dtype), b_x) * tl.load(p_scale + i)
        else:
            total = tl.dot(b_codes.to(b_x.dtype), b_x, total)
    if not BY_BLOCK:
        total *= load_row_scales(scales, own, K, STEP, TILE_ROWS)[:, None]
    p_out = out + tokens.to(tl.int64)[None, :] * out_stride + rows[:, None]
    inside = (rows[:, None] < N) & is_token[None, :]
    tl.store(p_out, total.to(out.dtype.element_ty), mask=inside)
