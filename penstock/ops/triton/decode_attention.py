# mypy: disable-error-code="no-untyped-def"
"""Attention of rows with one new token each. Knows pages and lengths, not what else is in the step.

A row's keys are divided into blocks and the blocks into splits, one program per key head and split;
a second kernel merges the splits. The maximum number of splits follows from shapes; which blocks a
split gets follows from the row's length on the device, so a captured step stays correct as its rows
grow.

Two things are read before the preceding kernels are complete. First, lengths and pages of the rows:
`launch.py` says why. Second, all keys and values except those of the newest token, or of as many as
a step verifies: earlier steps wrote them, or a kernel that a launch in between has waited for.
"""

from __future__ import annotations

import itertools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.kv_codes import SCALE_UNIT, stored_as, view_codes, widen
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_processors,
    wait_for_previous,
)
from penstock.ops.tuning import Tile, bucket, choose

LOG2_E = math.log2(math.e)
BLOCK_BYTES = 16384  # of keys, and as much of values, in flight per program
BLOCK_PER_WARP = 2048  # keys times dimensions: 64 registers per thread for keys and values
MERGE_ELEMENTS = 4096  # elements of the splits that a program merges at once
LONGEST_WALK = 8192  # most keys per program, however many rows share the GPU
WORTHWHILE_WALK = 1024  # fewest keys worth a split when the rows alone fill the GPU

# The same for any batch. In a large one the splits' results are up to 6 % more traffic; in a small
# one with short contexts most of the GPU is idle: 12 programs for 1536 tokens and 2 key heads.
DETERMINISTIC_SPLITS = 64
DETERMINISTIC_WALK = 256
DETERMINISTIC_MERGE: Tile = {"BLOCK_SPLITS": 32, "BLOCK_D": 64, "num_warps": 4, "num_stages": 1}


