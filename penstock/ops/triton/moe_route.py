# mypy: disable-error-code="no-untyped-def"
"""Norm, router and top-k. Knows nothing of what the experts do.

A few tokens use the GEMV form, one launch: a program loads a few router rows before the preceding
kernel is complete, norms one token itself and multiplies. One more program per token reads the
logits from memory until all are there, and chooses its experts. A batch uses the split form, three
launches: the norm, the logits on tensor cores with K split over programs so that each waits for
memory once, and top-k, one warp per token. In both the gate of the shared expert counts as a last
group of router rows. Many tokens use the library's GEMM between a norm, which computes that gate
too, and top-k.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.reference.moe import ROUTED_TOKENS
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    prefetch_l2,
    wait_for_previous,
)
from penstock.ops.triton.matmul import multiply_unrounded
from penstock.ops.triton.norm import rms_norm, rms_norm_and_gate
from penstock.ops.tuning import Tile, choose
from penstock.ops.weight import Weight

GEMV_TOKENS = ROUTED_TOKENS  # above, tokens share the router's rows
SPLIT_TOKENS = 256  # above, the library is faster
WARP_TOKENS, MANY_TOKENS = 4, 2048  # per warp, above so many: it works on one while another waits
# Another tile sums in another order: with `deterministic` this one serves every number of tokens.
FIXED_TILE: Tile = {
    "BLOCK_M": 16,
    "BLOCK_N": 16,
    "BLOCK_K": 128,
    "NUM_SPLITS": 4,
    "num_warps": 4,
    "num_stages": 4,
}

LOWEST_RANK = tl.constexpr(-(1 << 31))
MINUS_ZERO = tl.constexpr(-(1 << 31))  # its bits
LOWEST = tl.constexpr(-3.0e38)  # stands for NaN, so that such a token gets valid experts


def norm_route(
    hidden: Tensor,  # [T, H]
    norm_weight: Tensor,  # [H] float32
    eps: float,
    router: Weight,  # [E, H]
    k: int,
    normalize: bool = True,
    shared_gate: Weight | None = None,  # [1, H]
    counters: Tensor | None = None,  # from `new_counters`; without them a kernel allocates its own
    slots: Tensor | None = None,  # [E] int32  the matrix of each expert; None: in order
    *,
    deterministic: bool = False,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor | None
]:  # [T, H], [T, k] float32, [T, k] int32, [T, 1] float32
    (num_tokens, width), num_experts = hidden.shape, router.shape[0]
    has_shared = shared_gate is not None
    assert hidden.is_contiguous()
    weights = hidden.new_empty(num_tokens, k, dtype=torch.float32)
    ids = hidden.new_empty(num_tokens, k, dtype=torch.int32)
    shared_weight = (
        None if shared_gate is None else hidden.new_empty(num_tokens, 1, dtype=torch.float32)
    )
    constants = {
        "E": num_experts,
        "TOP_K": k,
        "H": width,
        "NORMALIZE": normalize,
        "HAS_SHARED": has_shared,
        "HAS_SLOTS": slots is not None,
        "BLOCK_E": next_power_of_2(num_experts),
        **launch_options(hidden.device),
    }
    given = (
        hidden,
        norm_weight,
        router.values,
        (router if shared_gate is None else shared_gate).values,
    )
    chosen = (
        weights,
        ids,
        weights if shared_weight is None else shared_weight,
        ids if slots is None else slots,
    )
    shape = (num_experts, width)
    if num_tokens > SPLIT_TOKENS and not deterministic:
        x = _route_by_library(given, chosen, eps, constants)
        return x, weights, ids, shared_weight

    if num_tokens > GEMV_TOKENS or deterministic:
        x = rms_norm(hidden, norm_weight, eps)
        tile = FIXED_TILE
        if not deterministic:
            tile = choose("route_split", shape, num_tokens, _split_rule(), x.device)
        _route_split(x, *given[2:], chosen, tile, constants)
        return x, weights, ids, shared_weight
    x = torch.empty_like(hidden)
    logits = zeroed(counters, num_tokens * (num_experts + has_shared), hidden.device)
    tile = choose("route_gemv", shape, num_tokens, _gemv_rule(width), hidden.device)
    grid = (cdiv(num_experts, tile["ROWS"]) + has_shared + 1, num_tokens)
    _route_gemv_kernel[grid](
        *given,
        x,
        logits,
        *chosen,
        eps,
        **constants,
        BLOCK_H=next_power_of_2(width),
        **tile,
    )
    return x, weights, ids, shared_weight


def _route_split(
    x: Tensor,  # [T, H]  normed
    router: Tensor,
    shared_gate: Tensor,
    chosen: tuple[Tensor, ...],
    tile: Tile,
    constants: dict[str, Any],
) -> None:
    (num_tokens, width), num_experts = x.shape, constants["E"]
    num_splits = tile["NUM_SPLITS"]
    has_shared = constants["HAS_SHARED"]
    logits = torch.empty(
        num_splits, num_tokens, num_experts + has_shared, dtype=torch.float32, device=x.device
    )
    options = launch_options(x.device)
    grid = (
        cdiv(num_experts, tile["BLOCK_N"]) + has_shared,
        cdiv(num_tokens, tile["BLOCK_M"]),
        num_splits,
    )
    _route_logits_kernel[grid](
        x,
        router,
        shared_gate,
        logits,
        num_tokens,
        E=num_experts,
        H=width,
        HAS_SHARED=has_shared,
        **tile,
        **options,
    )
    _choose(logits, chosen, constants)


def _choose(
    logits: Tensor,  # [splits, T, E], or [splits, T, E + 1] with the shared expert's gate
    chosen: tuple[Tensor, ...],
    constants: dict[str, Any],
) -> None:
    num_splits, num_tokens, width = logits.shape
    own = WARP_TOKENS if num_tokens > MANY_TOKENS else 1
    more = {"HAS_SHARED": width > constants["E"], "NUM_SPLITS": num_splits, "BLOCK_M": own}
    choosing = {name: value for name, value in constants.items() if name != "H"} | more
    _choose_kernel[(cdiv(num_tokens, own),)](logits, *chosen, num_tokens, num_warps=1, **choosing)


def _route_by_library(
    given: tuple[Tensor, ...],
    chosen: tuple[Tensor, ...],
    eps: float,
    constants: dict[str, Any],
) -> Tensor:  # [T, H]
    hidden, norm_weight, router, shared_gate = given
    if constants["HAS_SHARED"]:
        x = rms_norm_and_gate(hidden, norm_weight, eps, shared_gate, chosen[2])
    else:
        x = rms_norm(hidden, norm_weight, eps)
    logits = torch.empty(1, len(x), constants["E"], dtype=torch.float32, device=x.device)
    multiply_unrounded(x, router, logits[0])
    _choose(logits, chosen, constants)
    return x


def zeroed(counters: Tensor | None, num_needed: int, device: torch.device) -> Tensor:
    """The caller's counters, or new ones, which cost a launch, if it has none or too few."""
    if counters is not None and len(counters) >= num_needed:
        return counters
    return torch.zeros(num_needed, dtype=torch.int32, device=device)


