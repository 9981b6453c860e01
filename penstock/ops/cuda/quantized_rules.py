"""Tiles of the kernels in `quantized.cu`: a rule for every shape, and what `penstock tune` tries.

A tile says how many row tiles a warp computes (ROW_TILES), how many warps a block has (WARPS), how
many of these have rows of their own while the others split K (ROW_WARPS), how many steps a warp
loads ahead (HELD), and how many blocks an SM must have registers for (BLOCKS). Launches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from penstock.ops.cuda.program import SHARED
from penstock.ops.product import Tile
from penstock.ops.tiles import STEP, TILE_ROWS, TiledRows
from penstock.ops.tuning import bucket

LINEAR, GATE_UP, DOWN_PAIRS, DOWN_TOKEN, EXPAND = range(5)  # MODE
KERNELS = {  # names of their tiles
    LINEAR: "quantized_linear",
    GATE_UP: "quantized_gate_up",
    DOWN_PAIRS: "quantized_down_pairs",
    DOWN_TOKEN: "quantized_down_token",
}
TOKENS = 8  # per mma instruction
PAIR_TOKENS = 4  # up to this many tokens, experts are read for each token separately
MAX_STAGED = 2  # tokens that every block norms itself: for more, a separate launch is faster
STAGED_BYTES = 36 * 1024  # for these tokens, besides a block's sums
# Per staged token, besides its columns and its sums by group: padding, so that tokens start in
# different banks, and sums of squares.
STAGED_MORE = 2 * 32 + 4 * 16
MAX_WARPS = 16
MAX_SHARE = 12  # row tiles per SM; with more, blocks run in waves
REGISTERS, MAX_RESIDENT = 65536, 64  # registers and warps of an SM
BUSY_BYTES = 96 * 1024  # loads in flight that keep the memory of an SM busy
MOST_TRIED = 32  # tiles of one shape


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def token_tiles_of(num_tokens: int) -> int:
    """The number of token tiles that a kernel is compiled for: a power of two."""
    return bucket(cdiv(num_tokens, TOKENS))


def tile_shape(rows: TiledRows, slots: int = 0) -> tuple[int, ...]:
    """What a measured tile depends on, besides the number of tokens; `slots` for experts."""
    kind = (rows.bits, rows.group, int(rows.is_float8), rows.records.shape[-1])
    return slots, rows.num_rows, rows.num_columns, *kind


def linear_rule(
    rows: TiledRows, token_tiles: int, num_processors: int, staged_bytes: int = 0
) -> Tile:
    """With few rows, many warps split K. With many, blocks are small, so that blocks of the next
    kernel can start as they end. With several token tiles, a warp computes two row tiles, so that
    it reads tokens once for both, and holds one step of each.
    """
    steps, tiles = cdiv(rows.num_columns, STEP), cdiv(rows.num_rows, TILE_ROWS)
    is_wide = tiles >= 4 * num_processors
    has_bytes = rows.bits == 8  # a step is twice the bytes, so fewer are in flight
    if rows.group < STEP:
        return _small_group_rule(rows, steps, tiles, token_tiles, num_processors)
    if is_wide and token_tiles == 1:
        return _wide_rule(rows, steps, cdiv(tiles, num_processors), staged_bytes > 0)
    if is_wide and token_tiles <= 4:
        return new_tile(2, min(4, steps), 1, 1, 3)
    if is_wide and has_bytes:
        return new_tile(2, min(4, 2 * steps), 2, 1, 1)
    if is_wide:
        return new_tile(1, min(4, steps), 1, 1, 2)
    if token_tiles > 1:
        held = 1 if token_tiles > 4 else 4 if has_bytes else 2
        return new_tile(1, min(8, steps), 1, held, 1)
    if tiles <= num_processors:
        return new_tile(1, min(16, steps), 1, 1 if has_bytes else 2, 1)
    if has_bytes:
        return new_tile(1, min(8, steps), 1, 1, 2)
    half = new_tile(2, min(16, steps), 1, 2, 1)
    if tiles <= 2 * num_processors and shared_bytes(half, token_tiles) <= SHARED - staged_bytes:
        return half
    return new_tile(1, min(16, steps), 1, 1, 2)


def _wide_rule(rows: TiledRows, steps: int, share: int, is_staged: bool) -> Tile:
    """For up to 8 tokens and many rows, `share` row tiles per SM. Chooses blocks per SM and warps
    with different rows so that all blocks run in one wave and few warps are idle.
    """
    has_bytes = rows.bits == 8
    if share > MAX_SHARE:
        return new_tile(1, min(4, steps), 1, 1 if rows.is_float8 else 2, 6)
    blocks = cdiv(share, 2)
    if not has_bytes and steps % 8 == 0 and blocks <= 3:
        return new_tile(2, 8, 1, 1, 3)
    if not has_bytes and not is_staged:  # two row tiles use the same token sums
        return new_tile(2, min(4, steps), 1, 2 if blocks <= 3 else 1, blocks)
    blocks = min((3, 2, 4, 5), key=lambda count: cdiv(share, count) * count)
    row_warps = cdiv(share, blocks)
    split = min(4 if row_warps * blocks <= 6 else 2, steps)
    return new_tile(1, row_warps * split, row_warps, 1 if has_bytes else 8 // split, blocks)


def _small_group_rule(
    rows: TiledRows, steps: int, tiles: int, token_tiles: int, num_processors: int
) -> Tile:
    """Several scales per step need registers, so a warp computes one row tile, and holds few steps
    where many warps share an SM. With many tokens and rows it computes two, and the warps of a
    block have different rows.
    """
    is_wide, has_bytes = tiles >= 4 * num_processors, rows.bits == 8
    share = cdiv(tiles, num_processors)
    if is_wide and token_tiles >= 4:
        return new_tile(2, min(4, 2 * steps), 2, 1, 1)
    if is_wide and token_tiles > 1:
        return new_tile(1, 4, 1, 4, 3)
    if is_wide and has_bytes and share <= 6:
        return new_tile(1, 2 * min(4, steps), 2, 1, 3)
    if is_wide and has_bytes:
        return new_tile(1, min(4, steps), 1, *((4, 4) if share > MAX_SHARE else (1, 6)))
    if is_wide:
        return (
            new_tile(1, min(8, steps), 1, 2, 3)
            if share <= 5
            else new_tile(1, min(4, steps), 1, 2, 6)
        )
    if token_tiles == 1 and tiles <= num_processors:
        return new_tile(1, min(8, steps), 1, 4, 1)
    if token_tiles == 1:
        return new_tile(1, min(16, steps), 1, 1, 2)
    return new_tile(1, min(8, steps), 1, 4, 2 if token_tiles == 2 else 1)


def num_staged(num_tokens: int) -> int:
    """The number of tokens that a kernel is compiled for: a power of two."""
    return bucket(num_tokens)


def has_room_for_norm(num_tokens: int, num_columns: int) -> bool:
    """Whether every block may norm the tokens itself."""
    return num_tokens <= MAX_STAGED and 2 * num_columns * num_staged(num_tokens) <= STAGED_BYTES


def staged_bytes(num_tokens: int, num_columns: int, group: int) -> int:
    """Shared memory of the tokens that a block norms itself."""
    columns = cdiv(num_columns, STEP) * STEP
    return num_staged(num_tokens) * (2 * columns + 4 * columns // min(group, STEP) + STAGED_MORE)


def shared_bytes(tile: Tile, token_tiles: int) -> int:
    """Shared memory of a LINEAR block, for the sums of its warps."""
    rows = TILE_ROWS * tile["ROW_TILES"] * tile["ROW_WARPS"]
    return 4 * tile["WARPS"] // tile["ROW_WARPS"] * TOKENS * token_tiles * (rows + 1)


def expert_rule(mode: int, rows: TiledRows, slots: int, num_tokens: int) -> Tile:
    """One warp per expert of a token, or several that split an expert's K. For one token, all down
    projections are loaded at once. For more, blocks are small and run in waves; those of the down
    projection are the smallest, because its K is small and one warp needs no split.
    """
    steps, has_bytes = cdiv(rows.num_columns, STEP), rows.bits == 8
    has_small_groups = rows.group < STEP  # several scales per step need registers
    if mode == DOWN_TOKEN:
        return new_tile(1, slots, 1, 4, 1) if num_tokens == 1 else new_tile(1, slots, 1, 2, 2)
    if mode == DOWN_PAIRS and has_small_groups:
        return (
            new_tile(2, min(2, steps), 1, 1, 8)
            if has_bytes
            else new_tile(4, min(4, steps), 1, 1, 4)
        )
    if mode == DOWN_PAIRS:
        warps = min(4, max(1, steps // 4))
        return new_tile(4, warps, 1, 1, 16 // warps)
    if num_tokens > PAIR_TOKENS and has_small_groups:
        return (
            new_tile(2, min(4, steps), 1, 1, 6)
            if has_bytes
            else new_tile(4, min(4, steps), 1, 1, 3)
        )
    if num_tokens > PAIR_TOKENS:
        return new_tile(4, min(4, steps), 1, 1, 4)
    if has_bytes:
        return new_tile(2, min(8, steps), 1, 1, 3)
    if num_tokens == 1 and not has_small_groups:
        return new_tile(2, min(16, steps), 1, 1, 2)
    return new_tile(2, min(8, steps), 1, 2, 2)


def new_tile(row_tiles: int, warps: int, row_warps: int, held: int, blocks: int) -> Tile:
    return {
        "ROW_TILES": row_tiles,
        "WARPS": warps,
        "ROW_WARPS": row_warps,
        "HELD": held,
        "BLOCKS": blocks,
    }


def fits(tile: Tile, num_tokens: int, staged: int) -> bool:
    """Whether sums and staged tokens fit in a block's shared memory."""
    return shared_bytes(tile, token_tiles_of(num_tokens)) + staged <= SHARED


