"""Chooses tiles for `quantized_wide.cu`: GEMMs of 17 to 64 tokens with tiled rows, on Hopper.
Launches nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.product import Tile
from penstock.ops.tiles import STEP, TILE_ROWS, TiledRows

CAPABILITY = (9, 0)  # the only one with wgmma
KERNEL = "quantized_wide"  # the name of its tile
MIN_TOKENS, MAX_TOKENS = 17, 64
TOKENS = 8  # per token tile
GROUP_ROWS = 64  # per warp group
GROUP_WARPS = 4
LEAST_GROUP = 32  # columns with a scale of their own
MAX_DEPTH = 16
STATIC_BYTES = 1024  # of shared memory, for barriers
# Blocks of a cluster are on SMs that are near each other: of 132 SMs not all find three others.
NEAR = 8


def can_multiply(rows: TiledRows, num_tokens: int) -> bool:
    """Whether codes can be unpacked without sums of tokens, a group at a time."""
    fields = rows.fields
    is_centred = rows.bits == 4 and (fields.offset is None or _are_small_zeros(rows))
    is_signed = rows.bits == 8 and fields.offset is None
    is_few = MIN_TOKENS <= num_tokens <= MAX_TOKENS
    return is_few and (is_centred or is_signed) and rows.group >= LEAST_GROUP


def _are_small_zeros(rows: TiledRows) -> bool:
    return rows.fields.are_zeros and str(rows.fields.offset) == "torch.uint8"


def token_tiles(num_tokens: int) -> int:
    """The number of token tiles that a kernel is compiled for."""
    return max(4, 2 * -(-num_tokens // (2 * TOKENS)))


def wide_tile(
    rows: TiledRows, num_tokens: int, row_groups: int, column_groups: int, cluster: int,
    shared_bytes: int, depth: int = MAX_DEPTH, sharers: int = 1, is_arranged: int = 0,
) -> Tile | None:  # fmt: skip
    """With as many steps in flight as shared memory holds; None if it holds too few."""
    steps = -(-rows.num_columns // STEP)
    block_steps = -(-steps // cluster)
    if (cluster - 1) * block_steps + column_groups > steps:
        return None
    tile = {
        "TOKEN_TILES": token_tiles(num_tokens),
        "ROW_GROUPS": row_groups,
        "COLUMN_GROUPS": column_groups,
        "CLUSTER": cluster,
        "SHARERS": sharers,
        "IS_ARRANGED": is_arranged,
    }
    warps = GROUP_WARPS * row_groups * column_groups
    left = shared_bytes - STATIC_BYTES - _fixed_bytes(rows, tile)
    depth = min(depth, left // (warps * _slot_bytes(rows)))
    return {**tile, "DEPTH": depth} if depth >= 3 else None


def shared_bytes(rows: TiledRows, tile: Tile) -> int:
    warps = GROUP_WARPS * tile["ROW_GROUPS"] * tile["COLUMN_GROUPS"]
    return _fixed_bytes(rows, tile) + warps * tile["DEPTH"] * _slot_bytes(rows)


def _fixed_bytes(rows: TiledRows, tile: Tile) -> int:
    """Tokens, and what warps receive from other parts."""
    block_steps = -(-(-(-rows.num_columns // STEP)) // tile["CLUSTER"])
    parts = tile["CLUSTER"] * tile["COLUMN_GROUPS"]
    warps = GROUP_WARPS * tile["ROW_GROUPS"] * tile["COLUMN_GROUPS"]
    received = -(-tile["TOKEN_TILES"] // parts) * (parts - 1) * 512
    return block_steps * STEP * tile["TOKEN_TILES"] * TOKENS * 2 + warps * received


def _slot_bytes(rows: TiledRows) -> int:
    are_scales_last = rows.group >= rows.num_columns and rows.fields.offset is None
    records = 0 if are_scales_last else TILE_ROWS * rows.records.shape[-1]
    return rows.bits // 4 * 1024 + records


def num_threads(tile: Tile) -> int:
    return 32 * GROUP_WARPS * (1 - tile["IS_ARRANGED"] + tile["ROW_GROUPS"] * tile["COLUMN_GROUPS"])


def num_blocks(num_rows: int, num_plain: int, tile: Tile, num_processors: int) -> int:
    """All that run at once, or as many as there are rows for."""
    cluster = tile["CLUSTER"] * tile["SHARERS"]
    if cluster > 2:
        num_processors = num_processors // NEAR * NEAR
    row_tiles = -(-num_rows // GROUP_ROWS) + -(-num_plain // GROUP_ROWS)
    return cluster * min(num_processors // cluster, -(-row_tiles // tile["SHARERS"]))


def arrange(x: Tensor, rows: TiledRows, num_tiles: int) -> Tensor:
    """Tokens [T, K] as wgmma reads them: [step, 16 columns, half, token tile, 8 tokens, 8 columns],
    in the order of columns in which a tile has codes.
    """
    steps = -(-x.shape[1] // STEP)
    padding = (0, steps * STEP - x.shape[1], 0, TOKENS * num_tiles - len(x))
    padded = torch.nn.functional.pad(x, padding).view(num_tiles, TOKENS, steps, STEP)
    run, side, half, quarter, odd = torch.meshgrid(
        *(torch.arange(n, device=x.device) for n in (4, 2, 2, 4, 2)), indexing="ij"
    )
    if rows.is_row_major:
        columns = run // 2 * 64 + run % 2 * 8 + 16 * quarter
    else:
        columns = 32 * run + 8 * quarter
    columns = (columns + 4 * side + 2 * half + odd).view(8, 2, 8)
    return padded[..., columns].permute(2, 3, 4, 0, 1, 5).contiguous()
