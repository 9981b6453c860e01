"""GEMMs with tiled quantized rows: chooses kernel and tile for a shape, and launches. Knows no
checkpoint format.

The kernels are in `quantized.cu` and, for more than a few tokens, `quantized_gemm.cu` and
`quantized_experts.cu` (tiles: `quantized_gemm.py`). Up to MAX_TOKENS tokens, and many more per
expert, are multiplied with the codes directly. Beyond, arithmetic is the bottleneck: rows are
dequantized first, into memory that is freed after the GEMM.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.ops.cuda import quantized_gemm, quantized_rules
from penstock.ops.cuda.program import (
    address,
    current_stream,
    is_available,
    most_shared_bytes,
    num_processors,
    program,
)
from penstock.ops.cuda.quantized_gemm import FORM
from penstock.ops.cuda.quantized_rules import (
    DOWN_PAIRS,
    DOWN_TOKEN,
    EXPAND,
    GATE_UP,
    KERNELS,
    LINEAR,
    MAX_WARPS,
    PAIR_TOKENS,
    TOKENS,
    cdiv,
    expert_rule,
    fits,
    has_room_for_norm,
    linear_rule,
    new_tile,
    num_staged,
    staged_bytes,
    tile_shape,
    token_tiles_of,
)
from penstock.ops.product import Product, Tile
from penstock.ops.tiles import NO_TYPE, STEP, TILE_ROWS, TYPES, TiledRows
from penstock.ops.tuning import choose
from penstock.ops.weight import Part, tensors_of

SOURCE = Path(__file__).with_name("quantized.cu")
GEMM_SOURCE = Path(__file__).with_name("quantized_gemm.cu")
EXPERTS_SOURCE = Path(__file__).with_name("quantized_experts.cu")
EACH, SCANNED, LISTED = range(3)  # PAIRS
MAX_TOKENS = 64  # per launch
MAX_LOGITS = 256  # tokens: reading a head's codes again for each 64 costs less than expansion
MAX_SCANNED, MAX_SCANNED_EXPERTS = 64, 512  # choices of experts that a warp can sort itself
EXPAND_WARPS = 4  # of a block that dequantizes, with a step each
DTYPES = (torch.bfloat16, torch.float16)
TUNED = (*KERNELS.values(), quantized_gemm.KERNEL, FORM, quantized_gemm.EXPERTS)


def can_multiply_parts(parts: tuple[Part, ...], product: Product) -> bool:
    """Whether tokens are few, and aligned for 16-byte loads."""
    most = MAX_LOGITS if product.out_dtype == torch.float32 else MAX_TOKENS
    return product.shape[1] % 8 == 0 and _can_load(product.x, most)


def _can_load(x: Tensor, most: int) -> bool:
    is_aligned = x.data_ptr() % 16 == 0 and (len(x) == 1 or x.stride(0) % 8 == 0)
    return len(x) <= most and is_aligned and x.dtype in DTYPES and is_available(x.device)


def can_stage(parts: tuple[Part, ...], product: Product) -> bool:
    """Whether `multiply_parts` can fuse the norm: every launch must multiply tiled rows whose
    columns are in order. Activations before a GEMM are never fused: repeated in every block, they
    take longer than a launch of their own.
    """
    if product.is_swiglu:
        return False
    launches = [part for part, plain in _launches(parts)]
    are_in_order = all(isinstance(one, TiledRows) and one.columns is None for one in launches)
    return has_room_for_norm(product.num_tokens, product.shape[1]) and are_in_order


def can_end_in_swiglu(parts: tuple[Part, ...], x: Tensor) -> bool:
    """Whether a GEMM of these rows, gate and up, can apply swiglu: one launch has both."""
    if len(parts) != 1 or not isinstance(parts[0], TiledRows) or parts[0].columns is not None:
        return False
    num_rows, num_columns = parts[0].shape
    return num_rows % (2 * TILE_ROWS) == 0 == num_columns % 8 and _can_load(x, TOKENS)


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
                ends_in_swiglu=product.ends_in_swiglu,
            )
    return out


def expand_parts(parts: tuple[Part, ...], dtype: torch.dtype) -> Tensor:
    """All rows of a weight, dequantized into temporary memory."""
    assert all(isinstance(part, (TiledRows, Tensor)) for part in parts), "rows on a GPU are tiled"
    if len(parts) == 1 or len(parts[0].shape) > 2:
        plain = [expand(part, dtype) if isinstance(part, TiledRows) else part for part in parts]
        return plain[0] if len(plain) == 1 else torch.cat(plain, dim=-2)  # type: ignore[arg-type, return-value]
    sizes = [part.shape[0] for part in parts]
    out = torch.empty(
        sum(sizes), parts[0].shape[1], dtype=dtype, device=tensors_of(parts[0])[0].device
    )
    for part, own in zip(parts, out.split(sizes)):
        if isinstance(part, TiledRows):
            expand(part, dtype, out=own)
        else:
            own.copy_(part)
    return out


def expand_in_pieces(
    parts: tuple[Part, ...], dtype: torch.dtype, most: int
) -> Iterator[tuple[slice, Tensor]]:
    """At most so many rows of a weight at a time, dequantized, and where they are in it."""
    start = 0
    for part in parts:
        for first in range(0, part.shape[0], most):
            last = min(first + most, part.shape[0])
            assert isinstance(part, (TiledRows, Tensor)), "rows on a GPU are tiled"
            some = part.row_slice(first, last) if isinstance(part, TiledRows) else part[first:last]
            yield slice(start + first, start + last), expand_parts((some,), dtype)
        start += part.shape[0]


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
    ends_in_swiglu: bool = False,  # out [T, N / 2]
) -> None:
    assert not ends_in_swiglu or (plain is None and bias is None and residual is None)
    is_gemm = quantized_gemm.is_faster(rows.num_rows, len(x), num_processors(x.device))
    form: Tile = {"is_gemm": int(is_gemm)}
    if len(x) > TOKENS and choose(FORM, tile_shape(rows), len(x), form, x.device)["is_gemm"]:
        assert norm_weight is None, "tokens are prepared by others"
        multiply_gemm(x, rows, out, plain=plain, bias=bias, residual=residual)
        return
    num_tokens, num_plain = len(x), 0 if plain is None else len(plain)
    token_tiles = token_tiles_of(num_tokens)
    is_staged = norm_weight is not None
    staged = staged_bytes(num_tokens, rows.num_columns, rows.group) if is_staged else 0
    rule = linear_rule(rows, token_tiles, num_processors(x.device), staged)
    tile = choose(KERNELS[LINEAR], tile_shape(rows), num_tokens, rule, x.device)
    if not fits(tile, num_tokens, staged):  # measured for a GEMM without a norm
        tile = rule
    constants = {
        "TOKEN_TILES": token_tiles,
        "STAGED_TOKENS": num_staged(num_tokens) if is_staged else 1,
        "HAS_NORM": int(norm_weight is not None),
        "HAS_BIAS": int(bias is not None),
        "HAS_RESIDUAL": int(residual is not None),
        "IS_OUT_FLOAT": int(out.dtype == torch.float32),
        "UP_TILES": rows.num_rows // (2 * TILE_ROWS) if ends_in_swiglu else 0,
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
    tile: Tile | None = None,  # None: by table or rule
) -> None:
    num_tokens, num_plain = len(x), 0 if plain is None else len(plain)
    if tile is None:
        rule = quantized_gemm.gemm_rule(rows, num_tokens, card_of(x.device), num_plain)
        shape = quantized_gemm.gemm_shape(rows, num_tokens, num_plain)
        tile = choose(quantized_gemm.KERNEL, shape, num_tokens, rule, x.device)
    constants = gemm_constants(rows, x.dtype, tile) | {
        "HAS_PLAIN": int(plain is not None),
        "HAS_BIAS": int(bias is not None),
        "HAS_RESIDUAL": int(residual is not None),
        "IS_OUT_FLOAT": int(out.dtype == torch.float32),
    }
    block_rows = quantized_gemm.block_rows(tile)
    row_blocks = cdiv(rows.num_rows, block_rows) + cdiv(num_plain, block_rows)
    pointers = (x, rows.codes, rows.records, plain, bias, residual, out)
    _launch_program(
        GEMM_SOURCE,
        "quantized_gemm",
        constants,
        x.device,
        row_blocks * tile["CLUSTER"],
        quantized_gemm.num_warps(tile),
        *pointers,
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


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles that `penstock tune` measures for the kernels of this file."""
    card = card_of(torch.device("cuda"))
    if kernel in KERNELS.values():
        return quantized_rules.candidates(kernel, shape, num_tokens, card.num_processors)
    return quantized_gemm.candidates(kernel, shape, num_tokens, card)