def _gemv_rule(width: int) -> Tile:
    """One warp and 8 KB of bf16 router rows per program: several warps would wait for each
    other.
    """
    return {"ROWS": max(1, 4096 // next_power_of_2(width)), "num_warps": 1, "num_stages": 1}


def _split_rule() -> Tile:
    """64 tokens per program, so that most steps read the router once; with fewer, Triton does not
    use wgmma. Two stages: with four, steps take longer by more than this kernel does, as if the
    kernels behind it found no room.
    """
    return {**FIXED_TILE, "BLOCK_M": 64, "BLOCK_N": 32, "NUM_SPLITS": 8, "num_stages": 2}


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles that `penstock tune` tries for a kernel; shape is (E, H)."""
    if kernel == "route_gemv":
        return [
            {"ROWS": rows, "num_warps": warps, "num_stages": 1}
            for rows in (1, 2, 4, 8)
            for warps in (1, 2, 4, 8)
            if rows <= 2 * warps
        ]
    assert kernel == "route_split"
    return [
        {
            "BLOCK_M": m,
            "BLOCK_N": n,
            "BLOCK_K": k,
            "NUM_SPLITS": splits,
            "num_warps": 4,
            "num_stages": stages,
        }
        for m in (16, 32, 64)
        for n in (16, 32)
        for k, splits, stages in ((128, 4, 4), (128, 8, 2), (64, 8, 4), (128, 16, 1))
    ]


@triton.jit
def _router_rows(
    router, shared_gate, i_group, E: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr
):
    """The start of a group of rows, the indices of its logits, and a mask. The last group is the
    shared gate.
    """
    first = i_group * ROWS
    start = tl.where(first < E, router + first * H, shared_gate)
    rows = tl.minimum(first, E) + tl.arange(0, ROWS)
    is_row = rows < tl.where(first < E, E, E + 1)
    return start, rows, is_row


@triton.jit
def _ordered(x):
    """Float32 to an int32 with the same order, or the bits of such an integer back."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _choose_experts(
    left,  # [M, BLOCK_E]  logits
    weights,
    ids,
    slots_of,
    tokens,  # [M] int64
    is_token,  # [M]
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """The TOP_K largest logits of each token, the lower id first among ties, with their softmax."""
    NUM_TOKENS: tl.constexpr = left.shape[0]
    BLOCK_TOP_K: tl.constexpr = triton.next_power_of_2(TOP_K)
    experts = tl.arange(0, left.shape[1])[None, :]
    slots = tl.arange(0, BLOCK_TOP_K)[None, :]
    left = tl.where(left == left, left, LOWEST)
    left = tl.where(experts < E, left, float("-inf"))
    top = tl.max(left, axis=1)
    total = tl.sum(tl.exp(left - top[:, None]), axis=1)

    chosen = tl.zeros([NUM_TOKENS, BLOCK_TOP_K], tl.int32)
    chosen_logits = tl.full([NUM_TOKENS, BLOCK_TOP_K], float("-inf"), tl.float32)
    # As integers of the same order, a warp finds the largest in one instruction.
    ranks = _ordered(left + 0.0)  # -0 becomes 0
    # A bound that the compiler does not know: unrolled, the loop would wait for its instructions.
    for slot in range(TOP_K + tl.program_id(2)):
        best = tl.max(ranks, axis=1)
        expert = tl.min(tl.where(ranks == best[:, None], experts, left.shape[1]), axis=1)
        logit = _ordered(best).to(tl.float32, bitcast=True)
        chosen = tl.where(slots == slot, expert[:, None], chosen)
        chosen_logits = tl.where(slots == slot, logit[:, None], chosen_logits)
        ranks = tl.where(experts == expert[:, None], LOWEST_RANK, ranks)

    share = tl.exp(chosen_logits - top[:, None])
    if NORMALIZE:
        total = tl.sum(share, axis=1)
    places = tokens[:, None] * TOP_K + slots
    is_chosen = is_token[:, None] & (slots < TOP_K)
    tl.store(weights + places, share / total[:, None], mask=is_chosen)
    if HAS_SLOTS:
        chosen = tl.load(slots_of + chosen, mask=is_chosen, other=0)
    tl.store(ids + places, chosen, mask=is_chosen)


@triton.jit
def _choose_from_memory(
    logits,
    weights,
    ids,
    shared_weight,
    slots_of,
    tokens,  # [M] int64
    is_token,  # [M]
    split_stride,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Logits come as NUM_SPLITS parts, which are added first: [NUM_SPLITS, T, E], or [NUM_SPLITS,
    T, E + 1] with the shared expert's gate.
    """
    experts = tl.arange(0, BLOCK_E)[None, :]
    own = logits + tokens * (E + HAS_SHARED)
    is_logit = is_token[:, None] & (experts < E)
    b_logits = tl.zeros([tokens.shape[0], BLOCK_E], tl.float32)
    gate = tl.zeros([tokens.shape[0]], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        part = own + split * split_stride
        # Bypasses L1: other SMs wrote these.
        b_logits += tl.load(part[:, None] + experts, mask=is_logit, other=0.0, cache_modifier=".cg")
        if HAS_SHARED:
            gate += tl.load(part + E, mask=is_token, other=0.0, cache_modifier=".cg")
    _choose_experts(
        b_logits, weights, ids, slots_of, tokens, is_token, E, TOP_K, NORMALIZE, HAS_SLOTS
    )
    if HAS_SHARED:
        tl.store(shared_weight + tokens, 1.0 / (1.0 + tl.exp(-gate)), mask=is_token)


@triton.jit
def _route_gemv_kernel(
    hidden,
    norm_weight,
    router,
    shared_gate,
    x,
    logits,  # [T, E] int32, or [T, E + 1]  zeros before and after
    weights,
    ids,
    shared_weight,
    slots_of,
    eps,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (g, t): the g-th ROWS rows of the router, token t. The last one of a token, which
    starts after the others, waits for them and chooses.
    """
    let_next_start(PDL)
    i_group, i_token = tl.program_id(0), tl.program_id(1)
    own_logits = logits + i_token.to(tl.int64) * (E + HAS_SHARED)
    if i_group < tl.num_programs(0) - 1:
        given = (hidden, norm_weight, router, shared_gate, x, own_logits, i_group, i_token, eps)
        _send_logits(*given, E, H, BLOCK_H, ROWS, PDL)
    else:
        wait_for_previous(PDL)
        tokens = i_token + tl.arange(0, 1).to(tl.int64)
        is_token = tokens == i_token
        experts = tl.arange(0, BLOCK_E)
        left = _receive(own_logits + experts, experts < E)[None, :]
        chosen = (weights, ids, slots_of)
        _choose_experts(left, *chosen, tokens, is_token, E, TOP_K, NORMALIZE, HAS_SLOTS)
        if HAS_SHARED:
            gate = _receive(own_logits + E + tl.arange(0, 1), is_token)
            tl.store(shared_weight + tokens, 1.0 / (1.0 + tl.exp(-gate)), mask=is_token)


@triton.jit
def _send_logits(
    hidden,
    norm_weight,
    router,
    shared_gate,
    x,
    own_logits,
    i_group,
    i_token,
    eps,
    E: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    start, rows, is_row = _router_rows(router, shared_gate, i_group, E, H, ROWS)
    columns = tl.arange(0, BLOCK_H)
    is_column = columns < H
    places = tl.arange(0, ROWS)[:, None] * H + columns[None, :]
    b_router = tl.load(start + places, mask=is_row[:, None] & is_column[None, :], other=0.0)
    b_norm = tl.load(norm_weight + columns, mask=is_column, other=0.0)
    wait_for_previous(PDL)

    own = i_token.to(tl.int64) * H + columns
    b_hidden = tl.load(hidden + own, mask=is_column, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_hidden * b_hidden, axis=0) / H + eps)
    b_x = (b_hidden * scale * b_norm).to(x.dtype.element_ty)
    b_logits = tl.sum(b_router.to(tl.float32) * b_x.to(tl.float32)[None, :], axis=1)
    _send(own_logits + rows, b_logits, is_row)
    if i_group == 0:
        tl.store(x + own, b_x, mask=is_column)


@triton.jit
def _send(pointers, values, mask):
    """Float32 as bits that are not all zero: zeros mean that nothing is there yet."""
    bits = values.to(tl.int32, bitcast=True)
    tl.store(pointers, tl.where(bits == 0, MINUS_ZERO, bits), mask=mask)


@triton.jit
def _receive(pointers, mask):
    """What other programs of this launch send, as soon as all of it is there. Leaves zeros."""
    bits = tl.load(pointers, mask=mask, other=1, volatile=True)
    while tl.sum((bits == 0).to(tl.int32), axis=0) > 0:
        bits = tl.load(pointers, mask=mask, other=1, volatile=True)
    tl.store(pointers, tl.zeros_like(bits), mask=mask)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_logits_kernel(
    x,
    router,
    shared_gate,
    logits,  # [NUM_SPLITS, T, E], or [NUM_SPLITS, T, E + 1]
    num_tokens,
    E: tl.constexpr,
    H: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (g, b, s): router rows of group g, tokens of block b, columns of split s."""
    let_next_start(PDL)
    SPLIT: tl.constexpr = (H + NUM_SPLITS * BLOCK_K - 1) // (NUM_SPLITS * BLOCK_K) * BLOCK_K
    LINE: tl.constexpr = 1024 // router.dtype.element_ty.primitive_bitwidth  # of 128 bytes
    LINES: tl.constexpr = SPLIT // LINE
    i_group, i_block, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, rows, is_row = _router_rows(router, shared_gate, i_group, E, H, BLOCK_N)
    own_rows = tl.where(is_row, tl.arange(0, BLOCK_N), 0)
    first_column = i_split * SPLIT
    if LINES & (LINES - 1) == 0:
        lines = tl.minimum(first_column + tl.arange(0, LINES) * LINE, H - 1)
        prefetch_l2(start + own_rows[:, None] * H + lines[None, :], PDL)
    wait_for_previous(PDL)

    tokens = i_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    columns = tl.arange(0, BLOCK_K)
    b_logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(first_column, tl.minimum(first_column + SPLIT, H), BLOCK_K):
        at = first + columns
        is_column = at < H
        b_router = tl.load(
            start + own_rows[None, :] * H + at[:, None], mask=is_column[:, None], other=0.0
        )
        is_own = is_token[:, None] & is_column[None, :]
        b_x = tl.load(x + tokens[:, None] * H + at[None, :], mask=is_own, other=0.0)
        if b_router.dtype != b_x.dtype:
            b_router, b_x = b_router.to(tl.float32), b_x.to(tl.float32)
        b_logits = tl.dot(b_x, b_router, b_logits, input_precision="ieee")
    places = (i_split * num_tokens + tokens)[:, None] * (E + HAS_SHARED) + rows[None, :]
    tl.store(logits + places, b_logits, mask=is_token[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_kernel(
    logits,  # [NUM_SPLITS, T, E], or [NUM_SPLITS, T, E + 1]
    weights,
    ids,
    shared_weight,
    slots_of,
    num_tokens,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program b: the b-th BLOCK_M tokens."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    _choose_from_memory(
        logits,
        weights,
        ids,
        shared_weight,
        slots_of,
        tokens,
        tokens < num_tokens,
        num_tokens.to(tl.int64) * (E + HAS_SHARED),
        E,
        TOP_K,
        NORMALIZE,
        HAS_SHARED,
        HAS_SLOTS,
        BLOCK_E,
        NUM_SPLITS,
    )
