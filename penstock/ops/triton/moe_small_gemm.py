# mypy: disable-error-code="no-untyped-def"
"""The chosen experts of many tokens, on tensor cores. Does no routing itself, and the host never
needs to know the routing.

A pair is a token with one of its experts: pair t * k + j is slot j of token t, pair T * k + t is
token t with the shared expert. Three launches: gate and up, down, and the weighted sum of every
token. A program of the first two owns an expert and a tile of its rows, which it multiplies with
the expert's pairs, BLOCK_M at a time; the weights are the left operand, so that a few pairs still
fill the tensor cores. There are as many programs as the worst routing needs: those without pairs
exit at once.

With fewer pairs than experts, each program scans all ids, and works if its own pair is the first of
its expert or of a tile of it. Otherwise a preceding launch lists the pairs by expert.

A pair's results do not depend on which pairs share its tile, and no sum depends on the order of
programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.activation import silu
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.tuning import Tile, bucket, choose

# For batch-invariant results: good at all sizes, the best at none.
DETERMINISTIC_TILE: Tile = {
    "BLOCK_M": 32,
    "BLOCK_N": 64,
    "BLOCK_K": 64,
    "num_warps": 4,
    "num_stages": 4,
}
WIDE_TOKENS = 256  # up to here pair outputs are float32; for more, that is too much traffic


def run(
    out: Tensor,  # [T, H]
    x: Tensor,  # [T, H]
    weights: Tensor,  # [T, k] float32
    ids: Tensor,  # [T, k]
    gate_up: Tensor,  # [E, 2I, H]
    down: Tensor,  # [E, H, I]
    residual: Tensor,  # [T, H]
    shared_weight: Tensor | None,  # [T, 1] float32
    shared_gate_up: Tensor | None,  # [2I', H]
    shared_down: Tensor | None,  # [H, I']
    num_experts: int,  # of the layer; the stacks may hold more or fewer
    *,
    deterministic: bool,
) -> None:
    (num_tokens, k), (num_stacked, width, inner_width) = ids.shape, down.shape
    shared_width = 0 if shared_down is None else shared_down.shape[1]
    widest = max(inner_width, shared_width)
    num_rows = num_tokens * (k + (shared_width > 0))
    is_wide = deterministic or num_tokens <= WIDE_TOKENS
    inner = x.new_empty(num_rows, widest)
    outputs = x.new_empty(num_rows, width, dtype=torch.float32 if is_wide else x.dtype)

    dims = {"TOP_K": k, "H": width, "I": inner_width, "SHARED_I": shared_width, "INNER": widest}
    options = launch_options(x.device)
    shape = (num_experts, k, inner_width, width)
    # Constants follow the next power of two of tokens, so that few kernels are compiled.
    most_pairs = bucket(num_tokens) * k
    mean_pairs = most_pairs // num_experts
    is_listed = most_pairs > num_experts
    order, starts = _list_pairs(ids, num_stacked, most_pairs) if is_listed else (ids, ids)
    for name, is_down, source, experts, shared, result, num_columns in (
        ("moe_gate_up_small_gemm", False, x, gate_up, shared_gate_up, inner, 2 * widest),
        ("moe_down_small_gemm", True, inner, down, shared_down, outputs, width),
    ):
        tile = DETERMINISTIC_TILE
        if not deterministic:
            tile = choose(name, shape, num_tokens, _rule(mean_pairs, x.element_size()), x.device)
        splits = max(1, bucket(2 * mean_pairs) // tile["BLOCK_M"])
        num_shared = cdiv(num_tokens, tile["BLOCK_M"]) if shared_width else 0
        num_groups = num_shared + (num_stacked * splits if is_listed else num_tokens * k)
        places = (
            source,
            ids,
            order,
            starts,
            experts,
            experts if shared is None else shared,
            result,
        )
        constants = {**dims, "IS_LISTED": is_listed, "SPLITS": splits, **tile, **options}
        constants |= {"IS_DOWN": is_down, "BLOCK_IDS": next_power_of_2(num_experts)}
        product_kernel[cdiv(num_columns, tile["BLOCK_N"]), num_groups](
            *places, num_tokens, num_shared, **constants
        )

    block_h = min(512, next_power_of_2(width))
    _sum_kernel[num_tokens, cdiv(width, block_h)](
        outputs,
        weights,
        weights if shared_weight is None else shared_weight,
        residual,
        out,
        num_tokens,
        TOP_K=k,
        H=width,
        HAS_SHARED=shared_width > 0,
        BLOCK_H=block_h,
        num_warps=4,
        **options,
    )


def _list_pairs(
    ids: Tensor, num_experts: int, most_pairs: int
) -> tuple[Tensor, Tensor]:  # [T * k], [E + 1]
    """The pairs of expert e are order[starts[e] : starts[e + 1]]."""
    order = ids.new_empty(ids.numel(), dtype=torch.int32)
    starts = ids.new_empty(num_experts + 1, dtype=torch.int32)
    block = 1024 if most_pairs <= 4096 else 4096
    _list_pairs_kernel[num_experts,](
        ids,
        order,
        starts,
        ids.numel(),
        E=num_experts,
        BLOCK=block,
        num_warps=8,
        **launch_options(ids.device),
    )
    return order, starts


def _rule(mean_pairs: int, element_size: int) -> Tile:
    """Tiles as tall as twice an expert's mean number of pairs. Short ones leave room for four
    programs per SM: one starts while others wait for weights.
    """
    block_m = min(max(bucket(2 * mean_pairs), 16), 128)
    is_low = block_m <= 32
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 64 if is_low else 128,
        "BLOCK_K": 128 // element_size,
        "num_warps": 4 if is_low else block_m // 16,
        "num_stages": 5 if is_low else 3,
    }


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles that `penstock tune` tries for either kernel; shape is (E, k, I, H)."""
    mean = bucket(num_tokens) * shape[1] // shape[0]
    small = [
        (64, 64, 4),
        (64, 64, 5),
        (64, 64, 7),
        (64, 128, 3),
        (64, 128, 4),
        (64, 256, 2),
        (64, 256, 3),
    ]
    large = [(128, 64, 3), (128, 64, 4), (128, 64, 5), (128, 128, 2), (128, 128, 3)]
    heights = [16] if mean <= 4 else [16, 32] if mean <= 16 else [32, 64, 128]
    return [
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
        for m in heights
        for n, k, stages in (small + large if m <= 32 else large)
        for warps in ((4,) if n == 64 else (4, 8))
    ]


