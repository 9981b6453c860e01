# mypy: disable-error-code="no-untyped-def"
"""The chosen experts of many tokens, as a grouped GEMM with tall tiles. Does no routing itself.

Four launches: the list of pairs (a token with one of its experts) by expert, gate and up, down, and
the weighted sum of every token. A program of the two GEMMs looks up its tile of pairs in the list:
the host does not know the routing, so there are as many programs as the worst case needs, and those
past the list's end exit at once. Tiles of an expert are adjacent, so that its weights are read from
memory once. A tile of few pairs, as most experts' last one is, uses a shorter tile in the same
program.

Quantized experts are dequantized a group at a time, and each group's GEMMs launched separately: all
of a layer would take gigabytes.

A pair's results do not depend on which pairs share its tile, nor on groups, and no sum depends on
the order of programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.cuda import quantized
from penstock.ops.triton.activation import silu
from penstock.ops.triton.launch import (
    cdiv,
    has_dependent_launch,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.triton.moe_permute import list_pairs, load_tile
from penstock.ops.tuning import Tile, bucket, choose
from penstock.ops.weight import Weight, map_part

MOST_EXPANDED = 1200 * 10**6  # bytes of dequantized experts at a time
LOW_PAIRS = tl.constexpr(64)  # rows of a warp group; fewer leave tensor cores idle
TALL_PAIRS = 64  # per expert, on average: above, tiles twice as tall read weights less often


def run(
    out: Tensor,  # [T, H]
    x: Tensor,  # [T, H]
    weights: Tensor,  # [T, k] float32
    ids: Tensor,  # [T, k]  those of a token differ, unless their weight is 0
    slots: Tensor | None,  # [E]  index of each id's matrices in the stacks; None: in order
    gate_up: Weight,  # [E, 2I, H]
    down: Weight,  # [E, H, I]
    residual: Tensor,  # [T, H]
    shared_weight: Tensor | None,  # [T, 1] float32
    shared_gate_up: Tensor | None,  # [2I', H]
    shared_down: Tensor | None,  # [H, I']
    num_experts: int,  # of the layer; the stacks may hold more or fewer
    counters: Tensor | None,  # [n] int32
) -> None:
    (num_tokens, k), (num_stacked, width, inner_width) = ids.shape, down.shape
    num_ids = num_stacked if slots is None else len(slots)
    shared_width = 0 if shared_down is None else shared_down.shape[1]
    widest = max(inner_width, shared_width)
    num_rows = k + (shared_width > 0)  # per token
    shape = (num_experts, k, inner_width, width)
    rules = _rules(
        bucket(num_tokens) * k // num_experts, x.element_size(), has_dependent_launch(x.device)
    )

    height = choose("moe_permute", shape, num_tokens, rules["list"], x.device)["BLOCK_M"]
    order, tiles = list_pairs(ids, num_ids, num_rows, height, counters)
    inner = x.new_empty(num_tokens * num_rows, widest)
    outputs = x.new_empty(num_tokens * num_rows, width)
    dims = {
        "E": num_ids,
        "SLOTS": num_rows,
        "H": width,
        "I": inner_width,
        "SHARED_I": shared_width,
        "INNER": widest,
        "BLOCK_M": height,
    }
    options = launch_options(x.device)

    for name, source, experts, shared, result, num_columns in (
        ("gate_up", x, gate_up, shared_gate_up, inner, 2 * widest),
        ("down", inner, down, shared_down, outputs, width),
    ):
        tile = choose(f"moe_{name}_grouped_gemm", shape, num_tokens, rules[name], x.device)
        constants = {**dims, "IS_DOWN": name == "down", **tile, **options}
        grid = (cdiv(num_columns, tile["BLOCK_N"]), len(tiles))
        for first, values in _groups(experts, slots, x.dtype):
            last, is_part = first + len(values), len(values) < num_ids
            last += last == num_ids  # including the shared one
            given = (source, order, tiles, values, values if shared is None else shared, result)
            grouped_kernel[grid](*given, first, last, IS_PART=is_part, **constants)

    add_pairs(out, outputs, weights, shared_weight, residual)


def _groups(
    experts: Weight, slots: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Dequantized experts, with the number of the first: all of them, or a few at a time. A layer's
    own, if its slots are among others'.
    """
    if not experts.parts:
        yield 0, experts.values
        return
    num_stacked, N, K = experts.shape
    most = max(1, MOST_EXPANDED // (N * K * dtype.itemsize))
    for first in range(0, num_stacked if slots is None else len(slots), most):
        own = slice(first, first + most)
        some = itemgetter(own if slots is None else slots[own].long())
        parts = tuple(map_part(part, some) for part in experts.parts)
        yield first, quantized.expand_parts(parts, dtype)


def add_pairs(
    out: Tensor, outputs: Tensor, weights: Tensor, shared_weight: Tensor | None, residual: Tensor
) -> None:
    """The residual plus the weighted outputs of a token's pairs."""
    (num_tokens, k), width = weights.shape, residual.shape[1]
    block = min(1024, next_power_of_2(width))
    _add_pairs_kernel[num_tokens, cdiv(width, block)](
        outputs,
        weights,
        weights if shared_weight is None else shared_weight,
        residual,
        out,
        TOP_K=k,
        H=width,
        HAS_SHARED=shared_weight is not None,
        BLOCK_H=block,
        num_warps=max(1, block // 256),
        **launch_options(out.device),
    )


def _rules(mean_pairs: int, element_size: int, is_hopper: bool) -> dict[str, Tile]:
    """Two programs per SM while memory is the bound, and in the short GEMMs of down: one starts or
    stores while the other multiplies. One of the largest tile where arithmetic is the bound.
    """
    is_tall = mean_pairs > TALL_PAIRS and element_size < 4
    height = {"BLOCK_M": 128 if is_tall else 64}
    if element_size == 4:
        tile = {"BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
        return {"list": height, "gate_up": tile, "down": tile}
    if not is_hopper:
        tile = {"BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 8 if is_tall else 4, "num_stages": 3}
        return {"list": height, "gate_up": tile, "down": tile}
    half = {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3 if is_tall else 4}
    whole = {"BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
    return {"list": height, "gate_up": whole if is_tall else half, "down": half}


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles worth measuring for a kernel; shape is (E, k, I, H)."""
    if kernel == "moe_permute":
        return [{"BLOCK_M": 64}, {"BLOCK_M": 128}]
    assert kernel in ("moe_gate_up_grouped_gemm", "moe_down_grouped_gemm")
    num_experts, k, *_ = shape
    tiles = [(128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 4, 2)]
    tiles += [(256, 64, 8, 3), (256, 64, 8, 4)]
    if (
        bucket(num_tokens) * k // num_experts <= TALL_PAIRS
    ):  # the sums of tall ones would not fit registers
        tiles += [(256, 64, 4, 3), (256, 64, 4, 4)]
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    return [dict(zip(names, tile)) for tile in tiles]


@triton.jit
def _multiply(
    source,
    source_starts,  # [M]
    is_pair,  # [M]
    weights,
    row_starts,  # [N]
    width,
    IS_WHOLE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of the source times rows of the weights, over `width`: [M, N] float32."""
    M: tl.constexpr = source_starts.shape[0]
    N: tl.constexpr = row_starts.shape[0]
    columns = tl.arange(0, BLOCK_K)
    p_source = source + source_starts[:, None] + columns[None, :]
    p_weights = weights + row_starts[None, :] + columns[:, None]
    total = tl.zeros([M, N], tl.float32)
    for first in range(0, width, BLOCK_K):
        if IS_WHOLE:
            b_weights = tl.load(p_weights + first)
            b_source = tl.load(p_source + first, mask=is_pair[:, None], other=0.0)
        else:
            is_column = first + columns < width
            b_weights = tl.load(p_weights + first, mask=is_column[:, None], other=0.0)
            b_source = tl.load(
                p_source + first, mask=is_pair[:, None] & is_column[None, :], other=0.0
            )
        total = tl.dot(b_source, b_weights, total, input_precision="ieee")
    return total


@triton.jit
def _multiply_tile(
    source,  # x, or the tile's own intermediate activations
    order,  # the tile's own
    weights,
    result,  # the tile's own intermediate activations, or the outputs
    num_pairs,
    width,
    IS_DOWN: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SLOTS: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A gate and the up of the same column are adjacent: the same thread holds both."""
    HALF: tl.constexpr = BLOCK_N // 2
    places, lanes = tl.arange(0, M), tl.arange(0, BLOCK_N)
    is_pair = places < num_pairs
    pairs = tl.load(order + places, mask=is_pair, other=0)
    if IS_DOWN:
        rows = tl.program_id(0) * BLOCK_N + lanes
        row_starts = tl.minimum(rows, H - 1) * width
        b_outputs = _multiply(
            source, places * INNER, is_pair, weights, row_starts, width, IS_WHOLE, BLOCK_K
        )
        is_output = is_pair[:, None] & (rows < H)[None, :]
        p_outputs = result + pairs.to(tl.int64)[:, None] * H + rows[None, :]
        tl.store(p_outputs, b_outputs.to(result.dtype.element_ty), mask=is_output)
    else:
        rows = tl.minimum(tl.program_id(0) * HALF + lanes // 2, width - 1) + lanes % 2 * width
        tokens = pairs // SLOTS
        both = _multiply(source, tokens * H, is_pair, weights, rows * H, H, IS_WHOLE, BLOCK_K)
        gate, up = tl.split(tl.reshape(both, [M, HALF, 2]))
        b_inner = (silu(gate) * up).to(result.dtype.element_ty)
        columns = tl.program_id(0) * HALF + tl.arange(0, HALF)
        is_inner = is_pair[:, None] & (columns < width)[None, :]
        tl.store(result + places[:, None] * INNER + columns[None, :], b_inner, mask=is_inner)


@triton.jit(do_not_specialize=["first", "last"])
def grouped_kernel(
    source,
    order,
    tiles,
    experts,  # all, or those from first up to last
    shared,
    result,
    first,
    last,
    IS_PART: tl.constexpr,
    IS_DOWN: tl.constexpr,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    SHARED_I: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, i): for tile i, BLOCK_N rows of its expert's `down`, or of its `gate_up`: gates,
    and the ups of the same columns.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    LOW: tl.constexpr = min(BLOCK_M, LOW_PAIRS)
    PADDED: tl.constexpr = I % BLOCK_K + SHARED_I % BLOCK_K if IS_DOWN else H % BLOCK_K
    IS_WHOLE: tl.constexpr = PADDED == 0
    expert, place, row, num_pairs = load_tile(tiles)
    own, width, index = order + place, I, expert
    if IS_PART:
        num_pairs = tl.where((expert >= first) & (expert < last), num_pairs, 0)
        index = expert - first
    if IS_DOWN:
        source += row.to(tl.int64) * INNER
        weights = experts + index * (H * I)
    else:
        result += row.to(tl.int64) * INNER
        weights = experts + index * (2 * I * H)
    if SHARED_I > 0:
        weights = tl.where(expert == E, shared, weights)
        if SHARED_I != I:
            width = tl.where(expert == E, SHARED_I, I)
    if BLOCK_M > LOW and num_pairs > LOW:
        _multiply_tile(
            source, own, weights, result, num_pairs, width,
            IS_DOWN, IS_WHOLE, SLOTS, H, INNER, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if (num_pairs > 0) & (num_pairs <= LOW):
        _multiply_tile(
            source, own, weights, result, num_pairs, width,
            IS_DOWN, IS_WHOLE, SLOTS, H, INNER, LOW, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _add_pairs_kernel(
    outputs,
    weights,
    shared_weight,
    residual,
    out,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, n): BLOCK_H columns of token t."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_column = columns < H
    own = outputs + token * ((TOP_K + HAS_SHARED) * H) + columns
    total = tl.load(residual + token * H + columns, mask=is_column, other=0.0).to(tl.float32)
    for slot in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + slot)
        b_output = tl.load(own + slot * H, mask=is_column, other=0.0).to(tl.float32)
        # No kernel need write a pair whose weight is zero: it may be one of many of an empty slot.
        # It is read nevertheless: a mask would wait for the weight.
        total += tl.where(weight != 0.0, b_output, 0.0) * weight
    if HAS_SHARED:
        b_shared = tl.load(own + TOP_K * H, mask=is_column, other=0.0).to(tl.float32)
        total += b_shared * tl.load(shared_weight + token)
    tl.store(out + token * H + columns, total.to(out.dtype.element_ty), mask=is_column)
