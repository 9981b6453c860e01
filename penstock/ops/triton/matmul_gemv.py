# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
"""GEMV for very few tokens: every weight is read once, into registers, and multiplied with each
token.

A program owns a few rows of the weight and iterates over blocks of columns. The first `held` blocks
are loaded before the kernel waits for its predecessor, and as many stay in flight. Only the last
sums pass through shared memory: a block is at least as wide as the 16-byte loads of all threads
together, so activations have the same layout as the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.product import Product
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_processors,
    wait_for_previous,
)
from penstock.ops.triton.matmul_product import (
    columns_of,
    load_activations,
    load_inside,
)
from penstock.ops.tuning import Tile, bucket

MAX_TOKENS = 8
WARP_COLUMNS = 256  # of a row per warp load: 32 threads, 16 bytes each, 16-bit type
# Weights in flight per thread, by tokens: two per register, next to the tokens' sums.
HELD_ELEMENTS = {1: 160, 2: 160, 4: 128, 8: 64}


@triton.jit
def _load_block(p_rows, columns, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Loads weights, which a step reads once: they must not evict reused data from L1."""
    if IS_WHOLE:
        return tl.load(p_rows + columns, eviction_policy="evict_first")
    else:
        return tl.load(p_rows + columns, mask=columns < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _stack(parts, COUNT: tl.constexpr):
    """COUNT tensors [..], a power of two -> [.., 2, 2, ..]; in order once the new dims are
    flattened.
    """
    if COUNT == 1:
        return parts[0]
    else:
        pairs = ()
        for i in tl.static_range(COUNT // 2):
            pairs += (tl.join(parts[i], parts[i + COUNT // 2]),)
        return _stack(pairs, COUNT // 2)


@triton.jit(do_not_specialize=["num_tokens"])
def gemv_kernel(
    p_x,
    p_norm,
    p_weight,
    p_bias,
    p_residual,
    p_out,
    num_tokens,
    N,
    x_stride,
    residual_stride,
    eps,
    K: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    STRIDE: tl.constexpr = HELD * BLOCK_K
    IS_WHOLE: tl.constexpr = K % STRIDE == 0
    GROUP: tl.constexpr = (
        128 // p_weight.dtype.element_ty.primitive_bitwidth
    )  # elements of a 16-byte load
    NUM_GROUPS: tl.constexpr = BLOCK_K // GROUP
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    inside = (tokens[:, None] < num_tokens) & (rows[None, :] < N)
    p_rows = p_weight + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K

    weights = ()
    norms = ()
    for i in tl.static_range(HELD):
        columns = i * BLOCK_K + tl.arange(0, BLOCK_K)
        weights += (_load_block(p_rows, columns[None, :], K, IS_WHOLE),)
        if p_norm is not None:
            norms += (load_inside(p_norm + columns, columns < K, IS_WHOLE),)
    b_added = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if p_bias is not None:
        b_added += tl.load(p_bias + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    wait_for_previous(PDL)
    if p_residual is not None:
        p_taken = p_residual + tokens[:, None] * residual_stride + rows[None, :]
        b_added += tl.load(p_taken, mask=inside, other=0.0).to(tl.float32)

    sums = ()
    squares = ()
    for _ in tl.static_range(BLOCK_M):
        sums += (tl.zeros([BLOCK_N, NUM_GROUPS], tl.float32),)
        squares += (tl.zeros([NUM_GROUPS], tl.float32),)
    for start in tl.range(0, K, STRIDE):
        next_weights = ()
        next_norms = ()
        for i in tl.static_range(HELD):
            columns = start + i * BLOCK_K + tl.arange(0, BLOCK_K)
            b_weight = weights[i].to(tl.float32)
            new_sums = ()
            new_squares = ()
            for t in tl.static_range(BLOCK_M):
                p_token = p_x + tl.minimum(t, num_tokens - 1) * x_stride + columns
                b_x = load_activations(p_token, columns < K, K, IS_SWIGLU, IS_WHOLE)
                if p_norm is not None:
                    b_squares = tl.reshape(b_x * b_x, [NUM_GROUPS, GROUP])
                    new_squares += (squares[t] + tl.sum(b_squares, axis=1),)
                    b_x = b_x * norms[i]
                b_products = tl.reshape(b_weight * b_x[None, :], [BLOCK_N, NUM_GROUPS, GROUP])
                new_sums += (sums[t] + tl.sum(b_products, axis=2),)
            sums = new_sums
            if p_norm is not None:
                squares = new_squares
            if STRIDE < K:
                columns += STRIDE
                next_weights += (_load_block(p_rows, columns[None, :], K, False),)
                if p_norm is not None:
                    next_norms += (load_inside(p_norm + columns, columns < K, False),)
        if STRIDE < K:
            weights = next_weights
            if p_norm is not None:
                norms = next_norms

    # All tokens at once: a sum across the program's threads needs a barrier.
    b_out = tl.trans(
        tl.sum(tl.reshape(_stack(sums, BLOCK_M), [BLOCK_N, NUM_GROUPS, BLOCK_M]), axis=1)
    )
    if p_norm is not None:
        b_squares = tl.sum(tl.reshape(_stack(squares, BLOCK_M), [NUM_GROUPS, BLOCK_M]), axis=0)
        b_out = b_out * tl.rsqrt(b_squares / K + eps)[:, None]
    p_stored = p_out + tokens[:, None] * N + rows[None, :]
    tl.store(p_stored, (b_out + b_added).to(p_out.dtype.element_ty), mask=inside)


def multiply_gemv(product: Product, tile: Tile) -> Tensor:
    """tile: block_n, block_k, held, num_warps."""
    N, K = product.shape
    out = product.new_out()  # [T, N]
    x_stride, residual_stride = product.row_strides
    block_k = columns_of(tile["block_k"], product.weight.dtype)
    gemv_kernel[(cdiv(N, tile["block_n"]),)](
        product.x,
        product.norm_weight,
        product.weight,
        product.bias,
        product.residual,
        out,
        product.num_tokens,
        N,
        x_stride,
        residual_stride,
        product.eps,
        K=K,
        IS_SWIGLU=product.is_swiglu,
        BLOCK_M=bucket(product.num_tokens),
        BLOCK_N=tile["block_n"],
        BLOCK_K=block_k,
        HELD=min(tile["held"], cdiv(K, block_k)),
        num_warps=tile["num_warps"],
        **launch_options(product.x.device),
    )
    return out


def gemv_rule(shape: tuple[int, ...], num_tokens: int, device: torch.device) -> Tile:
    """Many rows per program reuse activations; fewer if all of the weight can be held, or to fill
    the device with at least three programs per SM.
    """
    N, K = shape
    tiles = [_tile(block_n, _block_width(K), K, num_tokens) for block_n in (8, 4, 2, 1)]
    if num_tokens > 1 or (_holds_all(tiles[1], K) and not _holds_all(tiles[0], K)):
        del tiles[0]
    return next(
        (t for t in tiles if cdiv(N, t["block_n"]) >= 3 * num_processors(device)), tiles[-1]
    )


def _holds_all(tile: Tile, K: int) -> bool:
    return tile["held"] * tile["block_k"] >= K


def gemv_candidates(shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    if num_tokens > MAX_TOKENS:
        return []
    K = shape[1]
    widths = {_block_width(K), 512, 1024, 2048}
    tiles = [
        _tile(block_n, width, K, num_tokens)
        for block_n in (2, 4, 8, 16)
        for width in sorted(widths)
    ]
    return [tile for tile in tiles if tile["block_n"] * num_tokens <= 32]


def _block_width(K: int) -> int:
    """A width that divides K, if there is one that is neither narrow nor leaves too many blocks."""
    if K % 1024 == 0 or K > 4096:
        return 1024
    return 512 if K % 512 == 0 else min(1024, max(64, next_power_of_2(K)))


def _tile(block_n: int, block_k: int, K: int, num_tokens: int) -> Tile:
    num_warps = min(4, max(1, block_k // WARP_COLUMNS))
    num_blocks = cdiv(K, block_k)
    elements = block_n * block_k // (32 * num_warps)  # of a block, per thread
    most = min(max(1, HELD_ELEMENTS[bucket(num_tokens)] // elements), num_blocks)
    held = min(
        range(most, most // 2, -1), key=lambda held: -num_blocks % held
    )  # few empty blocks at the end
    return {"block_n": block_n, "block_k": block_k, "held": held, "num_warps": num_warps}