def candidates(
    kernel: str, shape: tuple[int, ...], num_tokens: int, num_processors: int
) -> list[Tile]:
    """The tiles that `penstock tune` measures for a `tile_shape`: those with most bytes in flight
    and fewest idle SMs.
    """
    slots, num_rows, num_columns, bits, group, _, record_bytes = shape
    steps, step_bytes = cdiv(num_columns, STEP), bits // 4 * 1024 + TILE_ROWS * record_bytes
    (mode,) = (mode for mode, name in KERNELS.items() if name == kernel)
    token_tiles = token_tiles_of(num_tokens) if mode == LINEAR else 1
    is_staged = mode == LINEAR and has_room_for_norm(num_tokens, num_columns)
    staged = staged_bytes(num_tokens, num_columns, group) if is_staged else 0
    found: dict[tuple[int, ...], float] = {}
    for sizes in _sizes(mode, slots, steps):
        row_tiles, num_warps, row_warps, held = sizes
        registers = 60 + row_tiles * (held * (2 * bits + 4) + 8 * token_tiles)
        most = min(REGISTERS // (32 * num_warps * registers), MAX_RESIDENT // num_warps)
        num_blocks = cdiv(num_rows, TILE_ROWS * row_tiles * row_warps) * max(1, slots)
        share = num_blocks / num_processors
        for blocks in {min(most, cdiv(num_blocks, num_processors)), most, most - 1}:
            tile = new_tile(*sizes, blocks)
            if blocks < 1 or not fits(tile, num_tokens, staged):
                continue
            bytes_held = blocks * num_warps * held * row_tiles * step_bytes
            busy = share / (blocks * cdiv(num_blocks, blocks * num_processors))
            found[tuple(tile.values())] = min(1.0, bytes_held / BUSY_BYTES) * min(1.0, busy)
    best = sorted(found, key=lambda sizes: -found[sizes])
    return [new_tile(*sizes) for sizes in best[:MOST_TRIED]]


def _sizes(mode: int, slots: int, steps: int) -> Iterator[tuple[int, int, int, int]]:
    """Row tiles, warps, warps with different rows, and steps held."""
    if mode == DOWN_TOKEN:
        choices = product((1, 2), (slots,), (1,), (1, 2, 4))
    elif mode == LINEAR:
        choices = product((1, 2), (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 3, 4, 6), (1, 2, 4))
    else:
        choices = product((2, 4) if mode == GATE_UP else (1, 2, 4), (1, 2, 4, 8, 16), (1,), (1, 2))
    for row_tiles, num_warps, row_warps, held in choices:
        splits, rest = divmod(num_warps, row_warps)
        splits = 1 if mode == DOWN_TOKEN else splits
        if not rest and 0 < splits <= steps and held <= cdiv(steps, splits):
            yield row_tiles, num_warps, row_warps, held
