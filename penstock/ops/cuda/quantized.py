"""GEMMs with tiled quantized rows: chooses kernel and tile for a shape, and launches. Knows no
checkpoint format.

The kernels are in `quantized.cu` and, for more than a few tokens, `quantized_gemm.cu` (tiles:
`quantized_gemm.py`). Up to MAX_TOKENS tokens are multiplied with the codes directly. With more,
arithmetic is the bottleneck: rows are dequantized first, into memory that is freed after the GEMM.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.ops.cuda import quantized_gemm
from penstock.ops.cuda.program import (
    current_stream,
    is_available,
    most_shared_bytes,
    num_processors,
    program,
)
from penstock.ops.product import Product
from penstock.ops.tiles import NO_TYPE, STEP, TILE_ROWS, TYPES, TiledRows
from penstock.ops.weight import Part

SOURCE = Path(__file__).with_name("quantized.cu")
GEMM_SOURCE = Path(__file__).with_name("quantized_gemm.cu")
LINEAR, GATE_UP, DOWN_PAIRS, DOWN_TOKEN, EXPAND = range(5)  # MODE
EACH, SCANNED, LISTED = range(3)  # PAIRS
TOKENS = 8  # per mma instruction
MAX_TOKENS = 64  # per launch
MAX_LOGITS = 256  # tokens: reading a head's codes again for each 64 costs less than expansion
PAIR_TOKENS = 4  # up to this many tokens, experts are read for each token separately
MAX_SCANNED, MAX_SCANNED_EXPERTS = 64, 512  # choices of experts that a warp can sort itself
MAX_STAGED = 2  # tokens that every block norms itself: for more, a separate launch is faster
STAGED_BYTES = 36 * 1024  # for these tokens, besides a block's sums
# Per staged token, besides its columns and its sums by group: padding, so that tokens start in
# different banks, and sums of squares.
STAGED_MORE = 2 * 32 + 4 * 16
SHARED = 48 * 1024  # bytes of a block without opt-in
MAX_WARPS = 16
MAX_SHARE = 12  # row tiles per SM; with more, blocks run in waves
DTYPES = (torch.bfloat16, torch.float16)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


Tile = dict[str, int]  # ROW_TILES, WARPS, ROW_WARPS, HELD, BLOCKS


def can_multiply_parts(parts: tuple[Part, ...], product: Product) -> bool:
    """Whether tokens are few, and aligned for 16-byte loads."""
    x = product.x
    is_aligned = x.data_ptr() % 16 == 0 and (len(x) == 1 or x.stride(0) % 8 == 0)
    most = MAX_LOGITS if product.out_dtype == torch.float32 else MAX_TOKENS
    is_few = len(x) <= most and product.shape[1] % 8 == 0
    return is_few and is_aligned and x.dtype in DTYPES and is_available(x.device)


def can_stage(parts: tuple[Part, ...], product: Product) -> bool:
    """Whether `multiply_parts` can fuse the norm: every launch must multiply tiled rows whose
    columns are in order. Activations are never fused: repeated in every block, they take longer
    than a launch of their own.
    """
    if product.is_swiglu:
        return False
    num_tokens = product.num_tokens
    staged = 2 * product.shape[1] * _num_staged(num_tokens)
    launches = [part for part, plain in _launches(parts)]
    are_in_order = all(isinstance(one, TiledRows) and one.columns is None for one in launches)
    return num_tokens <= MAX_STAGED and staged <= STAGED_BYTES and are_in_order


def _launches(parts: tuple[Part, ...]) -> list[tuple[Part, Tensor | None]]:
    """The parts to multiply, one launch each. Unquantized rows join the launch of the tiled rows
    before them, if the columns of these are in order.
    """
    launches: list[tuple[Part, Tensor | None]] = []
    for part in parts:
        last, plain = launches[-1] if launches else (None, None)
        takes_more = isinstance(last, TiledRows) and last.columns is None and plain is None
        if last is not None and takes_more and isinstance(part, Tensor):
            launches[-1] = (last, part)
        else:
            launches.append((part, None))
    return launches


def multiply_parts(parts: tuple[Part, ...], product: Product) -> Tensor:
    """Unquantized rows before tiled rows, or after permuted ones, use cuBLAS."""
    out, first = product.new_out(), 0
    for part, plain in _launches(parts):
        size = part.shape[0] + (0 if plain is None else len(plain))
        own = slice(first, first + size)
        first += size
        bias = None if product.bias is None else product.bias[own]
        residual = None if product.residual is None else product.residual[:, own]
        if isinstance(part, Tensor):
            found = torch.nn.functional.linear(product.x, part, bias)
            out[:, own] = found if residual is None else found + residual
            continue
        assert isinstance(part, TiledRows), "rows on a GPU are tiled"
        x = product.x if part.columns is None else product.x[:, part.columns.long()]
        for start in range(0, len(x), MAX_TOKENS):
            some = slice(start, start + MAX_TOKENS)
            multiply(
                x[some],
                part,
                out[some, own],
                plain=plain,
                bias=bias,
                residual=None if residual is None else residual[some],
                norm_weight=product.norm_weight,
                eps=product.eps,
            )
    return out


def expand_parts(parts: tuple[Part, ...], dtype: torch.dtype) -> Tensor:
    """All rows of a weight, dequantized into temporary memory."""
    plain = [expand(part, dtype) if isinstance(part, TiledRows) else part for part in parts]
    assert all(isinstance(part, Tensor) for part in plain), "rows on a GPU are tiled"
    return plain[0] if len(plain) == 1 else torch.cat(plain, dim=-2)  # type: ignore[arg-type, return-value]


def multiply(
    x: Tensor,  # [T, K]
    rows: TiledRows,  # [N, K]
    out: Tensor,  # [T, N + plain rows]  may be a slice
    *,
    plain: Tensor | None = None,  # [n, K]  unquantized rows that follow
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    if quantized_gemm.is_faster(rows.num_rows, len(x), num_processors(x.device)):
        assert norm_weight is None, "tokens are prepared by others"
        multiply_gemm(x, rows, out, plain=plain, bias=bias, residual=residual)
        return
    num_tokens, num_plain = len(x), 0 if plain is None else len(plain)
    token_tiles = 1 << max(0, cdiv(num_tokens, TOKENS) - 1).bit_length()
    is_staged = norm_weight is not None
    staged = staged_bytes(num_tokens, rows.num_columns, rows.group) if is_staged else 0
    tile = linear_rule(rows, token_tiles, num_processors(x.device), staged)
    constants = {
        "TOKEN_TILES": token_tiles,
        "STAGED_TOKENS": _num_staged(num_tokens) if is_staged else 1,
        "HAS_NORM": int(norm_weight is not None),
        "HAS_BIAS": int(bias is not None),
        "HAS_RESIDUAL": int(residual is not None),
        "IS_OUT_FLOAT": int(out.dtype == torch.float32),
    }
    block_rows = TILE_ROWS * tile["ROW_TILES"] * tile["ROW_WARPS"]
    num_blocks = cdiv(rows.num_rows, block_rows) + cdiv(num_plain, block_rows)
    _launch(
        LINEAR,
        rows,
        x,
        num_blocks,
        tile,
        constants,
        x,
        norm_weight,
        rows.codes,
        rows.records,
        plain,
        bias,
        residual,
        out,
        c_int(num_tokens),
        c_int(rows.num_rows),
        c_int(num_plain),
        c_int(out.stride(0)),
        c_int(x.stride(0) if num_tokens > 1 else x.shape[1]),
        c_int(0 if residual is None else residual.stride(0)),
        c_float(eps),
    )


def multiply_gemm(
    x: Tensor,  # [T, K]
    rows: TiledRows,  # [N, K]
    out: Tensor,  # [T, N + plain rows]  may be a slice
    *,
    plain: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,  # None: chosen by rule
) -> None:
    num_tokens, num_plain = len(x), 0 if plain is None else len(plain)
    tile = tile or quantized_gemm.gemm_rule(rows, num_tokens, card_of(x.device), num_plain)
    constants = gemm_constants(rows, x.dtype, tile) | {
        "HAS_PLAIN": int(plain is not None),
        "HAS_BIAS": int(bias is not None),
        "HAS_RESIDUAL": int(residual is not None),
        "IS_OUT_FLOAT": int(out.dtype == torch.float32),
    }
    block_rows = quantized_gemm.block_rows(tile)
    row_blocks = cdiv(rows.num_rows, block_rows) + cdiv(num_plain, block_rows)
    pointers = (x, rows.codes, rows.records, plain, bias, residual, out)
    kernel = (GEMM_SOURCE, "quantized_gemm", tuple(constants.items()), x.device)
    program(*kernel, constants["SHARED_BYTES"]).launch(
        row_blocks * tile["CLUSTER"],
        32 * quantized_gemm.num_warps(tile),
        current_stream(x.device),
        *(_argument(one) for one in pointers),
        c_int(num_tokens),
        c_int(rows.num_rows),
        c_int(num_plain),
        c_int(out.stride(0)),
        c_int(x.stride(0)),
        c_int(0 if residual is None else residual.stride(0)),
    )


@functools.cache
def card_of(device: torch.device) -> quantized_gemm.Card:
    has_clusters = torch.cuda.get_device_capability(device) >= quantized_gemm.CLUSTER_CAPABILITY
    return quantized_gemm.Card(
        num_processors(device),
        most_shared_bytes(device),
        quantized_gemm.MAX_CLUSTER if has_clusters else 1,
    )


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
        return _tile(2, min(4, steps), 1, 1, 3)
    if is_wide and has_bytes:
        return _tile(2, min(4, 2 * steps), 2, 1, 1)
    if is_wide:
        return _tile(1, min(4, steps), 1, 1, 2)
    if token_tiles > 1:
        held = 1 if token_tiles > 4 else 4 if has_bytes else 2
        return _tile(1, min(8, steps), 1, held, 1)
    if tiles <= num_processors:
        return _tile(1, min(16, steps), 1, 1 if has_bytes else 2, 1)
    if has_bytes:
        return _tile(1, min(8, steps), 1, 1, 2)
    half = _tile(2, min(16, steps), 1, 2, 1)
    if tiles <= 2 * num_processors and shared_bytes(half, token_tiles) <= SHARED - staged_bytes:
        return half
    return _tile(1, min(16, steps), 1, 1, 2)


def _wide_rule(rows: TiledRows, steps: int, share: int, is_staged: bool) -> Tile:
    """For up to 8 tokens and many rows, `share` row tiles per SM. Chooses blocks per SM and warps
    with different rows so that all blocks run in one wave and few warps are idle.
    """
    has_bytes = rows.bits == 8
    if share > MAX_SHARE:
        return _tile(1, min(4, steps), 1, 1 if rows.is_float8 else 2, 6)
    blocks = cdiv(share, 2)
    if not has_bytes and steps % 8 == 0 and blocks <= 3:
        return _tile(2, 8, 1, 1, 3)
    if not has_bytes and not is_staged:  # two row tiles use the same token sums
        return _tile(2, min(4, steps), 1, 2 if blocks <= 3 else 1, blocks)
    blocks = min((3, 2, 4, 5), key=lambda count: cdiv(share, count) * count)
    row_warps = cdiv(share, blocks)
    split = min(4 if row_warps * blocks <= 6 else 2, steps)
    return _tile(1, row_warps * split, row_warps, 1 if has_bytes else 8 // split, blocks)


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
        return _tile(2, min(4, 2 * steps), 2, 1, 1)
    if is_wide and token_tiles > 1:
        return _tile(1, 4, 1, 4, 3)
    if is_wide and has_bytes and share <= 6:
        return _tile(1, 2 * min(4, steps), 2, 1, 3)
    if is_wide and has_bytes:
        return _tile(1, min(4, steps), 1, *((4, 4) if share > MAX_SHARE else (1, 6)))
    if is_wide:
        return _tile(1, min(8, steps), 1, 2, 3) if share <= 5 else _tile(1, min(4, steps), 1, 2, 6)
    if token_tiles == 1 and tiles <= num_processors:
        return _tile(1, min(8, steps), 1, 4, 1)
    if token_tiles == 1:
        return _tile(1, min(16, steps), 1, 1, 2)
    return _tile(1, min(8, steps), 1, 4, 2 if token_tiles == 2 else 1)


def _num_staged(num_tokens: int) -> int:
    """The number of tokens that a kernel is compiled for: a power of two."""
    return 1 << max(0, num_tokens - 1).bit_length()


def staged_bytes(num_tokens: int, num_columns: int, group: int) -> int:
    """Shared memory of the tokens that a block norms itself."""
    columns = cdiv(num_columns, STEP) * STEP
    return _num_staged(num_tokens) * (2 * columns + 4 * columns // min(group, STEP) + STAGED_MORE)


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
        return _tile(1, slots, 1, 4, 1) if num_tokens == 1 else _tile(1, slots, 1, 2, 2)
    if mode == DOWN_PAIRS and has_small_groups:
        return _tile(2, min(2, steps), 1, 1, 8) if has_bytes else _tile(4, min(4, steps), 1, 1, 4)
    if mode == DOWN_PAIRS:
        warps = min(4, max(1, steps // 4))
        return _tile(4, warps, 1, 1, 16 // warps)
    if num_tokens > PAIR_TOKENS and has_small_groups:
        return _tile(2, min(4, steps), 1, 1, 6) if has_bytes else _tile(4, min(4, steps), 1, 1, 3)
    if num_tokens > PAIR_TOKENS:
        return _tile(4, min(4, steps), 1, 1, 4)
    if has_bytes:
        return _tile(2, min(8, steps), 1, 1, 3)
    if num_tokens == 1 and not has_small_groups:
        return _tile(2, min(16, steps), 1, 1, 2)
    return _tile(2, min(8, steps), 1, 2, 2)


def _tile(row_tiles: int, warps: int, row_warps: int, held: int, blocks: int) -> Tile:
    return {
        "ROW_TILES": row_tiles,
        "WARPS": warps,
        "ROW_WARPS": row_warps,
        "HELD": held,
        "BLOCKS": blocks,
    }


def expand(rows: TiledRows, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Dequantizes all rows, or those with these ids, with columns in order: [..., N, K]."""
    device, stack = rows.codes.device, rows.shape[:-2]
    is_whole = not stack or rows.num_rows % TILE_ROWS == 0
    if not is_available(device) or dtype not in DTYPES or not is_whole:
        return (rows.dequantize() if ids is None else rows.rows(ids)).to(dtype)
    steps = cdiv(rows.num_columns, STEP)
    num_rows = rows.num_rows if not stack else rows.num_rows * stack[0]
    count = num_rows if ids is None else ids.numel()
    out = torch.empty(count, rows.num_columns, dtype=dtype, device=device)
    num_blocks = cdiv(num_rows, TILE_ROWS) if ids is None else count
    if count:
        tile = _tile(1, 1, 1, 1, 1)
        wanted = None if ids is None else ids.flatten().long()
        arguments = (rows.codes, rows.records, wanted, out, c_int(num_rows))
        _launch(EXPAND, rows, out, (num_blocks, steps), tile, {}, *arguments)
    out = out.view(*(ids.shape if ids is not None else rows.shape[:-1]), rows.num_columns)
    if rows.columns is None:
        return out
    order = rows.columns.long()  # per matrix of a stack
    order = order.unsqueeze(-2) if ids is None else order
    return torch.empty_like(out).scatter_(-1, order.expand_as(out), out)


