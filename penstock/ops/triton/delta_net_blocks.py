# mypy: disable-error-code="no-untyped-def"
"""The Gated DeltaNet mixer for rows of several tokens: the delta rule in its block-wise form.

Four launches, or three. The first convolves (delta_net_convolve), the second prepares the blocks of
all rows at once (delta_net_prepare). The third scans each row, block by block, with one program per
value head and BLOCK_V of its columns, whose state stays in registers. If a program has all columns
of a head it also applies the gated norm; otherwise the fourth launch does.

Only the third launch writes rings and states, each entry by the program that may have read it: a
row's target slot may be its initial slot, whose backlog that launch adds first. A row's bits depend
on the tiles and on where its blocks begin and end, never on what else is in the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.float8 import RoundedTokens
from penstock.ops.reference import rows
from penstock.ops.reference.backlog import Backlog
from penstock.ops.reference.rows import TokenBlocks
from penstock.ops.triton.activation import silu
from penstock.ops.triton.delta_net_backlog import (
    backlog_of,
    end_backlog,
    entry_of,
    late_tokens,
    most_late,
)
from penstock.ops.triton.delta_net_convolve import BLOCK_TOKENS, convolve_kernel
from penstock.ops.triton.delta_net_prepare import num_scratch_elements, prepare_kernel, scratch_of
from penstock.ops.triton.fp8 import to_codes
from penstock.ops.triton.launch import (
    cdiv,
    has_dependent_launch,
    launch_options,
    let_next_start,
    next_power_of_2,
    shared_memory,
    wait_for_previous,
)
from penstock.ops.tuning import Tile, choose

Shape = tuple[int, int, int, int]  # Hk, Hv, K, V

CONVOLVE_TILE: Tile = {"RUN": 8, "num_warps": 4, "num_stages": 1}
PREPARE_TILE: Tile = {"num_warps": 4, "num_stages": 1}
# Hopper's tensor cores read both operands from shared memory, so few registers are enough: four
# programs share an SM, and while one waits the others compute.
HOPPER_PREPARE_TILE: Tile = {**PREPARE_TILE, "maxnreg": 128}
SCAN_COLUMNS = 64  # of a head per scan program: best for one row and for many on an H200


def mix_blocks(
    out: Tensor,  # [T, Hv * V]  only the tokens of these rows are written
    mixed: Tensor,  # [T, C + Hv * V + 2 * Hv]  conv channels (q, k, v), z, b, a
    conv_weight: Tensor,  # [Kc, C]  the newest input last
    a_log: Tensor,  # [Hv] float32
    dt_bias: Tensor,  # [Hv] float32
    norm_weight: Tensor,  # [V] float32
    eps: float,
    conv: Tensor,  # [slots, W, C]  ring buffers of the convolution's inputs, W >= Kc
    recurrent: Tensor,  # [slots, Hv, K, V] float32 or float16
    query_start: Tensor,  # [R + 1]
    context_lens: Tensor,  # [R]
    state_slots: Tensor,  # [R]
    initial_slots: Tensor,  # [R]
    blocks: TokenBlocks,
    num_key_heads: int,
    backlog: Backlog | None = None,
    rounded_out: RoundedTokens | None = None,  # written instead of `out`
    *,
    num_tokens: int,
    deterministic: bool,
) -> None:
    num_blocks, num_rows = len(blocks.table), len(blocks.rows)
    if num_blocks == 0:
        return
    (_, num_heads, key_dim, value_dim), device = recurrent.shape, mixed.device
    shape = (num_key_heads, num_heads, key_dim, value_dim)
    heads, rings, options = _head_constants(shape), {"RING": conv.shape[1]}, launch_options(device)
    padded = {"BLOCK_K": _padded(key_dim), "PADDED_V": _padded(value_dim)}
    convolved = mixed.new_empty(num_blocks, rows.BLOCK_TOKENS, conv.shape[2])
    prepared = mixed.new_empty(
        num_blocks, num_heads, num_scratch_elements(_padded(key_dim), _padded(value_dim))
    )
    log_decays = mixed.new_empty(num_blocks, num_heads, rows.BLOCK_TOKENS, dtype=torch.float32)

    def tile_of(kernel: str, default: Tile, count: int) -> Tile:
        return default if deterministic else choose(kernel, shape, count, default, device)

    places = (query_start, context_lens, initial_slots, blocks.table)
    block_c = next_power_of_2(max(key_dim, value_dim))
    convolve_kernel[2 * num_key_heads + num_heads, num_blocks](
        mixed, conv_weight, conv, *places, convolved, mixed.stride(0), conv.stride(0),
        NUM_TAPS=len(conv_weight), BLOCK_C=block_c, **heads, **rings,
        **tile_of("delta_net_convolve", CONVOLVE_TILE, num_tokens), **options,
    )  # fmt: skip
    rule = _prepare_rule(mixed.element_size(), device)
    prepare_kernel[num_heads, num_blocks](
        mixed, convolved, a_log, dt_bias, blocks.table, prepared, log_decays, mixed.stride(0),
        **heads, **padded, **tile_of("delta_net_prepare", rule, num_tokens), **options,
    )  # fmt: skip
    rule = _scan_rule(shape, mixed.element_size(), shared_memory(device))
    tile = tile_of("delta_net_scan", rule, num_rows)
    num_parts = cdiv(value_dim, tile["BLOCK_V"])
    norms_apart = num_parts > 1 or rounded_out is not None
    states = (conv, recurrent, query_start, context_lens, state_slots, initial_slots)
    late, most = backlog_of(backlog, recurrent), {"MOST_LATE": most_late(backlog)}
    _scan_kernel[num_heads * num_parts, num_rows](
        convolved, prepared, log_decays, mixed, norm_weight, *states, *late, blocks.table,
        blocks.rows, out, eps, mixed.stride(0), conv.stride(0), recurrent.stride(0),
        NORMS=not norms_apart, BLOCK_RING=next_power_of_2(conv.shape[1]), **most, **heads, **rings,
        **padded, **tile, **options,
    )  # fmt: skip
    if norms_apart:
        codes = scales = None
        if rounded_out is not None:
            codes, scales = rounded_out.codes, rounded_out.scales
        _norm_kernel[num_heads, num_blocks](
            mixed, norm_weight, blocks.table, state_slots, late[0], out, codes, scales, eps,
            mixed.stride(0), 0 if scales is None else scales.stride(0), **most, **heads,
            PADDED_V=padded["PADDED_V"], num_warps=8, **options,
        )  # fmt: skip


def _head_constants(shape: Shape) -> dict[str, int]:
    num_key_heads, num_value_heads, key_dim, value_dim = shape
    return {
        "NUM_KEY_HEADS": num_key_heads,
        "NUM_VALUE_HEADS": num_value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
    }


def _padded(width: int) -> int:
    """Pads a head's width to what tensor cores support."""
    return max(next_power_of_2(width), 16)


