"""Chooses tiles for `quantized_gemm.cu`, GEMMs of 17 to 64 tokens with tiled rows, and for
`quantized_experts.cu`, experts of prompts. Launches nothing.

A block of a GEMM computes some rows for all tokens, over some of the columns. A cost model
estimates its time from what it multiplies, unpacks and reads from L2; the tile with the fastest
grid is chosen. A block of experts computes some rows for the pairs of one expert.
"""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass
from itertools import product

import torch

from penstock.ops.product import Tile
from penstock.ops.tiles import STEP, TILE_ROWS, TiledRows

TOKENS = 8  # per mma instruction
# It is faster than `quantized.cu`, whose warps all read tokens from L2, from this many tokens and
# this many row tiles per SM; with fewer, `quantized.cu` starts earlier.
MIN_TOKENS, MIN_SHARE = 33, 4
HEAD_TOKENS, HEAD_SHARE = 17, 32
MAX_CLUSTER = 2  # blocks that split K, on GPUs with clusters
CLUSTER_CAPABILITY = (9, 0)
MAX_STAGES = 4
# Accumulators per thread: totals, sums of a group, and sums of tokens. More would spill.
MAX_SUMS, MAX_FLOAT8_SUMS, MAX_OFFSET_SUMS = 96, 128, 84
MANY_COLUMN_WARPS, FEWER_SUMS = 4, 80  # more copies per thread, which need address registers
# ROW_TILES, ROW_WARPS, TOKEN_WARPS, COLUMN_WARPS: eight warps, two per sub-partition of an SM.
SHAPES = (
    *((row_tiles, 4, 2, 1) for row_tiles in (4, 3, 2, 1)),
    *((row_tiles, 2, 2, 2) for row_tiles in (4, 3, 2, 1)),
    *((row_tiles, 1, 2, 4) for row_tiles in (4, 3, 2, 1)),
    *((row_tiles, 8, 1, 1) for row_tiles in (3, 2, 1)),
    *((row_tiles, 4, 1, 2) for row_tiles in (3, 2, 1)),
    *((row_tiles, 2, 1, 4) for row_tiles in (3, 2, 1)),
)
# The cost model, in clock cycles of an SM.
MULTIPLY = 1.6  # one mma instruction
UNPACK = {4: 4.5, 8: 8.0}  # bits of a code: unpacking 16 rows x 16 columns
READ = 1 / 25  # one byte from L2, while all SMs read
LEAST_BUSY = 0.4  # with fewer SMs at work than this share, each reads no faster
START, MEET = 1500, 1000  # a block's first columns; sums of the other blocks of its cluster
KERNEL, FORM = "quantized_gemm", "quantized_form"  # names of its tile, and of whether to use it
MOST_TRIED = 16  # tiles of one shape

EXPERTS = "quantized_experts"
# Pairs of a token and an expert, per expert on average, and the token tiles of a block: most
# experts should need one block for each of their rows, which then reads them once.
PAIR_TILES = ((4, 1), (16, 2), (float("inf"), 4))
PAIR_WARPS = 4  # per block: small blocks wait less for each other
# Accumulators per thread, by bits of a code; with few, three blocks fit an SM, not two.
MAX_PAIR_SUMS, FEW_PAIR_SUMS = {4: 128, 8: 96}, 64


