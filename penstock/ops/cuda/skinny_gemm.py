"""GEMMs of up to 8 tokens with a dense weight, which goes from memory to tensor cores unchanged.

`skinny_gemm.cu` explains the kernel. This file decides which GEMMs it supports, chooses tiles and
launches it.
"""

from __future__ import annotations

import itertools
from ctypes import c_float, c_int
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cuda.program import address, current_stream, is_available, program
from penstock.ops.product import Product, Tile

MAX_TOKENS = 8
STEP_COLUMNS = 32  # per step of a warp
TILE_ROWS = 16  # per mma instruction
MOST_HELD = 16  # steps of one row tile: 128 registers per thread
WIDE_ROWS = 1 << 16
MAX_NORMED = 1 << 13  # columns of a norm that fit in default shared memory besides the sums
REGISTERS = 65536  # per SM
DTYPES = (torch.bfloat16, torch.float16)
SOURCE = Path(__file__).with_name("skinny_gemm.cu")


def can_multiply(product: Product) -> bool:
    """Rows must be aligned for 16-byte loads, and K a multiple of the step."""
    x, weight = product.x, product.weight
    return (
        product.num_tokens <= MAX_TOKENS
        and weight.dtype in DTYPES
        and x.dtype == weight.dtype
        and not product.is_swiglu
        and (product.norm_weight is None or weight.shape[1] <= MAX_NORMED)
        and weight.shape[1] % STEP_COLUMNS == 0
        and x.data_ptr() % 16 == 0
        and x.stride(0) % 8 == 0
        and is_available(x.device)
    )


def multiply_skinny(product: Product, tile: Tile) -> Tensor:
    """`tile` has row_tiles, num_warps, held and blocks."""
    N, K = product.shape
    out = product.new_out()  # [T, N]
    x_stride, residual_stride = product.row_strides
    constants = {
        "K": K,
        "WARPS": tile["num_warps"],
        "ROW_TILES": tile["row_tiles"],
        "HELD": tile["held"],
        "BLOCKS": tile["blocks"],
        "HAS_NORM": int(product.norm_weight is not None),
        "HAS_BIAS": int(product.bias is not None),
        "HAS_RESIDUAL": int(product.residual is not None),
        "IS_BFLOAT": int(product.weight.dtype == torch.bfloat16),
        "IS_OUT_FLOAT": int(out.dtype == torch.float32),
    }
    device = product.x.device
    program(SOURCE, "skinny_gemm", tuple(constants.items()), device).launch(
        -(-N // (TILE_ROWS * tile["row_tiles"])),
        32 * tile["num_warps"],
        current_stream(device),
        address(product.x),
        address(product.norm_weight),
        address(product.weight),
        address(product.bias),
        address(product.residual),
        address(out),
        c_int(product.num_tokens),
        c_int(N),
        c_int(x_stride),
        c_int(residual_stride),
        c_float(product.eps),
    )
    return out


def skinny_rule(shape: tuple[int, int], num_processors: int) -> Tile | None:
    """For few rows, one block per SM whose many warps load everything at once; for more, two. For
    those of a head, several small blocks, with more rows per byte of the tokens. None if the warps
    cannot split K evenly.
    """
    row_tiles, num_warps, held, blocks = 1, 8, 8, 2
    if shape[0] <= num_processors * TILE_ROWS:
        held, blocks = 16, 1
    elif shape[0] > WIDE_ROWS:
        row_tiles, num_warps, held, blocks = 2, 4, 4, 3
    if shape[1] % (num_warps * STEP_COLUMNS):
        return None
    return {"row_tiles": row_tiles, "num_warps": num_warps, "held": held, "blocks": blocks}


def skinny_candidates(shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """Tiles whose warps split K evenly and whose held steps and blocks fit in registers."""
    if num_tokens > MAX_TOKENS:
        return []
    tiles: list[Tile] = []
    for row_tiles, num_warps, held in itertools.product((1, 2), (4, 5, 8, 9), (4, 8, 16)):
        steps, rest = divmod(shape[1], num_warps * STEP_COLUMNS)
        if rest or held > max(4, steps) or held * row_tiles > MOST_HELD:
            continue
        most = _most_blocks(row_tiles, num_warps, held)
        for blocks in sorted({most, max(1, most - 1)}):
            tiles.append(
                {"row_tiles": row_tiles, "num_warps": num_warps, "held": held, "blocks": blocks}
            )
    return tiles


def _most_blocks(row_tiles: int, num_warps: int, held: int) -> int:
    """Blocks that fit on an SM, by a generous estimate of registers per thread."""
    needed = 8 * held * row_tiles + 4 * row_tiles + 64
    return max(1, min(8, REGISTERS // (32 * num_warps * min(needed, 255))))