def _prepare_rule(element_size: int, device: torch.device) -> Tile:
    if element_size == 4:  # without tensor cores, operands are in registers too
        return {"num_warps": 8, "num_stages": 1}
    return HOPPER_PREPARE_TILE if has_dependent_launch(device) else PREPARE_TILE


def _scan_rule(shape: Shape, element_size: int, memory: int) -> Tile:
    """With three stages the next blocks are loaded while one is computed; this needs memory for
    three.
    """
    _, _, key_dim, value_dim = shape
    block_v = min(SCAN_COLUMNS, _padded(value_dim))
    shared = rows.BLOCK_TOKENS * (3 * _padded(key_dim) + rows.BLOCK_TOKENS)
    own = rows.BLOCK_TOKENS * block_v
    # Three buffers of what all columns share, two of the values; and one for the outputs.
    has_room = element_size == 2 and element_size * (3 * shared + 3 * own) + 1024 <= memory
    return {"BLOCK_V": block_v, "num_warps": 4, "num_stages": 3 if has_room else 1}


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles worth trying; shape is (Hk, Hv, K, V), and for the scan num_tokens is the number of
    rows.
    """
    if kernel == "delta_net_convolve":
        forms = ((4, 8, 104), (8, 4, 128), (8, 4, 104), (8, 8, 64), (16, 4, 80))
        return [
            {"RUN": run, "num_warps": warps, "num_stages": 1, "maxnreg": limit}
            for run, warps, limit in forms
        ]
    if kernel == "delta_net_prepare":
        limits = ((4, 255), (4, 168), (4, 128), (8, 128))
        return [{"num_warps": warps, "num_stages": 1, "maxnreg": limit} for warps, limit in limits]
    if kernel == "delta_net_scan":
        forms = ((32, 4, 3), (64, 4, 1), (64, 4, 3), (128, 8, 1), (128, 8, 3))
        widest = next_power_of_2(shape[3])
        return [
            {"BLOCK_V": block_v, "num_warps": warps, "num_stages": stages}
            for block_v, warps, stages in forms
            if block_v <= widest
        ]
    return []


@triton.jit(
    do_not_specialize=[
        "query_start",
        "context_lens",
        "state_slots",
        "initial_slots",
        "blocks",
        "row_blocks",
    ]
)
def _scan_kernel(
    convolved,
    prepared,
    log_decays,
    mixed,
    norm_weight,
    conv,
    recurrent,
    query_start,
    context_lens,
    state_slots,
    initial_slots,
    late_counts,  # [slots, Hv]
    late_keys,  # [slots, MOST_LATE, Hv, K]
    late_corrections,  # [slots, MOST_LATE, Hv, V]
    late_decays,  # [slots, MOST_LATE, Hv]
    blocks,
    row_blocks,
    out,
    eps,
    mixed_stride,
    conv_stride,
    recurrent_stride,
    MOST_LATE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_RING: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORMS: tl.constexpr,  # a program has all columns, and applies the gated norm
    PDL: tl.constexpr,
):
    """Program (g, r): BLOCK_V columns of a value head, along all blocks of row r."""
    let_next_start(PDL)
    NUM_PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    NUM_CHANNELS: tl.constexpr = 2 * KEY_SIZE + NUM_VALUE_HEADS * VALUE_DIM
    HEADS_A_KEY: tl.constexpr = NUM_VALUE_HEADS // NUM_KEY_HEADS
    dtype = prepared.dtype.element_ty
    i_head = tl.program_id(0) // NUM_PARTS
    i_part = tl.program_id(0) % NUM_PARTS
    first_block = tl.load(row_blocks + tl.program_id(1) * 2)
    past_last_block = tl.load(row_blocks + tl.program_id(1) * 2 + 1)
    row = tl.load(blocks + first_block * 4, mask=first_block < past_last_block, other=0)
    row_start = tl.load(query_start + row).to(tl.int64)
    start = tl.load(context_lens + row) - (tl.load(query_start + row + 1) - row_start)
    state_slot = tl.load(state_slots + row).to(tl.int64)
    initial_slot = tl.load(initial_slots + row).to(tl.int64)
    i_t = tl.arange(0, BLOCK_TOKENS)
    i_k = tl.arange(0, BLOCK_K)
    i_v = i_part * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = i_v < VALUE_DIM
    in_key = (i_k < KEY_DIM)[None, :]
    in_state = in_v[:, None] & (i_k < KEY_DIM)[None, :]
    p_row = mixed + row_start * mixed_stride
    p_state = recurrent + i_head * (KEY_DIM * VALUE_DIM) + i_k[None, :] * VALUE_DIM + i_v[:, None]
    wait_for_previous(PDL)

    # The state is transposed, [BLOCK_V, K]: it and the corrections are then the left operands of
    # all MMAs, which tensor cores can read from the registers of their accumulators.
    held = tl.load(
        p_state + initial_slot * recurrent_stride,
        mask=tl.where(start > 0, in_state, False),
        other=0.0,
    ).to(tl.float32)
    if MOST_LATE > 0:
        num_late = late_tokens(late_counts, initial_slot, i_head, start, NUM_VALUE_HEADS)
        for i_late in range(num_late):
            late = entry_of(initial_slot, i_late, i_head, NUM_VALUE_HEADS, MOST_LATE)
            b_late_key = tl.load(late_keys + late * KEY_DIM + i_k, mask=i_k < KEY_DIM, other=0.0)
            b_late = tl.load(late_corrections + late * VALUE_DIM + i_v, mask=in_v, other=0.0)
            held = tl.load(late_decays + late) * held + b_late[:, None] * b_late_key[None, :]
    num_done = tl.zeros([], tl.int32)
    for i_block in range(first_block, past_last_block):
        # No address depends on another load, so the next blocks are loaded while one is computed.
        i_block_64 = tl.cast(i_block, tl.int64)
        p_queries = (
            convolved + i_block_64 * (BLOCK_TOKENS * NUM_CHANNELS) + i_head // HEADS_A_KEY * KEY_DIM
        )
        p_w, p_u, p_attn = scratch_of(
            prepared, i_block_64, i_head, NUM_VALUE_HEADS, BLOCK_K, PADDED_V
        )
        key_offsets = i_t[:, None] * NUM_CHANNELS + i_k[None, :]
        b_w = tl.load(p_w + i_t[:, None] * BLOCK_K + i_k[None, :])
        b_queries = tl.load(p_queries + key_offsets, mask=in_key, other=0.0)
        b_keys = tl.load(p_queries + KEY_SIZE + key_offsets, mask=in_key, other=0.0)
        b_attn = tl.load(p_attn + i_t[:, None] * BLOCK_TOKENS + i_t[None, :])
        b_u = tl.load(p_u + i_v[:, None] * BLOCK_TOKENS + i_t[None, :])
        p_decay = log_decays + (i_block_64 * NUM_VALUE_HEADS + i_head) * BLOCK_TOKENS
        log_decay = tl.load(p_decay + i_t)[None, :]
        in_all = tl.load(p_decay + BLOCK_TOKENS - 1)
        first_token = tl.load(blocks + i_block * 4 + 1).to(tl.int64)
        num_tokens = tl.load(blocks + i_block * 4 + 2)
        checkpoint = tl.load(blocks + i_block * 4 + 3).to(tl.int64)

        operand = held.to(dtype)
        corrected = b_u.to(tl.float32) - tl.dot(operand, tl.trans(b_w), input_precision="ieee")
        read = tl.exp(log_decay) * tl.dot(operand, tl.trans(b_queries), input_precision="ieee")
        kept = (tl.exp(in_all - log_decay) * corrected).to(dtype)
        held = tl.dot(kept, b_keys, tl.exp(in_all) * held, input_precision="ieee")
        read = tl.dot(corrected.to(dtype), tl.trans(b_attn), read, input_precision="ieee")

        is_out = in_v[:, None] & (i_t < num_tokens)[None, :]
        if NORMS:
            p_gate = mixed + first_token * mixed_stride + NUM_CHANNELS + i_head * VALUE_DIM
            read = _norm_and_gate(
                read, p_gate, norm_weight, eps, i_t, i_v, is_out, mixed_stride, VALUE_DIM
            )
        p_out = out + (first_token + i_t)[None, :] * (NUM_VALUE_HEADS * VALUE_DIM)
        tl.store(
            p_out + i_head * VALUE_DIM + i_v[:, None], read.to(out.dtype.element_ty), mask=is_out
        )
        num_done += num_tokens
        if checkpoint > 0:
            b_saved = rounded(held, recurrent.dtype.element_ty)
            tl.store(p_state + checkpoint * recurrent_stride, b_saved, mask=in_state)
            end_backlog(late_counts, checkpoint, i_head, NUM_VALUE_HEADS, MOST_LATE)
            _save_rings(
                conv, checkpoint, initial_slot, p_row, start, num_done, i_head,
                i_part, i_k, i_v, mixed_stride, conv_stride, NUM_KEY_HEADS, NUM_VALUE_HEADS,
                KEY_DIM, VALUE_DIM, RING, BLOCK_RING,
            )  # fmt: skip

    # the target slot may be the initial one: wait until every thread has read its part
    tl.debug_barrier()
    if num_done > 0:
        b_saved = rounded(held, recurrent.dtype.element_ty)
        tl.store(p_state + state_slot * recurrent_stride, b_saved, mask=in_state)
        if NORMS:  # otherwise other programs may still have to read the count
            end_backlog(late_counts, state_slot, i_head, NUM_VALUE_HEADS, MOST_LATE)
        _save_rings(
            conv, state_slot, initial_slot, p_row, start, num_done, i_head,
            i_part, i_k, i_v, mixed_stride, conv_stride, NUM_KEY_HEADS, NUM_VALUE_HEADS, KEY_DIM,
            VALUE_DIM, RING, BLOCK_RING,
        )  # fmt: skip


@triton.jit
def rounded(b_state, DTYPE: tl.constexpr):
    """Rounded to the slots' dtype; clamped to its largest value, since infinity would never go
    away.
    """
    if tl.float16 == DTYPE:
        b_state = tl.clamp(b_state, -65504.0, 65504.0)
    return b_state.to(DTYPE)


@triton.jit
def _save_rings(
    conv,
    slot,
    initial_slot,
    p_mixed,  # the row's first token
    start,
    num_tokens,
    i_head,
    i_part,
    i_k,
    i_v,
    mixed_stride,
    conv_stride,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_RING: tl.constexpr,
):
    """The program's channels of the ring after num_tokens of the row."""
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    NUM_CHANNELS: tl.constexpr = 2 * KEY_SIZE + NUM_VALUE_HEADS * VALUE_DIM
    HEADS_A_KEY: tl.constexpr = NUM_VALUE_HEADS // NUM_KEY_HEADS
    p_ring = conv + slot * conv_stride
    p_old_ring = conv + initial_slot * conv_stride
    has_moved = slot != initial_slot
    v_channels = 2 * KEY_SIZE + i_head * VALUE_DIM + i_v
    _save_ring(
        p_ring, p_old_ring, p_mixed, v_channels, i_v < VALUE_DIM, start, num_tokens, has_moved,
        mixed_stride, NUM_CHANNELS, RING, BLOCK_RING,
    )  # fmt: skip
    if (i_head % HEADS_A_KEY == 0) & (i_part == 0):  # the first of those that share a key head
        for i in tl.static_range(2):
            k_channels = i * KEY_SIZE + i_head // HEADS_A_KEY * KEY_DIM + i_k
            _save_ring(
                p_ring, p_old_ring, p_mixed, k_channels, i_k < KEY_DIM, start, num_tokens,
                has_moved, mixed_stride, NUM_CHANNELS, RING, BLOCK_RING,
            )  # fmt: skip