@dataclass(frozen=True, slots=True)
class Card:
    num_processors: int
    shared_bytes: int  # per block
    max_cluster: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The properties of rows that the choice of a tile depends on."""

    num_tiles: int
    num_plain: int
    steps: int
    bits: int
    step_bytes: int  # of a row tile, with its records
    padding: int  # bytes per staged token
    sums: int  # accumulator sets of a thread, without those for sums of tokens
    has_offsets: bool
    max_sums: int

    @staticmethod
    def of(rows: TiledRows, num_plain: int = 0) -> Rows:
        fields = rows.fields
        is_centred = rows.bits == 4 and fields.are_zeros and fields.offset == torch.uint8
        has_offsets = fields.offset is not None and not is_centred
        are_scales_last = rows.group >= rows.num_columns and fields.offset is None
        most = MAX_FLOAT8_SUMS if rows.is_float8 else MAX_SUMS
        return Rows(
            num_tiles=-(-rows.num_rows // TILE_ROWS),
            num_plain=num_plain,
            steps=-(-rows.num_columns // STEP),
            bits=rows.bits,
            step_bytes=rows.bits // 4 * 1024 + TILE_ROWS * rows.records.shape[-1],
            padding=32 if rows.is_narrow else 16 if rows.is_row_major else 64,
            sums=1 if are_scales_last else 2,
            has_offsets=has_offsets,
            max_sums=MAX_OFFSET_SUMS if has_offsets else most,
        )


def is_faster(num_rows: int, num_tokens: int, num_processors: int) -> bool:
    share = num_rows // TILE_ROWS / num_processors
    if share >= HEAD_SHARE:
        return num_tokens >= HEAD_TOKENS
    return num_tokens >= MIN_TOKENS and share >= MIN_SHARE


def gemm_rule(rows: TiledRows, num_tokens: int, card: Card, num_plain: int = 0) -> Tile:
    return dict(_ranked(Rows.of(rows, num_plain), _token_tiles(num_tokens), card)[0])


def gemm_shape(rows: TiledRows, num_tokens: int, num_plain: int) -> tuple[int, ...]:
    """What a measured tile depends on. It has as many token tiles as the tokens need."""
    return _token_tiles(num_tokens), *map(int, astuple(Rows.of(rows, num_plain)))


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int, card: Card) -> list[Tile]:
    """What `penstock tune` tries: both forms, or the tiles that the cost model likes best."""
    if kernel == FORM:
        return [{"is_gemm": 0}, {"is_gemm": 1}] if num_tokens > TOKENS else []
    if kernel == EXPERTS:
        token_tiles, _, *sizes = shape
        found = _experts_tiles(Rows(*sizes), token_tiles, card)  # type: ignore[arg-type]
        return [dict(tile) for tile in found]
    token_tiles, *sizes = shape
    ranked = _ranked(Rows(*sizes), token_tiles, card)  # type: ignore[arg-type]
    return [dict(tile) for tile in ranked[:MOST_TRIED]]


def pair_tiles(pairs_per_expert: float) -> int:
    """1: `quantized.cu` multiplies them."""
    return next(tiles for most, tiles in PAIR_TILES if pairs_per_expert <= most)


def experts_rule(rows: TiledRows, token_tiles: int, card: Card) -> Tile:
    return dict(_experts_tiles(Rows.of(rows), token_tiles, card)[0])


def experts_shape(rows: TiledRows, token_tiles: int, is_down: bool) -> tuple[int, ...]:
    return token_tiles, int(is_down), *map(int, astuple(Rows.of(rows)))


@functools.cache
def _experts_tiles(rows: Rows, token_tiles: int, card: Card) -> list[Tile]:
    """All that fit, the best first: many rows per warp, which then reads tokens from shared memory
    less often, but several blocks per SM.
    """
    found = []
    for row_tiles, stages in product((4, 2, 1), (3, 2)):
        num_sums = _num_sums(rows, row_tiles, token_tiles)
        if num_sums > MAX_PAIR_SUMS[rows.bits] or stages > rows.steps + 1:
            continue
        shape = (row_tiles, PAIR_WARPS, 1, 1)
        for blocks in range(3 if num_sums <= FEW_PAIR_SUMS else 2, 0, -1):
            tile = gemm_tile(*shape, token_tiles=token_tiles, stages=stages, blocks=blocks)
            if blocks * _shared_bytes(rows, tile) <= card.shared_bytes:
                found.append(tile)
    return sorted(found, key=lambda tile: tile["BLOCKS"] == 1)


def _token_tiles(num_tokens: int) -> int:
    return 2 * -(-num_tokens // (2 * TOKENS))


def gemm_tile(
    row_tiles: int, row_warps: int, token_warps: int, column_warps: int, *, token_tiles: int,
    stages: int, cluster: int = 1, warp_steps: int = 1, blocks: int = 1,
) -> Tile:  # fmt: skip
    """`token_tiles`: per block, an even number."""
    return {
        "ROW_TILES": row_tiles,
        "ROW_WARPS": row_warps,
        "TOKEN_TILES": token_tiles // token_warps,
        "TOKEN_WARPS": token_warps,
        "COLUMN_WARPS": column_warps,
        "WARP_STEPS": warp_steps,  # between two barriers
        "STAGES": stages,
        "CLUSTER": cluster,
        "BLOCKS": blocks,
    }


def num_warps(tile: Tile) -> int:
    return tile["ROW_WARPS"] * tile["TOKEN_WARPS"] * tile["COLUMN_WARPS"]


def block_rows(tile: Tile) -> int:
    return TILE_ROWS * tile["ROW_TILES"] * tile["ROW_WARPS"]


def gemm_shared_bytes(rows: TiledRows, tile: Tile) -> int:
    """Shared memory of a block, for its stages and later for its sums."""
    return _shared_bytes(Rows.of(rows), tile)


@functools.cache
def _ranked(rows: Rows, token_tiles: int, card: Card) -> list[Tile]:
    """All tiles that fit, the fastest first."""
    found = [
        tile
        for shape in SHAPES
        for cluster in (1, 2)
        if cluster <= min(card.max_cluster, rows.steps, 4 * shape[0] * shape[1])
        and _has_registers(rows, shape, token_tiles)
        and (tile := _fitting(rows, shape, token_tiles, cluster, card)) is not None
    ]
    return sorted(found, key=lambda tile: _clocks(rows, token_tiles, tile, card))


def _has_registers(rows: Rows, shape: tuple[int, int, int, int], token_tiles: int) -> bool:
    row_tiles, _, token_warps, column_warps = shape
    most = FEWER_SUMS if column_warps >= MANY_COLUMN_WARPS else rows.max_sums
    return _num_sums(rows, row_tiles, token_tiles // token_warps) <= most


def _num_sums(rows: Rows, row_tiles: int, token_tiles: int) -> int:
    """Accumulators of a thread whose warp has so many tiles."""
    return 4 * token_tiles * (row_tiles * rows.sums + rows.has_offsets)


def _fitting(
    rows: Rows, shape: tuple[int, int, int, int], token_tiles: int, cluster: int, card: Card
) -> Tile | None:
    """A tile with as many stages as shared memory holds and the columns fill."""
    rounds = -(-rows.steps // (cluster * shape[3]))
    for stages in range(max(2, min(MAX_STAGES, rounds + 1)), 1, -1):
        tile = gemm_tile(*shape, token_tiles=token_tiles, stages=stages, cluster=cluster)
        if _shared_bytes(rows, tile) <= card.shared_bytes:
            return tile
    return None


def _shared_bytes(rows: Rows, tile: Tile) -> int:
    num_tokens = TOKENS * tile["TOKEN_TILES"] * tile["TOKEN_WARPS"]
    steps = tile["COLUMN_WARPS"] * tile["WARP_STEPS"]
    tokens = num_tokens * (2 * STEP * steps + rows.padding)
    stage = tokens + block_rows(tile) // TILE_ROWS * steps * rows.step_bytes
    sums = 4 * tile["COLUMN_WARPS"] * num_tokens * (block_rows(tile) + 4)
    return max(tile["STAGES"] * stage, sums)


def _clocks(rows: Rows, token_tiles: int, tile: Tile, card: Card) -> float:
    cluster, column_warps = tile["CLUSTER"], tile["COLUMN_WARPS"]
    tiles = block_rows(tile) // TILE_ROWS
    row_blocks = -(-rows.num_tiles // tiles) + -(-rows.num_plain // block_rows(tile))
    num_blocks = cluster * row_blocks
    steps = -(-rows.steps // (cluster * column_warps)) * column_warps
    busy = min(1.0, max(LEAST_BUSY, num_blocks / card.num_processors))
    step = max(
        8 * MULTIPLY * tiles * token_tiles,
        8 * UNPACK[rows.bits] * tiles * tile["TOKEN_WARPS"],
        READ * busy * (2 * STEP * TOKENS * token_tiles + tiles * rows.step_bytes),
    )
    waves = -(-num_blocks // card.num_processors)
    return waves * (START + steps * step + (MEET if cluster > 1 else 0))
