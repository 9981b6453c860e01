# mypy: disable-error-code="no-untyped-def"
"""Attention of a decode step: a program per row, key head and split; a second kernel merges."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.forge.fragments.cache_pages import Cache
from penstock.forge.fragments.forward_kernels import Model, compute_logits, run_layers
from penstock.forge.fragments.launch import launch
from penstock.forge.fragments.shape import Shape
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_processors,
    wait_for_previous,
)

SPLIT_KEYS = 512  # forge: value
MAX_SPLITS = 32
BLOCK_BYTES = 16384  # of keys, and as much of values, that a program has in flight


def run_tokens(model: Model, tokens: Tensor, slots: list[int], positions: list[int]) -> Tensor:
    """One token for each row: tokens [R] -> logits [R, V]"""
    rows = torch.tensor([slots, positions], dtype=torch.int64, device=tokens.device)
    return run_step(model, tokens, rows[0], rows[1], is_long=max(positions) >= SPLIT_KEYS)


def run_step(
    model: Model, tokens: Tensor, slots: Tensor, positions: Tensor, *, is_long: bool
) -> Tensor:
    """The same with all inputs on the device, [R] each. Long rows are split to fill the device."""
    num_splits = count_splits(model, len(tokens)) if is_long else 1

    def attend(layer: int, turned: Tensor, qkv: Tensor) -> Tensor:
        return decode_attention(
            turned, model.cache, layer, slots, positions, model.shape, num_splits
        )

    return compute_logits(model, run_layers(model, tokens, slots, positions, attend))


def count_splits(model: Model, num_rows: int) -> int:
    num_walks = num_rows * model.shape.num_kv_heads
    filling = cdiv(2 * num_processors(model.rope.device), num_walks)
    return max(1, min(filling, MAX_SPLITS, cdiv(4 * model.shape.max_len, SPLIT_KEYS)))


def decode_attention(
    turned: Tensor,  # [R, (Hq + Hkv) * D]
    cache: Cache,
    layer: int,
    slots: Tensor,  # [R]
    positions: Tensor,  # [R]
    shape: Shape,
    num_splits: int,
) -> Tensor:  # [R, Hq * D]
    num_rows, head_dim, device = len(turned), shape.head_dim, turned.device
    out = torch.empty(num_rows, shape.num_query_rows, dtype=turned.dtype, device=device)
    partial = log_sums = None  # the splits' results, and the logarithms of their sums
    if num_splits > 1:
        partial = torch.empty(num_rows, shape.num_heads, num_splits, head_dim, device=device)
        log_sums = torch.empty(num_rows, shape.num_heads, num_splits, device=device)
    padded_dim = max(16, next_power_of_2(head_dim))
    page_size = cache.keys.shape[3]
    block_keys = math.gcd(
        page_size, min(max(BLOCK_BYTES // (padded_dim * turned.dtype.itemsize), 16), 64)
    )
    min_share = max(1, SPLIT_KEYS // 4 // block_keys)
    launch(decode_attention_kernel, (shape.num_kv_heads, num_rows, num_splits))(
        turned,
        cache.keys[layer],
        cache.values[layer],
        cache.table,  # forge: when cache=pages
        slots,
        positions,
        out,
        partial,
        log_sums,
        head_dim**-0.5 * math.log2(math.e),
        cache.table.shape[1],  # forge: when cache=pages
        min_share,
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_KEYS=block_keys,
        BLOCK_M=max(16, next_power_of_2(shape.num_heads // shape.num_kv_heads)),
        BLOCK_D=padded_dim,
        num_warps=4,
        num_stages=1,  # the kernel itself loads its next block while it works on one
        **launch_options(device),
    )
    if partial is not None:
        launch(merge_splits_kernel, (shape.num_heads, num_rows))(
            partial,
            log_sums,
            positions,
            out,
            min_share,
            num_splits,
            HEAD_DIM=head_dim,
            BLOCK_KEYS=block_keys,
            BLOCK_SPLITS=next_power_of_2(num_splits),
            BLOCK_D=padded_dim,
            num_warps=4,
            **launch_options(device),
        )
    return out


@triton.jit
def share_blocks(p_positions, i_row, min_share, num_splits, BLOCK_KEYS: tl.constexpr):
    """The row's length, its number of blocks of keys, and how many of them a split takes."""
    length = tl.load(p_positions + i_row).to(tl.int32) + 1
    num_blocks = tl.cdiv(length, BLOCK_KEYS)
    return length, num_blocks, tl.maximum(min_share, tl.cdiv(num_blocks, num_splits))