@triton.jit
def _save_ring(
    p_ring,
    p_old_ring,
    p_mixed,
    channels,
    in_channels,
    start,
    num_tokens,
    has_moved,
    mixed_stride,
    NUM_CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_RING: tl.constexpr,
):
    """An entry holds the newest position that maps to it: from this step, or from the old ring if
    the row moved.
    """
    i_entry = tl.arange(0, BLOCK_RING)
    newest = start + num_tokens - 1
    position = newest - (newest % RING + RING - i_entry) % RING
    is_entry = (i_entry < RING)[:, None] & in_channels[None, :]
    is_new = is_entry & (position >= start)[:, None]
    is_past = is_entry & tl.where(has_moved, (position >= 0) & (position < start), False)[:, None]
    tokens = (position - start).to(tl.int64)[:, None] * mixed_stride
    offsets = i_entry[:, None] * NUM_CHANNELS + channels[None, :]
    b_new = tl.load(p_mixed + tokens + channels[None, :], mask=is_new, other=0.0)
    b_past = tl.load(p_old_ring + offsets, mask=is_past, other=0.0)
    tl.store(
        p_ring + offsets, tl.where(is_new, b_new.to(b_past.dtype), b_past), mask=is_new | is_past
    )


@triton.jit
def _norm_and_gate(
    b_read,  # [V, 64] float32
    p_gate,  # of the first token
    norm_weight,
    eps,
    i_t,
    i_v,
    mask,
    mixed_stride,
    VALUE_DIM: tl.constexpr,
):
    offsets = i_t.to(tl.int64)[None, :] * mixed_stride + i_v[:, None]
    b_gate = tl.load(p_gate + offsets, mask=mask, other=0.0).to(tl.float32)
    b_weight = tl.load(norm_weight + i_v, mask=i_v < VALUE_DIM, other=0.0)
    scale = tl.rsqrt(tl.sum(b_read * b_read, axis=0) / VALUE_DIM + eps)
    return b_read * scale[None, :] * b_weight[:, None] * silu(b_gate)