@triton.jit(do_not_specialize=["num_pairs"])
def _list_pairs_kernel(
    ids, order, starts, num_pairs, E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program e: counts the pairs of the experts before e, then lists those of e, in pair order."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        chosen = tl.load(ids + first + lanes, mask=first + lanes < num_pairs, other=E)
        before += (chosen < i_expert).to(tl.int32)
    at = tl.sum(before, axis=0)
    tl.store(starts + i_expert, at)
    for first in range(0, num_pairs, BLOCK):
        chosen = tl.load(ids + first + lanes, mask=first + lanes < num_pairs, other=E)
        is_own = chosen == i_expert
        places = at + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(order + places, first + lanes, mask=is_own)
        at += tl.sum(is_own.to(tl.int32), axis=0)
    if i_expert == E - 1:
        tl.store(starts + E, num_pairs)


@triton.jit
def _find_pairs(
    ids,
    starts,
    num_tokens,
    num_shared,
    TOP_K: tl.constexpr,
    IS_LISTED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The expert whose pairs a program multiplies, and the range in its list: first to stop.

    Programs: num_shared tiles of tokens for the shared expert. Then, if pairs are listed, SPLITS
    per expert, each taking every SPLITS-th tile. If they are not, one per pair: every BLOCK_M-th
    pair of an expert works, for itself and those that follow, which are `found`.
    """
    i_group = tl.program_id(1)
    is_shared = i_group < num_shared
    i_routed = tl.maximum(i_group - num_shared, 0)
    found = tl.zeros([BLOCK_M], tl.int32)
    if IS_LISTED:
        expert = i_routed // SPLITS
        first = tl.load(starts + expert) + i_routed % SPLITS * BLOCK_M
        stop = tl.load(starts + expert + 1)
    else:
        pairs = tl.arange(0, BLOCK_IDS)
        expert = tl.load(ids + i_routed).to(tl.int32)
        chosen = tl.load(ids + pairs, mask=pairs < num_tokens * TOP_K, other=-1).to(tl.int32)
        is_own = (chosen == expert).to(tl.int32)
        first = tl.sum(tl.where(pairs < i_routed, is_own, 0), axis=0)
        stop = tl.where(
            first % BLOCK_M == 0, tl.minimum(tl.sum(is_own, axis=0), first + BLOCK_M), 0
        )
        ranks = tl.where(is_own > 0, tl.cumsum(is_own, axis=0) - 1, -1)
        lanes = first + tl.arange(0, BLOCK_M)
        found = tl.sum(tl.where(ranks[:, None] == lanes[None, :], pairs[:, None], 0), axis=0)
    first = tl.where(is_shared, i_group * BLOCK_M, first)
    stop = tl.where(is_shared, tl.minimum(first + BLOCK_M, num_tokens), stop)
    return is_shared, expert.to(tl.int64), first, stop, found


@triton.jit
def _pairs_at(
    at, stop, is_shared, found, order, num_pairs, IS_LISTED: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The pairs at indices at : at + BLOCK_M of an expert's list, and a mask."""
    lanes = at + tl.arange(0, BLOCK_M)
    is_pair = lanes < stop
    pairs = found
    if IS_LISTED:
        pairs = tl.load(order + lanes, mask=lanes < tl.where(is_shared, 0, stop), other=0)
    pairs = tl.where(is_shared, num_pairs + lanes, pairs)
    return tl.where(is_pair, pairs, 0).to(tl.int64), is_pair


@triton.jit
def _multiply(
    weights,
    row_starts,  # [BLOCK_N]
    is_row,
    source,
    pair_starts,  # [BLOCK_M]
    is_pair,
    width,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of weights times rows of the source, over `width`: [BLOCK_N, BLOCK_M] float32."""
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, width, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        is_column = columns < width
        b_weights = tl.load(
            weights + row_starts[:, None] + columns[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        b_source = tl.load(
            source + pair_starts[None, :] + columns[:, None],
            mask=is_pair[None, :] & is_column[:, None],
            other=0.0,
        )
        total = tl.dot(b_weights, b_source, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_tokens", "num_shared"])
def product_kernel(
    source,  # x, or the intermediate activations of pairs
    ids,
    order,
    starts,
    experts,
    shared,
    result,  # the intermediate activations of pairs, or their outputs
    num_tokens,
    num_shared,
    IS_DOWN: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    SHARED_I: tl.constexpr,
    INNER: tl.constexpr,
    IS_LISTED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, g): BLOCK_N rows of `down`, or of `gate_up`: gates, and the ups of the same
    columns.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    HALF: tl.constexpr = BLOCK_N // 2
    is_shared, expert, first, stop, found = _find_pairs(
        ids, starts, num_tokens, num_shared, TOP_K, IS_LISTED, SPLITS, BLOCK_IDS, BLOCK_M
    )
    width = tl.where(is_shared, SHARED_I, I)
    lanes = tl.arange(0, BLOCK_N)
    if IS_DOWN:
        weights = tl.where(is_shared, shared, experts + expert * (H * I))
        rows = tl.program_id(0) * BLOCK_N + lanes
        is_row, row_starts = rows < H, rows * width
    else:
        weights = tl.where(is_shared, shared, experts + expert * (2 * I * H))
        rows = tl.program_id(0) * HALF + lanes % HALF
        is_row, row_starts = rows < width, tl.where(lanes < HALF, rows, rows + width) * H
        columns = tl.program_id(0) * HALF + tl.arange(0, HALF)

    num_pairs = num_tokens * TOP_K
    for at in range(first, stop, BLOCK_M * SPLITS):
        pairs, is_pair = _pairs_at(at, stop, is_shared, found, order, num_pairs, IS_LISTED, BLOCK_M)
        if IS_DOWN:
            pair_starts = pairs * INNER
            b_outputs = _multiply(
                weights,
                row_starts,
                is_row,
                source,
                pair_starts,
                is_pair,
                width,
                BLOCK_N,
                BLOCK_M,
                BLOCK_K,
            )
            is_output = is_row[:, None] & is_pair[None, :]
            tl.store(result + rows[:, None] + (pairs * H)[None, :], b_outputs, mask=is_output)
        else:
            pair_starts = tl.where(pairs < num_pairs, pairs // TOP_K, pairs - num_pairs) * H
            both = _multiply(
                weights,
                row_starts,
                is_row,
                source,
                pair_starts,
                is_pair,
                H,
                BLOCK_N,
                BLOCK_M,
                BLOCK_K,
            )
            gate, up = tl.split(tl.permute(tl.reshape(both, [2, HALF, BLOCK_M]), [1, 2, 0]))
            b_inner = silu(gate) * up
            is_inner = (columns < width)[:, None] & is_pair[None, :]
            tl.store(result + columns[:, None] + (pairs * INNER)[None, :], b_inner, mask=is_inner)


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kernel(
    outputs,
    weights,
    shared_weight,
    residual,
    out,
    num_tokens,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, n): BLOCK_H columns of token t: the weighted outputs of its pairs, plus the
    residual.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_column = columns < H
    pairs = token * TOP_K + tl.arange(0, triton.next_power_of_2(TOP_K))
    is_pair = pairs < (token + 1) * TOP_K
    b_outputs = tl.load(
        outputs + pairs[:, None] * H + columns[None, :],
        mask=is_pair[:, None] & is_column[None, :],
        other=0.0,
    )
    b_weights = tl.load(weights + pairs, mask=is_pair, other=0.0)
    total = tl.load(residual + token * H + columns, mask=is_column, other=0.0).to(tl.float32)
    total += tl.sum(b_outputs.to(tl.float32) * b_weights[:, None], axis=0)
    if HAS_SHARED:
        b_shared = tl.load(
            outputs + (num_tokens * TOP_K + token) * H + columns, mask=is_column, other=0.0
        )
        total += b_shared.to(tl.float32) * tl.load(shared_weight + token)
    tl.store(out + token * H + columns, total, mask=is_column)