class Experts:
    """The gate-up and down projections of a layer's experts and of its shared expert."""

    def __init__(
        self,
        gate_up: TiledRows,  # [E, 2I, H]
        down: TiledRows,  # [E, H, I]
        shared_gate_up: TiledRows | None,  # [2I, H]
        shared_down: TiledRows | None,  # [H, I]
        slots: int,  # experts per token, with the shared one
    ) -> None:
        self.gate_up, self.down = gate_up, down
        self.shared_gate_up, self.shared_down = shared_gate_up, shared_down
        self.slots = slots
        self.has_shared = shared_down is not None
        self.num_experts = down.shape[0]
        self.inner_width = down.num_columns
        self.width = down.num_rows

    @staticmethod
    def of(parts: Sequence[Part], k: int) -> Experts | None:
        """`parts`: gate and up, down, and the same of a shared expert, in the same format. None if
        no kernel supports them.
        """
        rows = [part for part in parts if isinstance(part, TiledRows)]
        if len(rows) < len(parts) or k + len(rows) // 2 - 1 > MAX_WARPS:
            return None
        gate_up, down, *shared = rows
        are_alike = all(
            one.kind == own.kind and one.shape == own.shape[1:]
            for one, own in zip(shared, (gate_up, down))
        )
        is_whole = down.num_columns % TILE_ROWS == 0 and down.num_rows % TILE_ROWS == 0
        if not are_alike or not is_whole or gate_up.columns is not None or down.columns is not None:
            return None
        shared_gate_up, shared_down = shared or (None, None)
        return Experts(gate_up, down, shared_gate_up, shared_down, k + (shared_down is not None))

    def run_pairs(
        self, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor,
        shared_weight: Tensor | None,
    ) -> None:  # fmt: skip
        """Reads experts for each token separately: while few tokens share experts, little is read
        twice. Two launches.
        """
        num_tokens = len(x)
        inner = x.new_empty(num_tokens * self.slots, self.inner_width)
        self._multiply(GATE_UP, x, inner, num_tokens * self.slots, ids, num_tokens=num_tokens)
        tile = expert_rule(DOWN_TOKEN, self.down, self.slots, num_tokens)
        shared = self.shared_down
        _launch(
            DOWN_TOKEN,
            self.down,
            x,
            (cdiv(self.width, TILE_ROWS * tile["ROW_TILES"]), num_tokens),
            tile,
            self._constants(EACH),
            inner,
            weights,
            ids,
            self.down.codes,
            self.down.records,
            shared and shared.codes,
            shared and shared.records,
            shared_weight,
            residual,
            out,
            c_int(self.width // TILE_ROWS),
        )

    def can_scan(self, ids: Tensor) -> bool:
        """Whether blocks can find their pairs themselves: no expert has more than TOKENS."""
        is_few = len(ids) <= TOKENS and ids.numel() <= MAX_SCANNED
        return is_few and self.num_experts <= MAX_SCANNED_EXPERTS and ids.dtype == torch.int32

    def run_scanned(self, x: Tensor, ids: Tensor, outputs: Tensor) -> None:
        """outputs [T * slots, H], one per pair. A block computes all pairs of an expert."""
        count = min(ids.numel(), self.num_experts) + int(self.has_shared)
        inner = x.new_empty(len(outputs), self.inner_width)
        self._multiply(GATE_UP, x, inner, count, ids, num_tokens=len(x))
        self._multiply(DOWN_PAIRS, inner, outputs, count, ids, num_tokens=len(x))

    def run_listed(self, x: Tensor, order: Tensor, tiles: Tensor, outputs: Tensor) -> None:
        """outputs [T * slots, H], one per pair. A block computes up to TOKENS of an expert."""
        inner = x.new_empty(len(outputs), self.inner_width)
        self._multiply(GATE_UP, x, inner, len(tiles), None, order, tiles)
        self._multiply(DOWN_PAIRS, inner, outputs, len(tiles), None, order, tiles)

    def _multiply(
        self, mode: int, source: Tensor, out: Tensor, count: int, ids: Tensor | None,
        order: Tensor | None = None, tiles: Tensor | None = None, num_tokens: int = MAX_TOKENS,
    ) -> None:  # fmt: skip
        is_gate_up = mode == GATE_UP
        rows = self.gate_up if is_gate_up else self.down
        shared = self.shared_gate_up if is_gate_up else self.shared_down
        tile = expert_rule(mode, rows, self.slots, num_tokens)
        num_tiles = rows.num_rows // TILE_ROWS
        pairs = LISTED if tiles is not None else EACH if num_tokens <= PAIR_TOKENS else SCANNED
        constants = self._constants(pairs)
        constants["IS_OUT_FLOAT"] = int(out.dtype == torch.float32)
        _launch(
            mode,
            rows,
            source,
            (cdiv(num_tiles, tile["ROW_TILES"]), count),
            tile,
            constants,
            source,
            ids,
            order,
            tiles,
            rows.codes,
            rows.records,
            shared and shared.codes,
            shared and shared.records,
            out,
            c_int(num_tokens),
            c_int(num_tiles),
        )

    def _constants(self, pairs: int) -> dict[str, int]:
        return {
            "NUM_EXPERTS": self.num_experts,
            "SLOTS": self.slots,
            "HAS_SHARED": int(self.has_shared),
            "PAIRS": pairs,
        }


SWITCHES = {  # defaults
    "TOKEN_TILES": 1,
    "STAGED_TOKENS": 1,
    "ROW_WARPS": 1,
    "HAS_NORM": 0,
    "HAS_BIAS": 0,
    "HAS_RESIDUAL": 0,
    "IS_OUT_FLOAT": 0,
    "NUM_EXPERTS": 0,
    "SLOTS": 1,
    "HAS_SHARED": 0,
    "PAIRS": EACH,
}

GEMM_SWITCHES = dict.fromkeys(("HAS_PLAIN", "HAS_BIAS", "HAS_RESIDUAL", "IS_OUT_FLOAT"), 0)


def kernel_constants(mode: int, rows: TiledRows, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time constants of `quantized.cu`, besides tile and switches."""
    return SWITCHES | {"MODE": mode} | _kind_constants(rows, dtype)


def gemm_constants(rows: TiledRows, dtype: torch.dtype, tile: Tile) -> dict[str, int]:
    """Compile-time constants of `quantized_gemm.cu`, besides switches."""
    shared = {"SHARED_BYTES": quantized_gemm.gemm_shared_bytes(rows, tile)}
    return GEMM_SWITCHES | _kind_constants(rows, dtype) | tile | shared


def _kind_constants(rows: TiledRows, dtype: torch.dtype) -> dict[str, int]:
    fields = rows.fields
    coarse, coarse_offset, scale, offset = (
        NO_TYPE if type is None else TYPES[type] for type in fields.types
    )
    return {
        "COLUMNS": rows.num_columns,
        "BITS": rows.bits,
        "IS_FLOAT8": int(rows.is_float8),
        "IS_ROW_MAJOR": int(rows.is_row_major),
        "ZERO": rows.zero,
        "GROUP": rows.group,
        "RECORD_BYTES": rows.records.shape[-1],
        "COARSE_TYPE": coarse,
        "OFFSET_COARSE_TYPE": coarse_offset,
        "SCALE_TYPE": scale,
        "OFFSET_TYPE": offset,
        "OFFSET_KIND": 0 if fields.offset is None else 1 if fields.are_zeros else 2,
        "IS_BFLOAT": int(dtype == torch.bfloat16),
    }


def _launch(
    mode: int,
    rows: TiledRows,
    like: Tensor,
    num_blocks: int | tuple[int, int],
    tile: Tile,
    switches: dict[str, int],
    *arguments: Any,
) -> None:
    constants = kernel_constants(mode, rows, like.dtype) | tile | switches
    device = like.device
    stream = current_stream(device)
    program(SOURCE, "quantized", tuple(constants.items()), device).launch(
        num_blocks, 32 * tile["WARPS"], stream, *(_argument(one) for one in arguments)
    )


def _argument(value: Any) -> Any:
    if value is None or isinstance(value, Tensor):
        return c_void_p(None if value is None else value.data_ptr())
    return value