@triton.jit(do_not_specialize=["blocks", "state_slots", "scale_stride"])
def _norm_kernel(
    mixed,
    norm_weight,
    blocks,
    state_slots,
    late_counts,
    out,
    codes,  # None: the result replaces `out`
    scales,
    eps,
    mixed_stride,
    scale_stride,
    MOST_LATE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (h, p): applies the gated norm to the output of value head h for block p, in place or
    in E4M3, where a head is a block of columns with one scale. The scan is complete, so the slots
    that it wrote have no backlog.
    """
    let_next_start(PDL)
    NUM_CHANNELS: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_VALUE_HEADS * VALUE_DIM
    i_head = tl.program_id(0)
    i_block = tl.program_id(1)
    first_token = tl.load(blocks + i_block * 4 + 1).to(tl.int64)
    num_tokens = tl.load(blocks + i_block * 4 + 2)
    i_t = tl.arange(0, BLOCK_TOKENS)
    i_v = tl.arange(0, PADDED_V)
    mask = (i_v < VALUE_DIM)[:, None] & (i_t < num_tokens)[None, :]
    wait_for_previous(PDL)
    if num_tokens == 0:
        return
    state_slot = tl.load(state_slots + tl.load(blocks + i_block * 4)).to(tl.int64)
    end_backlog(late_counts, state_slot, i_head, NUM_VALUE_HEADS, MOST_LATE)
    places = (first_token + i_t)[None, :] * (NUM_VALUE_HEADS * VALUE_DIM)
    places += i_head * VALUE_DIM + i_v[:, None]
    b_read = tl.load(out + places, mask=mask, other=0.0).to(tl.float32)
    p_gate = mixed + first_token * mixed_stride + NUM_CHANNELS + i_head * VALUE_DIM
    b_out = _norm_and_gate(
        b_read, p_gate, norm_weight, eps, i_t, i_v, mask, mixed_stride, VALUE_DIM
    )
    b_out = b_out.to(out.dtype.element_ty)
    if codes is None:
        tl.store(out + places, b_out, mask=mask)
    else:
        tl.static_assert(VALUE_DIM == PADDED_V)
        b_codes, b_scales = to_codes(tl.trans(b_out).to(tl.float32))
        tl.store(codes + tl.trans(places), b_codes, mask=tl.trans(mask))
        p_scales = scales + i_head * scale_stride + first_token + i_t
        tl.store(p_scales, b_scales, mask=i_t < num_tokens)
