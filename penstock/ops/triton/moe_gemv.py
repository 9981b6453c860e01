# mypy: disable-error-code="no-untyped-def"
"""The chosen experts of a few tokens, as GEMVs in two launches. Does no routing itself.

Every expert of every token is read for that token alone: with few tokens, hardly any expert is
chosen twice, and no tensor core has to be filled. A program loads all its weights at once, enough
that an SM has about 100 KB in flight. The shared expert is one more slot of a token, after its k.
"""

from __future__ import annotations

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
from penstock.ops.tuning import Tile, choose


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
) -> None:
    (num_tokens, k), (_, width, inner_width) = ids.shape, down.shape
    shared_width = 0 if shared_down is None else shared_down.shape[1]
    widest = max(inner_width, shared_width)
    inner = x.new_empty(num_tokens, k + 1, widest)
    shape = (num_experts, k, inner_width, width)
    dims = {"TOP_K": k, "H": width, "I": inner_width, "SHARED_I": shared_width, "INNER": widest}
    options = launch_options(x.device)

    tile = choose("moe_gate_up_gemv", shape, num_tokens, _gate_up_rule(width), x.device)
    grid = (cdiv(widest, tile["ROWS"]), num_tokens * (k + (shared_width > 0)))
    some = gate_up if shared_gate_up is None else shared_gate_up
    block_h = next_power_of_2(width)
    _gate_up_kernel[grid](
        x, ids, gate_up, some, inner, num_tokens, **dims, BLOCK_H=block_h, **tile, **options
    )

    tile = choose("moe_down_gemv", shape, num_tokens, _down_rule(k, inner_width), x.device)
    _down_kernel[cdiv(width, tile["ROWS"]), num_tokens](
        inner,
        weights,
        ids,
        down,
        residual,
        weights if shared_weight is None else shared_weight,
        down if shared_down is None else shared_down,
        out,
        **dims,
        BLOCK_I=next_power_of_2(inner_width),
        BLOCK_SHARED=next_power_of_2(max(shared_width, 1)),
        **tile,
        **options,
    )


