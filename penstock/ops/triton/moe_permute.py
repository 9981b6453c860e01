# mypy: disable-error-code="no-untyped-def"
"""Sorts pairs by expert and divides them into tiles. Knows nothing of weights.

A pair is a token with one of its experts: pair t * slots + j is slot j of token t. A shared expert
is the last slot of every token, and counts as expert E. The list is built on the device, in one
launch; the host knows only how many tiles the worst routing needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.launch import (
    arrives_last,
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.triton.moe_route import zeroed
from penstock.ops.tuning import bucket

MOST_ALONE = 1024  # pairs that one program lists
# A counter per sector of L2: atomics to the same sector wait for each other.
SPREAD = 8


def list_pairs(
    ids: Tensor, num_experts: int, slots: int, height: int, counters: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """order [(E + 1) * T]: the pairs of expert e start at index e * T. tiles [n, 4]: an expert, the
    index of its first pair there, the row of that pair among all by expert, and the number of
    pairs: 0 in the last tiles, since n is what the worst routing needs.
    """
    num_tokens, k = ids.shape
    num_tiles = num_tokens * k // height + min(num_experts, num_tokens * k)
    if slots > k:
        num_tiles += cdiv(num_tokens, height)
    order = ids.new_empty((num_experts + 1) * num_tokens, dtype=torch.int32)
    tiles = ids.new_empty(num_tiles, 4, dtype=torch.int32)
    num_pairs = num_tokens * slots
    block = 256 if bucket(num_tokens) <= 2048 else 1024
    if num_pairs <= MOST_ALONE:  # a single program waits for no other
        block = 256 if num_pairs <= 256 else MOST_ALONE
    _list_tiles_kernel[cdiv(num_pairs, block),](
        ids,
        # the number of pairs of every expert, and of finished programs
        zeroed(counters, SPREAD * (num_experts + 1), ids.device),
        order,
        tiles,
        num_tokens,
        num_tiles,
        E=num_experts,
        TOP_K=k,
        SLOTS=slots,
        SPREAD=SPREAD,
        IS_ALONE=num_pairs <= block,
        BLOCK=block,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_M=height,
        num_warps=block // 64,
        **launch_options(ids.device),
    )
    return order, tiles


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _list_tiles_kernel(
    ids,
    counts,
    order,
    tiles,
    num_tokens,
    num_tiles,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SPREAD: tl.constexpr,
    IS_ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program b: lists the b-th BLOCK pairs, in any order; the last program divides them into
    tiles.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tokens, slots = pairs // SLOTS, pairs % SLOTS
    is_pair = tokens < num_tokens
    is_routed = is_pair & (slots < TOP_K)
    experts = tl.load(ids + tokens * TOP_K + slots, mask=is_routed, other=E).to(tl.int32)
    places = tl.atomic_add(counts + experts * SPREAD, 1, mask=is_routed, sem="relaxed")
    places = tl.where(is_routed, places, tokens)
    tl.store(order + experts * num_tokens + places, pairs, mask=is_pair & (places < num_tokens))
    given = (counts, tiles, num_tokens, num_tiles)
    if IS_ALONE:
        tl.debug_barrier()  # all threads have counted
        _cut_tiles(*given, E, TOP_K, SLOTS, SPREAD, BLOCK_E, BLOCK_M)
    elif arrives_last(counts + E * SPREAD, tl.num_programs(0)):
        _cut_tiles(*given, E, TOP_K, SLOTS, SPREAD, BLOCK_E, BLOCK_M)


@triton.jit
def _cut_tiles(
    counts,
    tiles,
    num_tokens,
    num_tiles,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The shared expert's tiles, then those of experts 0, 1, ..., then empty ones."""
    experts = tl.arange(0, BLOCK_E)
    # Bypasses L1: other SMs counted these.
    sizes = tl.load(counts + experts * SPREAD, mask=experts < E, other=0, cache_modifier=".cg")
    sizes = tl.minimum(sizes, num_tokens)
    tl.debug_barrier()  # with more threads than experts, several read the same count
    tl.store(counts + experts * SPREAD, 0, mask=experts < E)
    needed = (sizes + BLOCK_M - 1) // BLOCK_M
    rows = tl.cumsum(sizes, axis=0) - sizes
    at = tl.cumsum(needed, axis=0) - needed

    num_shared = 0
    if SLOTS > TOP_K:
        num_shared = (num_tokens + BLOCK_M - 1) // BLOCK_M
        for first in range(0, num_shared, BLOCK_E):
            i_tile = first + experts
            place = i_tile * BLOCK_M
            left = tl.minimum(num_tokens - place, BLOCK_M)
            row = num_tokens * TOP_K + place
            _store_tile(tiles, i_tile, E, E * num_tokens + place, row, left, i_tile < num_shared)
    for i in range(tl.max(needed, axis=0)):
        place = i * BLOCK_M
        left = tl.minimum(sizes - place, BLOCK_M)
        i_tile = num_shared + at + i
        is_tile = (i < needed) & (i_tile < num_tiles)
        _store_tile(
            tiles, i_tile, experts, experts * num_tokens + place, rows + place, left, is_tile
        )
    for first in range(num_shared + tl.sum(needed, axis=0), num_tiles, BLOCK_E):
        i_tile = first + experts
        _store_tile(tiles, i_tile, 0, 0, 0, 0, i_tile < num_tiles)


@triton.jit
def _store_tile(tiles, i_tile, expert, place, row, num_pairs, is_tile):
    own = tiles + i_tile * 4
    tl.store(own, expert, mask=is_tile)
    tl.store(own + 1, place, mask=is_tile)
    tl.store(own + 2, row, mask=is_tile)
    tl.store(own + 3, num_pairs, mask=is_tile)


@triton.jit
def load_tile(tiles):
    own = tiles + tl.program_id(1) * 4
    return tl.load(own).to(tl.int64), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