@triton.jit
def find_block(
    p_table,  # forge: when cache=pages
    slot,
    block,
    end_block,
    i_kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """The address of the block's first key."""
    position = block * BLOCK_KEYS
    page = slot  # forge: when cache=slots
    # forge: when cache=pages
    page = tl.load(p_table + position // PAGE_SIZE, mask=block < end_block, other=0).to(tl.int64)
    # forge: end
    return ((page * NUM_KV_HEADS + i_kv_head) * PAGE_SIZE + position % PAGE_SIZE) * HEAD_DIM


@triton.jit(
    do_not_specialize=["min_share"], do_not_specialize_on_alignment=["p_slots", "p_positions"]
)
def decode_attention_kernel(
    p_turned,
    p_keys,
    p_values,
    p_table,  # forge: when cache=pages
    p_slots,
    p_positions,
    p_out,
    p_partial,
    p_log_sums,
    scale,
    table_stride,  # forge: when cache=pages
    min_share,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """The query heads of one key head against one split of the row's keys.

    Keys and values of earlier steps are read before the wait. After that, the next block's keys are
    loaded as soon as this one's have been used, and so are its values.
    """
    let_next_start(PDL)
    i_kv_head, i_row, i_split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_splits = tl.num_programs(2)
    length, num_blocks, share = share_blocks(p_positions, i_row, min_share, num_splits, BLOCK_KEYS)
    if i_split * share >= num_blocks:
        wait_for_previous(PDL)
        return
    first_block = i_split * share
    end_block = tl.minimum(first_block + share, num_blocks)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    p_table += slot * table_stride  # forge: when cache=pages

    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    members, dims, keys = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KEYS)
    is_dim = (dims < HEAD_DIM)[None, :]
    in_block = keys[:, None] * HEAD_DIM + dims[None, :]
    place = find_block(
        p_table,  # forge: when cache=pages
        slot,
        first_block,
        end_block,
        i_kv_head,
        NUM_KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
        BLOCK_KEYS,
    )
    positions = first_block * BLOCK_KEYS + keys
    end = tl.minimum(length, end_block * BLOCK_KEYS)
    is_older = ((positions < end) & (positions < length - 1))[:, None] & is_dim
    b_k = tl.load(p_keys + place + in_block, mask=is_older, other=0.0)
    b_v = tl.load(p_values + place + in_block, mask=is_older, other=0.0)
    wait_for_previous(PDL)
    # The newest token's key and value were written by the kernel just waited for.
    is_newest = ((positions < end) & (positions == length - 1))[:, None] & is_dim
    b_k += tl.load(p_keys + place + in_block, mask=is_newest, other=0.0)
    b_v += tl.load(p_values + place + in_block, mask=is_newest, other=0.0)
    in_heads = (i_kv_head * GROUP + members)[:, None] * HEAD_DIM + dims[None, :]
    is_output = (members < GROUP)[:, None] & is_dim
    p_row = p_turned + i_row * ((NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM)
    b_q = tl.load(p_row + in_heads, mask=is_output, other=0.0)

    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in range(first_block, end_block):
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        b_scores = tl.where((positions < end)[None, :], b_scores, float("-inf"))
        place = find_block(
            p_table,  # forge: when cache=pages
            slot,
            block + 1,
            end_block,
            i_kv_head,
            NUM_KV_HEADS,
            HEAD_DIM,
            PAGE_SIZE,
            BLOCK_KEYS,
        )
        positions += BLOCK_KEYS
        # Masked keys are loaded as zero: the cache is not initialized where nothing was written.
        is_next = (positions < end)[:, None] & is_dim
        b_k = tl.load(p_keys + place + in_block, mask=is_next, other=0.0)
        b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1))
        b_decay = tl.exp2(b_max - b_new_max)
        b_weights = tl.exp2(b_scores - b_new_max[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_weights, axis=1)
        b_max = b_new_max
        b_out = tl.dot(
            b_weights.to(b_v.dtype), b_v, b_out * b_decay[:, None], input_precision="ieee"
        )
        b_v = tl.load(p_values + place + in_block, mask=is_next, other=0.0)

    b_out = b_out / b_sum[:, None]
    if p_partial is not None:
        to_split = (i_row * NUM_HEADS + i_kv_head * GROUP + members) * num_splits + i_split
        tl.store(p_partial + to_split[:, None] * HEAD_DIM + dims[None, :], b_out, mask=is_output)
        tl.store(p_log_sums + to_split, b_max + tl.log2(b_sum), mask=members < GROUP)
    else:
        p_to = p_out + i_row * (NUM_HEADS * HEAD_DIM) + in_heads
        tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=is_output)


@triton.jit(
    do_not_specialize=["min_share", "num_splits"], do_not_specialize_on_alignment=["p_positions"]
)
def merge_splits_kernel(
    p_partial,
    p_log_sums,
    p_positions,
    p_out,
    min_share,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """The splits of one query head of one row, each weighted with its share of the sum."""
    let_next_start(PDL)
    i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, num_blocks, share = share_blocks(p_positions, i_row, min_share, num_splits, BLOCK_KEYS)
    dims, splits = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_SPLITS)
    is_dim, is_written = dims < HEAD_DIM, splits < tl.cdiv(num_blocks, share)
    i_output = i_row * tl.num_programs(0) + i_head
    from_splits = i_output * num_splits + splits
    wait_for_previous(PDL)
    b_log_sums = tl.load(p_log_sums + from_splits, mask=is_written, other=float("-inf"))
    b_partial = tl.load(
        p_partial + from_splits[:, None] * HEAD_DIM + dims[None, :],
        mask=is_written[:, None] & is_dim[None, :],
        other=0.0,
    )
    b_weights = tl.exp2(b_log_sums - tl.max(b_log_sums, axis=0))
    b_out = tl.sum(b_weights[:, None] * b_partial, axis=0) / tl.sum(b_weights, axis=0)
    tl.store(p_out + i_output * HEAD_DIM + dims, b_out.to(p_out.dtype.element_ty), mask=is_dim)