def _gate_up_rule(width: int) -> Tile:
    """As many rows of gate, and as many of up, as make 16 KB in bf16: 128 bytes per thread."""
    return {"ROWS": max(1, 4096 // next_power_of_2(width)), "num_warps": 4, "num_stages": 1}


def _down_rule(k: int, inner_width: int) -> Tile:
    """As many rows, of all k experts, as make 16 KB in bf16: 128 bytes per thread."""
    block_i = next_power_of_2(inner_width)
    rows = max(1, 8192 // (next_power_of_2(k) * block_i))
    return {"ROWS": rows, "num_warps": min(max(block_i // 128, 1), 8), "num_stages": 1}


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles that `penstock tune` tries for a kernel; shape is (E, k, I, H)."""
    rows = {"moe_gate_up_gemv": (1, 2, 4, 8), "moe_down_gemv": (1, 2, 4, 8, 16)}[kernel]
    return [
        {"ROWS": n, "num_warps": warps, "num_stages": 1} for n in rows for warps in (1, 2, 4, 8)
    ]


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    x,
    ids,
    gate_up,
    shared_gate_up,
    inner,
    num_tokens,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    SHARED_I: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, p): the n-th ROWS intermediate values of pair p.

    Pairs: the shared expert's first, one per token, then slot j of token t at t * TOP_K + j. The
    shared weights do not depend on the routing, so their loads start at once.
    """
    let_next_start(PDL)
    i_tile, i_pair = tl.program_id(0), tl.program_id(1)
    num_shared = 0
    if SHARED_I > 0:
        num_shared = num_tokens
    is_shared = i_pair < num_shared
    i_routed = i_pair - num_shared
    token = tl.where(is_shared, i_pair, i_routed // TOP_K)
    slot = tl.where(is_shared, TOP_K, i_routed % TOP_K)
    width = tl.where(is_shared, SHARED_I, I)
    rows = i_tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_H)
    is_row = rows < width
    is_column = columns < H
    is_weight = is_row[:, None] & is_column[None, :]
    gate_places = rows[:, None] * H + columns[None, :]
    up_places = gate_places + width * H

    if is_shared:
        b_gate = tl.load(shared_gate_up + gate_places, mask=is_weight, other=0.0)
        b_up = tl.load(shared_gate_up + up_places, mask=is_weight, other=0.0)
        wait_for_previous(PDL)
    else:
        wait_for_previous(PDL)
        own = gate_up + tl.load(ids + i_routed).to(tl.int64) * (2 * I * H)
        b_gate = tl.load(own + gate_places, mask=is_weight, other=0.0)
        b_up = tl.load(own + up_places, mask=is_weight, other=0.0)

    b_x = tl.load(x + token * H + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    gate = tl.sum(b_gate.to(tl.float32) * b_x, axis=1)
    up = tl.sum(b_up.to(tl.float32) * b_x, axis=1)
    b_inner = silu(gate) * up
    tl.store(inner + (token * (TOP_K + 1) + slot) * INNER + rows, b_inner, mask=is_row)


@triton.jit
def _down_kernel(
    inner,
    weights,
    ids,
    down,
    residual,
    shared_weight,
    shared_down,
    out,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    SHARED_I: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, t): the n-th ROWS outputs of token t, over all its experts and the shared one.

    One tensor [ROWS, TOP_K, I] holds the weights: the loads of all experts overlap.
    """
    let_next_start(PDL)
    i_tile, i_token = tl.program_id(0), tl.program_id(1)
    rows = i_tile * ROWS + tl.arange(0, ROWS)
    is_row = rows < H
    shared_columns = tl.arange(0, BLOCK_SHARED)
    if SHARED_I > 0:
        is_weight = is_row[:, None] & (shared_columns < SHARED_I)[None, :]
        b_shared = tl.load(
            shared_down + rows[:, None] * SHARED_I + shared_columns[None, :],
            mask=is_weight,
            other=0.0,
        )
    wait_for_previous(PDL)

    slots = tl.arange(0, triton.next_power_of_2(TOP_K))
    columns = tl.arange(0, BLOCK_I)
    is_slot = slots < TOP_K
    is_inner = is_slot[:, None] & (columns < I)[None, :]
    experts = tl.load(ids + i_token * TOP_K + slots, mask=is_slot, other=0).to(tl.int64)
    starts = (experts * (H * I))[None, :, None] + (rows * I)[:, None, None]
    is_weight = is_row[:, None, None] & is_inner[None, :, :]
    b_down = tl.load(down + starts + columns[None, None, :], mask=is_weight, other=0.0)

    own_inner = inner + i_token * ((TOP_K + 1) * INNER)
    b_weights = tl.load(weights + i_token * TOP_K + slots, mask=is_slot, other=0.0)
    b_inner = tl.load(
        own_inner + slots[:, None] * INNER + columns[None, :], mask=is_inner, other=0.0
    )
    places = i_token * H + rows
    b_residual = tl.load(residual + places, mask=is_row, other=0.0).to(tl.float32)
    if SHARED_I > 0:
        is_column = shared_columns < SHARED_I
        b_shared_inner = tl.load(
            own_inner + TOP_K * INNER + shared_columns, mask=is_column, other=0.0
        )
        b_shared_weight = tl.load(shared_weight + i_token)
    # otherwise the compiler moves the last loads after the first uses
    tl.debug_barrier()

    b_scaled = b_inner.to(tl.float32) * b_weights[:, None]
    total = tl.sum(tl.sum(b_down.to(tl.float32) * b_scaled[None, :, :], axis=1), axis=1)
    if SHARED_I > 0:
        shared = tl.sum(b_shared.to(tl.float32) * b_shared_inner.to(tl.float32)[None, :], axis=1)
        total += shared * b_shared_weight
    tl.store(out + places, b_residual + total, mask=is_row)