def expand(
    rows: TiledRows, dtype: torch.dtype, ids: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Dequantizes all rows, or those with these ids, with columns in order: [..., N, K]. `out`: of
    all rows of one matrix.
    """
    if out is not None and rows.columns is not None:
        return out.copy_(expand(rows, dtype))
    device, stack = rows.codes.device, rows.shape[:-2]
    is_whole = not stack or rows.num_rows % TILE_ROWS == 0
    if not is_available(device) or dtype not in DTYPES or not is_whole:
        found = (rows.dequantize() if ids is None else rows.rows(ids)).to(dtype)
        return found if out is None else out.copy_(found)
    steps = cdiv(rows.num_columns, STEP)
    num_rows = rows.num_rows if not stack else rows.num_rows * stack[0]
    count = num_rows if ids is None else ids.numel()
    if out is None:
        out = torch.empty(count, rows.num_columns, dtype=dtype, device=device)
    num_blocks = cdiv(num_rows, TILE_ROWS) if ids is None else count
    if count:
        tile = new_tile(1, min(EXPAND_WARPS, steps), 1, 1, 1)
        wanted = None if ids is None else ids.flatten().long()
        arguments = (rows.codes, rows.records, wanted, out, c_int(num_rows))
        grid = (num_blocks, cdiv(steps, tile["WARPS"]))
        _launch(EXPAND, rows, out, grid, tile, {}, *arguments)
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
        self._multiply(GATE_UP, x, inner, num_tokens, num_tokens * self.slots, ids)
        tile = self._tile_of(DOWN_TOKEN, self.down, num_tokens)
        _launch(
            DOWN_TOKEN,
            self.down,
            x,
            (cdiv(self.width, TILE_ROWS * tile["ROW_TILES"]), num_tokens),
            tile,
            self._constants() | {"PAIRS": EACH},
            inner,
            weights,
            ids,
            *_matrices(self.down, self.shared_down),
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
        self._multiply(GATE_UP, x, inner, len(x), count, ids)
        self._multiply(DOWN_PAIRS, inner, outputs, len(x), count, ids)

    def run_listed(self, x: Tensor, order: Tensor, tiles: Tensor, outputs: Tensor) -> None:
        """outputs [T * slots, H], one per pair. A block computes up to TOKENS of an expert."""
        inner = x.new_empty(len(outputs), self.inner_width)
        given = (len(x), len(tiles), None, order, tiles)
        self._multiply(GATE_UP, x, inner, *given)
        self._multiply(DOWN_PAIRS, inner, outputs, *given)

    def run_many(
        self, x: Tensor, order: Tensor, tiles: Tensor, outputs: Tensor, token_tiles: int
    ) -> None:
        """outputs [T * slots, H] like x, one per pair. A block computes up to TOKENS * token_tiles
        of an expert.
        """
        inner = x.new_empty(len(outputs), self.inner_width)
        given = (order, tiles, token_tiles, len(x))
        self._multiply_many(x, self.gate_up, self.shared_gate_up, inner, *given, is_down=False)
        self._multiply_many(inner, self.down, self.shared_down, outputs, *given, is_down=True)

    def _multiply(
        self, mode: int, source: Tensor, out: Tensor, num_tokens: int, count: int,
        ids: Tensor | None = None, order: Tensor | None = None, tiles: Tensor | None = None,
    ) -> None:  # fmt: skip
        is_gate_up = mode == GATE_UP
        rows = self.gate_up if is_gate_up else self.down
        shared = self.shared_gate_up if is_gate_up else self.shared_down
        tile = self._tile_of(mode, rows, num_tokens)
        num_tiles = rows.num_rows // TILE_ROWS
        pairs = LISTED if tiles is not None else EACH if num_tokens <= PAIR_TOKENS else SCANNED
        own = {"PAIRS": pairs, "IS_OUT_FLOAT": int(out.dtype == torch.float32)}
        _launch(
            mode,
            rows,
            source,
            (cdiv(num_tiles, tile["ROW_TILES"]), count),
            tile,
            self._constants() | own,
            source,
            ids,
            order,
            tiles,
            *_matrices(rows, shared),
            out,
            c_int(num_tokens),
            c_int(num_tiles),
        )

    def _multiply_many(
        self, source: Tensor, rows: TiledRows, shared: TiledRows | None, out: Tensor,
        order: Tensor, tiles: Tensor, token_tiles: int, num_tokens: int, *, is_down: bool,
    ) -> None:  # fmt: skip
        device = source.device
        rule = quantized_gemm.experts_rule(rows, token_tiles, card_of(device))
        shape = quantized_gemm.experts_shape(rows, token_tiles, is_down)
        tile = choose(quantized_gemm.EXPERTS, shape, num_tokens, rule, device)
        own = {"IS_DOWN": int(is_down), "NUM_TILES": rows.num_rows // TILE_ROWS}
        _launch_program(
            EXPERTS_SOURCE,
            "quantized_experts",
            stage_constants(rows, source.dtype, tile) | own | self._constants(),
            device,
            (cdiv(rows.num_rows, quantized_gemm.block_rows(tile)), len(tiles)),
            quantized_gemm.num_warps(tile),
            source,
            order,
            tiles,
            *_matrices(rows, shared),
            out,
        )

    def _tile_of(self, mode: int, rows: TiledRows, num_tokens: int) -> Tile:
        rule = expert_rule(mode, rows, self.slots, num_tokens)
        device, shape = rows.codes.device, tile_shape(rows, self.slots)
        return choose(KERNELS[mode], shape, num_tokens, rule, device)

    def _constants(self) -> dict[str, int]:
        return {
            "NUM_EXPERTS": self.num_experts,
            "SLOTS": self.slots,
            "HAS_SHARED": int(self.has_shared),
        }


def _matrices(rows: TiledRows, shared: TiledRows | None) -> tuple[Tensor | None, ...]:
    """Of all experts and of the shared one, as every kernel of experts takes them."""
    own = (None, None) if shared is None else (shared.codes, shared.records)
    return rows.codes, rows.records, *own


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
    return GEMM_SWITCHES | stage_constants(rows, dtype, tile)


def stage_constants(rows: TiledRows, dtype: torch.dtype, tile: Tile) -> dict[str, int]:
    """Compile-time constants of `quantized_stages.cu`, but for a dtype of outputs of its own."""
    shared = {"SHARED_BYTES": quantized_gemm.gemm_shared_bytes(rows, tile)}
    return {"IS_OUT_FLOAT": 0, **_kind_constants(rows, dtype), **tile, **shared}


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
    constants = {**kernel_constants(mode, rows, like.dtype), **tile, **switches}
    _launch_program(
        SOURCE, "quantized", constants, like.device, num_blocks, tile["WARPS"], *arguments
    )


def _launch_program(
    source: Path,
    name: str,
    constants: dict[str, int],
    device: torch.device,
    num_blocks: int | tuple[int, int],
    num_warps: int,
    *arguments: Any,
) -> None:
    kernel = (source, name, tuple(constants.items()), device)
    program(*kernel, constants.get("SHARED_BYTES", 0)).launch(
        num_blocks, 32 * num_warps, current_stream(device), *map(_argument, arguments)
    )


def _argument(value: Any) -> Any:
    return address(value) if value is None or isinstance(value, Tensor) else value
