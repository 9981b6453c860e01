# mypy: disable-error-code="no-untyped-def"
"""GEMMs of many tokens with E4M3 weights: both operands in 8 bits, on tensor cores that support it.

`ops/float8.py` defines how tokens are quantized, and when. The partial sum of each block of columns
is scaled by the token's block scale and by the weight's, and accumulated in float32. Weights have
one scale per 128 x 128 block, which cuBLAS supports on Hopper, or one per row, which is applied to
the final sums.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops import float8
from penstock.ops.float8 import RoundedTokens
from penstock.ops.product import Product
from penstock.ops.tiles import STEP, TILE_ROWS, TiledRows
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.triton.matmul_product import load_activations
from penstock.ops.triton.matmul_small_gemm import multiply_small_gemm, small_gemm_rule
from penstock.ops.tuning import Tile
from penstock.ops.weight import Part, Weight

LARGEST, LEAST = tl.constexpr(float8.LARGEST), tl.constexpr(float8.LEAST)
TOKEN_MULTIPLE = 4  # scales, and so tokens, are padded to this: the library reads 16 bytes
TILE: Tile = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 3}
PLAIN_TOKENS = 256  # above, the library multiplies unquantized rows
COLUMN_TILES = 8  # tiles of N computed for adjacent tokens before the next ones


def multiply_parts(parts: tuple[Part, ...], product: Product) -> Tensor:
    has_plain = any(isinstance(part, Tensor) for part in parts)
    codes, scales, x = quantize_tokens(
        product.x, product.norm_weight, product.eps, product.is_swiglu, keeps_values=has_plain
    )
    tokens = RoundedTokens(codes, scales, product.num_tokens, product.out_dtype)
    return multiply_rounded(tokens, parts, product.bias, product.residual, x)


def multiply_rounded(
    tokens: RoundedTokens,  # [T, K]
    parts: tuple[Part, ...],  # [N, K]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N]
    x: Tensor | None = None,  # [T, K]  the tokens as they were, for unquantized rows
) -> Tensor:  # [T, N]
    codes, num_tokens = tokens.codes, tokens.num_tokens
    ends = list(accumulate(part.shape[0] for part in parts))
    out = torch.empty(len(codes), ends[-1], dtype=tokens.dtype, device=codes.device)
    slices = [slice(end - part.shape[0], end) for part, end in zip(parts, ends)]
    # Unquantized rows first: they start early, which nothing does behind the library's kernel.
    for part, own in sorted(zip(parts, slices), key=lambda one: isinstance(one[0], TiledRows)):
        own_bias = None if bias is None else bias[own]
        own_residual = None if residual is None else residual[:, own]
        if isinstance(part, Tensor):
            assert x is not None
            plain = Product(x, part, tokens.dtype, bias=own_bias, residual=own_residual)
            _multiply_plain(plain, out[:num_tokens, own])
        else:
            assert isinstance(part, TiledRows)
            multiply(codes, tokens.scales, part, out[:, own], own_bias, own_residual)
    return out[:num_tokens]


def _multiply_plain(product: Product, out: Tensor) -> None:
    """A few unquantized rows next to many quantized ones."""
    if product.num_tokens <= PLAIN_TOKENS:
        rule = small_gemm_rule(product.shape, product.num_tokens, out.device)
        multiply_small_gemm(product, rule, out)
        return
    if product.bias is None and product.residual is None:
        torch.mm(product.x, product.weight.t(), out=out)
        return
    found = F.linear(product.x, product.weight, product.bias)
    out.copy_(found if product.residual is None else found + product.residual)


def multiply(
    codes: Tensor,  # [T rounded up, K]
    scales: Tensor,  # [K / 128, T rounded up]
    rows: TiledRows,  # [N, K]
    out: Tensor,  # [T rounded up, N], may be a slice of a larger tensor
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N]
) -> None:
    """Results for the padding tokens are meaningless."""
    if not float8.can_use_library(rows, out.dtype, out.device) or out.stride(0) % 8:
        multiply_by_kernel(codes, scales, rows, out, bias, residual)
        return
    assert rows.block_scales is not None
    torch._scaled_mm(
        codes,
        codes_of(rows)[: rows.num_rows].t(),
        scale_a=scales.t(),
        scale_b=rows.block_scales.t(),
        out_dtype=out.dtype,
        out=out,
    )
    if bias is not None:
        out += bias
    if residual is not None:
        out[: len(residual)] += residual


def codes_of(rows: TiledRows) -> Tensor:  # [..., N rounded up, K] float8_e4m3fn
    return rows.codes.flatten(-3, -2).view(torch.float8_e4m3fn)


def scales_of(rows: TiledRows) -> Tensor:
    """Of blocks [..., N / 128, K / 128], or of rows [..., tiles, steps, 16], the same in each
    step.
    """
    if rows.block_scales is not None:
        return rows.block_scales
    return rows.records.view(rows.fields.scale).squeeze(-1)


def quantize_tokens(
    x: Tensor,  # [T, K], or [T, 2K] (gate, then up) with is_swiglu
    norm_weight: Tensor | None = None,  # [K] float32
    eps: float = 0.0,
    is_swiglu: bool = False,
    *,
    for_tiles: bool = False,  # columns in the order of tiles
    keeps_values: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """codes [T rounded up, K], scales [K / 128, T rounded up] float32, and the unquantized values,
    if `keeps_values`.
    """
    num_tokens, width = x.shape[0], x.shape[1] // (2 if is_swiglu else 1)
    codes, scales = new_codes(num_tokens, width, x.device)
    values = x.new_empty(num_tokens, width) if keeps_values else None
    blocks = next_power_of_2(width // STEP)
    _quantize_kernel[(num_tokens,)](
        x,
        x if norm_weight is None else norm_weight,
        codes,
        scales,
        x if values is None else values,
        len(codes),
        x.stride(0),
        eps,
        NUM_BLOCKS=width // STEP,
        HAS_NORM=norm_weight is not None,
        IS_SWIGLU=is_swiglu,
        KEEPS_VALUES=keeps_values,
        FOR_TILES=for_tiles,
        BLOCKS=blocks,
        STEP=STEP,
        num_warps=max(1, min(blocks // 4, 16)),
        **launch_options(x.device),
    )
    return codes, scales, values


def rounded_for(reader: Weight | None, out: Tensor) -> RoundedTokens | None:
    """What the only reader of `out` [T, K] takes instead of it; None: it takes that."""
    if not float8.takes_rounded(reader, out):
        return None
    num_tokens, width = out.shape
    return RoundedTokens(*new_codes(num_tokens, width, out.device), num_tokens, out.dtype)


def new_codes(num_tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for codes [T rounded up, K], and for scales [K / 128, T rounded up]."""
    num_rows = cdiv(num_tokens, TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    codes = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(width // STEP, num_rows, device=device)


@triton.jit
def to_codes(values):
    """[M, K] float32 -> E4M3 codes, and the scale of each row [M]"""
    scale, inverse = _scale_of(tl.max(tl.abs(values), axis=1))
    return (values * inverse[:, None]).to(tl.float8e4nv), scale


@triton.jit
def _scale_of(largest):
    """What a code of 1 means, and its inverse: one division per block instead of one per value."""
    most = tl.maximum(largest, LEAST)
    largest_code = tl.full(most.shape, LARGEST, tl.float32)
    return tl.div_rn(most, largest_code), tl.div_rn(largest_code, most)


@triton.jit
def store_codes(values, p_codes, mask, p_scales, scale_stride, is_row):
    """Stores [M, K] float32 as E4M3, in place: without a layout in which blocks of columns are an
    axis of their own. p_scales [M] points to the scales of the first block of columns.
    """
    WIDTH: tl.constexpr = values.shape[1]
    blocks = tl.arange(0, WIDTH)[None, :] // 128
    factors = tl.zeros_like(values)
    for i in tl.static_range(WIDTH // 128):
        scale, inverse = _scale_of(tl.max(tl.where(blocks == i, tl.abs(values), 0.0), axis=1))
        tl.store(p_scales + i * scale_stride, scale, mask=is_row)
        factors = tl.where(blocks == i, inverse[:, None], factors)
    tl.store(p_codes, (values * factors).to(tl.float8e4nv), mask=mask)


@triton.jit
def column_in_tile(places):
    """The column, of 128, at a position in a tile's row (`tiles.py`: `_order`)."""
    instructions = places // 64 * 4 + places % 16 // 4
    quarters = places % 64 // 16
    return instructions // 2 * 32 + quarters * 8 + instructions % 2 * 4 + (places % 4 * 3 + 2) % 5


@triton.jit
def in_tile_order(values):
    """[M, 128] -> the same, with the columns of each row in a tile's order (`column_in_tile`)."""
    M: tl.constexpr = values.shape[0]
    # In bits, the highest first, column a b cd e f g is at position a cd b e g (not f).
    bits = tl.reshape(values, [M, 2, 2, 4, 2, 2, 2])
    low, high = tl.split(tl.permute(bits, [0, 1, 3, 2, 4, 6, 5]))
    return tl.reshape(tl.join(high, low), [M, 128])


@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_kernel(
    x,
    norm_weight,
    codes,
    scales,
    values,
    scale_stride,
    x_stride,
    eps,
    NUM_BLOCKS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    KEEPS_VALUES: tl.constexpr,
    FOR_TILES: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program t: token t."""
    let_next_start(PDL)
    WIDTH: tl.constexpr = NUM_BLOCKS * STEP
    token = tl.program_id(0).to(tl.int64)
    blocks, lanes = tl.arange(0, BLOCKS), tl.arange(0, STEP)
    columns = blocks[:, None] * STEP + lanes[None, :]
    is_column = columns < WIDTH
    if HAS_NORM:
        b_weight = tl.load(norm_weight + columns, mask=is_column, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    p_x = x + token * x_stride + columns
    b_x = load_activations(p_x, is_column, WIDTH, IS_SWIGLU, BLOCKS == NUM_BLOCKS)
    if HAS_NORM:
        mean_square = tl.sum(tl.sum(b_x * b_x, axis=1), axis=0) / WIDTH
        b_x = b_x * tl.rsqrt(mean_square + eps) * b_weight
    b_rounded = b_x.to(x.dtype.element_ty)  # rounded as a separate kernel would
    if KEEPS_VALUES:
        tl.store(values + token * WIDTH + columns, b_rounded, mask=is_column)
    if FOR_TILES:  # after loads and before stores, which are of adjacent columns
        b_rounded = in_tile_order(b_rounded)
    b_codes, b_scales = to_codes(b_rounded.to(tl.float32))
    tl.store(codes + token * WIDTH + columns, b_codes, mask=is_column)
    tl.store(scales + blocks * scale_stride + token, b_scales, mask=blocks < NUM_BLOCKS)


def multiply_by_kernel(
    codes: Tensor,  # [T, K]
    scales: Tensor,  # [K / 128, T]
    rows: TiledRows,  # [N, K]
    out: Tensor,  # [T, N]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N]
    tile: Tile = TILE,
) -> None:
    width, num_tokens = codes.shape[1], len(codes) if residual is None else len(residual)
    grid = (cdiv(num_tokens, tile["BLOCK_M"]) * cdiv(rows.num_rows, tile["BLOCK_N"]),)
    _multiply_kernel[grid](
        codes,
        scales,
        codes_of(rows),
        scales_of(rows),
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        num_tokens,
        len(codes),
        out.stride(0),
        out.stride(0) if residual is None else residual.stride(0),
        N=rows.num_rows,
        K=width,
        STEP=STEP,
        TILE_ROWS=TILE_ROWS,
        BY_BLOCK=rows.block_scales is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        COLUMN_TILES=COLUMN_TILES,
        **tile,
        **launch_options(codes.device),
    )


@triton.jit
def multiply_steps(
    p_codes,  # [M, 1]  of tokens
    p_scales,  # [M]  of tokens, in the first block of columns
    scale_stride,
    is_token,  # [M]
    p_row_codes,  # [1, N]
    p_block,  # scalar: the rows' scale in the first block of columns
    p_odd_block,  # the same for odd rows
    K: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    ARE_PAIRED: tl.constexpr,  # odd rows have their own block
    ARE_TILED: tl.constexpr,  # rows are tiled, and tokens have the same column order
    STEP: tl.constexpr,  # columns per scale
):
    """[M, N] float32: the sum over blocks of columns of tokens times rows, without per-row scales.

    The loop loads one or two scales of the rows: loading one per row would take twice as long.
    """
    columns = tl.arange(0, STEP)
    # 64 columns of a tile's 16 rows, then the other 64.
    row_places = columns // 64 * 1024 + columns % 64 if ARE_TILED else columns
    ROW_STEP: tl.constexpr = 16 * STEP if ARE_TILED else STEP
    is_odd = tl.arange(0, p_row_codes.shape[1]) % 2 == 1
    total = tl.zeros([p_codes.shape[0], p_row_codes.shape[1]], tl.float32)
    for i in range(K // STEP):
        b_rows = tl.load(p_row_codes + i * ROW_STEP + row_places[:, None])
        p_tokens = p_codes + i * STEP + columns[None, :]
        b_tokens = tl.load(p_tokens, mask=is_token[:, None], other=0.0)
        b_scales = tl.load(p_scales + i * scale_stride, mask=is_token, other=0.0)
        product = tl.dot(b_tokens, b_rows)
        if BY_BLOCK and ARE_PAIRED:
            both = tl.where(is_odd, tl.load(p_odd_block + i), tl.load(p_block + i))
            total += product * (b_scales[:, None] * both[None, :])
        elif BY_BLOCK:
            total += product * (b_scales * tl.load(p_block + i))[:, None]
        else:
            total += product * b_scales[:, None]
    return total


@triton.jit
def load_row_scales(p_rows, rows, K: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr):
    """[N] float32, for rows with one scale each, from the records of their tiles."""
    STEPS: tl.constexpr = K // STEP
    places = rows // TILE_ROWS * (STEPS * TILE_ROWS) + rows % TILE_ROWS
    return tl.load(p_rows + places).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])
def _multiply_kernel(
    codes,
    scales,
    row_codes,
    row_scales,
    bias,
    residual,
    out,
    num_tokens,
    scale_stride,
    out_stride,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adjacent programs share rows or tokens: COLUMN_TILES tiles of rows for every tile of tokens,
    then the next ones.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    tl.static_assert(not BY_BLOCK or STEP % BLOCK_N == 0, "a tile of rows is in one block")
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_high = tl.cdiv(num_tokens, BLOCK_M)
    i_group = tl.program_id(0) // (COLUMN_TILES * num_high)
    width = tl.minimum(TILES - i_group * COLUMN_TILES, COLUMN_TILES)
    inside = tl.program_id(0) % (COLUMN_TILES * num_high)
    tokens = (inside // width * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    first_row = (i_group * COLUMN_TILES + inside % width) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    is_token, is_row = tokens < num_tokens, rows < N
    own = tl.minimum(rows, N - 1)
    p_block = row_scales + first_row // STEP * (K // STEP)
    total = multiply_steps(
        codes + tokens[:, None] * K,
        scales + tokens,
        scale_stride,
        is_token,
        row_codes + own.to(tl.int64)[None, :] * K,
        p_block,
        p_block,
        K,
        BY_BLOCK,
        False,
        False,
        STEP,
    )
    if not BY_BLOCK:
        total *= load_row_scales(row_scales, own, K, STEP, TILE_ROWS)[None, :]
    is_inside = is_token[:, None] & is_row[None, :]
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        p_residual = residual + tokens[:, None] * residual_stride + rows[None, :]
        total += tl.load(p_residual, mask=is_inside, other=0.0).to(tl.float32)
    p_out = out + tokens[:, None] * out_stride + rows[None, :]
    tl.store(p_out, total.to(out.dtype.element_ty), mask=is_inside)