def decode_attention(
    out: Tensor,  # [R, Hq * D]  written
    q: Tensor,  # [R, Hq, D]
    keys: Tensor,  # [pages, page_size, Hkv, D]
    values: Tensor,  # [pages, page_size, Hkv, D]
    kv_scales: Tensor | None,  # [2, pages, page_size, Hkv] float32, of 8-bit KV
    page_table: Tensor,  # [R, P]
    context_lens: Tensor,  # [R]
    scale: float,
    window: int,
    gate: Tensor | None,  # [R, Hq * D]
    deterministic: bool,
    num_newest: int = 1,  # most keys per row that this step writes
) -> None:
    """One token of every row: one launch, or two if rows are split."""
    num_rows, num_heads, head_dim = q.shape
    page_size, num_kv_heads = keys.shape[1:3]
    shape = (num_heads, num_kv_heads, head_dim, page_size)
    # Without tensor cores registers hold the keys in float32, whatever their storage format.
    dtype = q.dtype if q.dtype == torch.float32 else keys.dtype
    rule = _decode_rule(head_dim, page_size, dtype)
    tile = choose("paged_attention", shape, 1 if deterministic else num_rows, rule, q.device)
    max_keys = page_table.shape[1] * page_size
    num_splits, min_share = _plan_splits(
        num_rows * num_kv_heads, max_keys, tile, q.device, deterministic
    )
    partial = log_sums = None  # the splits' results, and their log-sum-exp
    if num_splits > 1:
        partial = q.new_empty((num_rows, num_heads, num_splits, head_dim), dtype=torch.float32)
        log_sums = q.new_empty((num_rows, num_heads, num_splits), dtype=torch.float32)
    key_scales, value_scales = (None, None) if kv_scales is None else kv_scales
    _decode_kernel[num_kv_heads, num_rows, num_splits](
        q,
        view_codes(keys, torch.int32),
        view_codes(values, torch.int32),
        key_scales,
        value_scales,
        page_table,
        context_lens,
        gate if partial is None else None,
        out,
        partial,
        log_sums,
        scale * LOG2_E,
        q.stride(0),
        page_table.stride(0),
        0 if gate is None else gate.stride(0),
        min_share,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        WINDOW=window,
        NUM_NEWEST=next_power_of_2(num_newest),
        STORED=stored_as(keys),
        BLOCK_KEYS=tile["BLOCK_KEYS"],
        BLOCK_M=max(16, next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        num_warps=tile["num_warps"],
        num_stages=1,  # the kernel prefetches its next block itself
        **launch_options(q.device),
    )
    if partial is not None and log_sums is not None:
        blocks = (min_share, window, tile["BLOCK_KEYS"])
        _merge_splits(out, partial, log_sums, context_lens, gate, blocks, deterministic)


def _merge_splits(
    out: Tensor,  # [R, Hq * D]  written
    partial: Tensor,  # [R, Hq, splits, D] float32
    log_sums: Tensor,  # [R, Hq, splits] float32
    context_lens: Tensor,  # [R]
    gate: Tensor | None,  # [R, Hq * D]
    blocks: tuple[
        int, int, int
    ],  # min_share, window and BLOCK_KEYS: they determine which splits were written
    deterministic: bool,
) -> None:
    num_rows, num_heads, num_splits, head_dim = partial.shape
    min_share, window, block_keys = blocks
    if deterministic:
        tile = DETERMINISTIC_MERGE
    else:
        rule = _merge_rule(num_rows * num_heads, num_splits, head_dim, out.device)
        tile = choose(
            "merge_splits", (num_heads, head_dim, bucket(num_splits)), num_rows, rule, out.device
        )
    _merge_kernel[num_heads, num_rows, cdiv(head_dim, tile["BLOCK_D"])](
        partial,
        log_sums,
        context_lens,
        gate,
        out,
        0 if gate is None else gate.stride(0),
        min_share,
        num_splits,
        HEAD_DIM=head_dim,
        WINDOW=window,
        BLOCK_KEYS=block_keys,
        **tile,
        **launch_options(out.device),
    )


def _plan_splits(
    num_walks: int,  # rows times key heads
    max_keys: int,  # capacity of the page table
    tile: Tile,
    device: torch.device,
    deterministic: bool,
) -> tuple[int, int]:
    """The most splits of a row, and the fewest blocks of a split. Depends only on shapes."""
    if deterministic:
        num_splits, min_keys = DETERMINISTIC_SPLITS, DETERMINISTIC_WALK
    else:
        filling = max(1, tile["programs_per_processor"] * num_processors(device) // num_walks)
        num_splits = max(filling, cdiv(max_keys, LONGEST_WALK))
        min_keys = WORTHWHILE_WALK // filling
    min_share = max(1, min_keys // tile["BLOCK_KEYS"])
    # Fewer if the table is short: the shares are then min_share, as they would be with more splits.
    return min(num_splits, cdiv(max_keys, min_share * tile["BLOCK_KEYS"])), min_share


def _decode_rule(head_dim: int, page_size: int, dtype: torch.dtype) -> Tile:
    """A block lies within a page; its keys and values must fit into a program's registers."""
    fitting = BLOCK_BYTES // (next_power_of_2(head_dim) * dtype.itemsize)
    block_keys = math.gcd(page_size, min(max(fitting, 16), 64))
    return {"BLOCK_KEYS": block_keys, "num_warps": 4, "programs_per_processor": 2}


def _merge_rule(num_merges: int, num_splits: int, head_dim: int, device: torch.device) -> Tile:
    """Many splits at once, and few dimensions only if needed for enough programs."""
    block_d = next_power_of_2(head_dim) if num_merges >= 2 * num_processors(device) else 32
    block_splits = min(bucket(num_splits), max(1, MERGE_ELEMENTS // block_d))
    num_warps = max(1, min(block_splits * block_d // 512, 4))
    return {
        "BLOCK_SPLITS": block_splits,
        "BLOCK_D": block_d,
        "num_warps": num_warps,
        "num_stages": 1,
    }


def candidates(kernel: str, shape: tuple[int, ...]) -> list[Tile]:
    """The tiles that `penstock tune` tries for a kernel of this file; none for others."""
    if kernel == "paged_attention":
        _, _, head_dim, page_size = shape
        choices = itertools.product((16, 32, 64), (2, 4, 8), (1, 2, 4))
        return [
            {"BLOCK_KEYS": size, "num_warps": num_warps, "programs_per_processor": programs}
            for size, num_warps, programs in choices
            if page_size % size == 0 and size * head_dim <= num_warps * BLOCK_PER_WARP
        ]
    if kernel == "merge_splits":
        _, head_dim, max_splits = shape
        choices = itertools.product((16, 64), (64, 128, 256), (1, 4))
        return [
            {"BLOCK_SPLITS": splits, "BLOCK_D": width, "num_warps": num_warps, "num_stages": 1}
            for splits, width, num_warps in choices
            if splits <= max_splits and width <= head_dim and splits * width <= 2 * MERGE_ELEMENTS
        ]
    return []


@triton.jit
def _share_blocks(
    p_context_lens, i_row, min_share, num_splits, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr
):
    """The row's length, the first visible block of keys, the number of visible blocks, and the
    blocks per split.
    """
    context_len = tl.load(p_context_lens + i_row).to(tl.int32)
    first_block = tl.maximum(context_len - WINDOW, 0) // BLOCK_KEYS if WINDOW else 0
    num_blocks = tl.cdiv(context_len, BLOCK_KEYS) - first_block
    share = tl.maximum(min_share, tl.cdiv(num_blocks, num_splits))
    return context_len, first_block, num_blocks, share


@triton.jit
def _find_block(
    p_pages,
    block,
    end_block,
    i_kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """The offset of the block's first key in the cache."""
    position = block * BLOCK_KEYS
    page = tl.load(p_pages + position // PAGE_SIZE, mask=block < end_block, other=0).to(tl.int64)
    return ((page * PAGE_SIZE + position % PAGE_SIZE) * NUM_KV_HEADS + i_kv_head) * HEAD_DIM


@triton.jit
def _see_keys(positions, context_len, end_block, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Which keys before end_block the newest token sees."""
    is_seen = (positions < context_len) & (positions < end_block * BLOCK_KEYS)
    if WINDOW:
        is_seen = is_seen & (positions >= context_len - WINDOW)
    return is_seen


@triton.jit(do_not_specialize=["p_pages", "p_context_lens", "table_stride", "min_share"])
def _decode_kernel(
    p_q,
    p_keys,
    p_values,
    p_key_scales,  # None: keys and values are not quantized
    p_value_scales,
    p_pages,
    p_context_lens,
    p_gate,
    p_out,
    p_partial,
    p_log_sums,
    scale,
    q_stride,
    table_stride,
    gate_stride,
    min_share,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_NEWEST: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """The query heads of one key head against one split of the row's keys.

    The next block's keys are loaded once this block's are used, and so are its values: the program
    always waits for one of the two while the other is in flight.
    """
    let_next_start(PDL)
    i_kv_head, i_row, i_split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_splits = tl.num_programs(2)
    context_len, first_block, num_blocks, share = _share_blocks(
        p_context_lens, i_row, min_share, num_splits, WINDOW, BLOCK_KEYS
    )
    if i_split * share >= num_blocks:
        wait_for_previous(PDL)
        return
    end_block = first_block + tl.minimum((i_split + 1) * share, num_blocks)
    first_block += i_split * share

    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    members, dims, keys = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KEYS)
    is_dim = (dims < HEAD_DIM)[None, :]
    # 8-bit KV is read as words of four elements.
    WIDTH: tl.constexpr = 1 if STORED == "plain" else 4
    STORED_DIM: tl.constexpr = HEAD_DIM // WIDTH
    stored_dims = tl.arange(0, BLOCK_D // WIDTH)
    is_stored = (stored_dims < STORED_DIM)[None, :]
    in_block = keys[:, None] * (NUM_KV_HEADS * STORED_DIM) + stored_dims[None, :]
    p_pages += i_row * table_stride
    place = _find_block(
        p_pages, first_block, end_block, i_kv_head, NUM_KV_HEADS, STORED_DIM, PAGE_SIZE, BLOCK_KEYS
    )
    next_place = _find_block(
        p_pages,
        first_block + 1,
        end_block,
        i_kv_head,
        NUM_KV_HEADS,
        STORED_DIM,
        PAGE_SIZE,
        BLOCK_KEYS,
    )
    positions = first_block * BLOCK_KEYS + keys
    is_seen = _see_keys(positions, context_len, end_block, WINDOW, BLOCK_KEYS)
    # Invisible keys are loaded as zero: unwritten page entries can hold anything, and 0 * NaN is
    # NaN.
    is_old_key = is_seen & (positions < context_len - NUM_NEWEST)
    is_older = is_old_key[:, None] & is_stored
    b_k = tl.load(p_keys + place + in_block, mask=is_older, other=0.0)
    b_v = tl.load(p_values + place + in_block, mask=is_older, other=0.0)
    if STORED != "plain":
        in_scales = keys * NUM_KV_HEADS
        p_here = place // STORED_DIM + in_scales
        b_k_scales = tl.load(p_key_scales + p_here, mask=is_old_key, other=0.0)
        b_v_scales = tl.load(p_value_scales + p_here, mask=is_old_key, other=0.0)

    wait_for_previous(PDL)
    # The newest keys and values were written by the kernel just waited for.
    is_new_key = is_seen & (positions >= context_len - NUM_NEWEST)
    is_newest = is_new_key[:, None] & is_stored
    b_k += tl.load(p_keys + place + in_block, mask=is_newest, other=0.0)
    b_v += tl.load(p_values + place + in_block, mask=is_newest, other=0.0)
    if STORED != "plain":
        b_k_scales += tl.load(p_key_scales + p_here, mask=is_new_key, other=0.0)
        b_v_scales += tl.load(p_value_scales + p_here, mask=is_new_key, other=0.0)
    in_heads = (i_kv_head * GROUP + members)[:, None] * HEAD_DIM + dims[None, :]
    is_output = (members < GROUP)[:, None] & is_dim
    b_q = tl.load(p_q + i_row * q_stride + in_heads, mask=is_output, other=0.0)

    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in range(first_block, end_block):
        b_k = widen(b_k, b_q.dtype, STORED)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if STORED != "plain":
            b_scores *= b_k_scales[None, :]
        b_scores = tl.where(is_seen[None, :], b_scores, float("-inf"))
        positions += BLOCK_KEYS
        is_seen = _see_keys(positions, context_len, end_block, WINDOW, BLOCK_KEYS)
        is_next = is_seen[:, None] & is_stored
        b_k = tl.load(p_keys + next_place + in_block, mask=is_next, other=0.0)
        if STORED != "plain":
            p_next = next_place // STORED_DIM + in_scales
            b_k_scales = tl.load(p_key_scales + p_next, mask=is_seen, other=0.0)
        b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1))
        b_decay = tl.exp2(b_max - b_new_max)
        b_weights = tl.exp2(b_scores - b_new_max[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_weights, axis=1)
        b_max = b_new_max
        b_v = widen(b_v, b_q.dtype, STORED)
        if STORED != "plain":
            b_weights *= (b_v_scales * SCALE_UNIT)[None, :]
            b_v_scales = tl.load(p_value_scales + p_next, mask=is_seen, other=0.0)
        b_out = tl.dot(
            b_weights.to(b_q.dtype), b_v, b_out * b_decay[:, None], input_precision="ieee"
        )
        b_v = tl.load(p_values + next_place + in_block, mask=is_next, other=0.0)
        next_place = _find_block(
            p_pages,
            block + 2,
            end_block,
            i_kv_head,
            NUM_KV_HEADS,
            STORED_DIM,
            PAGE_SIZE,
            BLOCK_KEYS,
        )

    if STORED != "plain":
        b_out *= 1.0 / SCALE_UNIT
    b_out = b_out / b_sum[:, None]
    if p_partial is not None:
        heads = i_row * NUM_HEADS + i_kv_head * GROUP + members
        to_split = heads * num_splits + i_split
        tl.store(p_partial + to_split[:, None] * HEAD_DIM + dims[None, :], b_out, mask=is_output)
        tl.store(p_log_sums + to_split, b_max + tl.log2(b_sum), mask=members < GROUP)
    else:
        if p_gate is not None:
            b_gate = tl.load(p_gate + i_row * gate_stride + in_heads, mask=is_output, other=0.0)
            b_out = b_out * tl.sigmoid(b_gate.to(tl.float32))
        p_to = p_out + i_row * (NUM_HEADS * HEAD_DIM) + in_heads
        tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["p_context_lens", "min_share", "num_splits"])
def _merge_kernel(
    p_partial,
    p_log_sums,
    p_context_lens,
    p_gate,
    p_out,
    gate_stride,
    min_share,
    num_splits,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges the splits of one query head of one row, each weighted by its share of the sum."""
    let_next_start(PDL)
    i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, num_blocks, share = _share_blocks(
        p_context_lens, i_row, min_share, num_splits, WINDOW, BLOCK_KEYS
    )
    num_written = tl.cdiv(num_blocks, share)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    i_output = i_row * tl.num_programs(0) + i_head
    wait_for_previous(PDL)
    b_max = tl.full((), float("-inf"), tl.float32)
    b_sum = tl.zeros((), tl.float32)
    b_out = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_written, BLOCK_SPLITS):
        splits = start + tl.arange(0, BLOCK_SPLITS)
        is_written = splits < num_written
        from_splits = i_output * num_splits + splits
        b_log_sums = tl.load(p_log_sums + from_splits, mask=is_written, other=float("-inf"))
        b_partial = tl.load(
            p_partial + from_splits[:, None] * HEAD_DIM + dims[None, :],
            mask=is_written[:, None] & is_dim[None, :],
            other=0.0,
        )
        b_new_max = tl.maximum(b_max, tl.max(b_log_sums, axis=0))
        b_decay = tl.exp2(b_max - b_new_max)
        b_weights = tl.exp2(b_log_sums - b_new_max)
        b_sum = b_sum * b_decay + tl.sum(b_weights, axis=0)
        b_out = b_out * b_decay + tl.sum(b_weights[:, None] * b_partial, axis=0)
        b_max = b_new_max
    b_out = b_out / b_sum
    if p_gate is not None:
        b_gate = tl.load(
            p_gate + i_row * gate_stride + i_head * HEAD_DIM + dims, mask=is_dim, other=0.0
        )
        b_out = b_out * tl.sigmoid(b_gate.to(tl.float32))
    tl.store(p_out + i_output * HEAD_DIM + dims, b_out.to(p_out.dtype.element_ty), mask=is_dim)
