# mypy: disable-error-code="no-untyped-def"
"""Attention of rows with several new tokens. Knows blocks, pages and lengths, not the rest of the
step.

A program takes a block (tokens within 64 aligned positions) and a few query heads of one key head.
Their queries are the rows of one tile, so that keys and values are read once for all of them.
Positions determine a token's row in the tile and which keys form a block, so the way a prompt was
split does not change any bit.

If few blocks have a long context, their keys are divided into splits, which a second kernel merges;
never if results must be deterministic.

Blocks, lengths and pages are read before the preceding kernels are complete: a step's inputs are
written before its first kernel with an early start.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.float8 import RoundedTokens
from penstock.ops.reference import rows
from penstock.ops.reference.rows import TokenBlocks
from penstock.ops.triton.fp8 import store_codes
from penstock.ops.triton.kv_codes import SCALE_UNIT, stored_as, view_codes, widen
from penstock.ops.triton.launch import (
    cdiv,
    has_dependent_launch,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_processors,
    shared_memory,
    wait_for_previous,
)
from penstock.ops.tuning import Tile, choose

BLOCK_TOKENS = tl.constexpr(rows.BLOCK_TOKENS)
LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-1e30)  # below every score; unlike infinity it can be subtracted from itself
WORTHWHILE_SPLIT = tl.constexpr(16)  # fewest blocks of 64 keys worth a split
EXACT_BLOCK = 4096  # keys times dimensions per iteration in float32
MERGE_TILE: Tile = {"BLOCK_SPLITS": 16, "num_warps": 4, "num_stages": 1}


def prefill_attention(
    out: Tensor,  # [T, Hq * D]  only the tokens of the blocks are written
    q: Tensor,  # [T, Hq, D]  contiguous
    keys: Tensor,  # [pages, page_size, Hkv, D]
    values: Tensor,  # [pages, page_size, Hkv, D]
    kv_scales: Tensor | None,  # [2, pages, page_size, Hkv] float32, of 8-bit KV
    page_table: Tensor,  # [R, P]
    query_start: Tensor,  # [R + 1]
    context_lens: Tensor,  # [R]
    blocks: TokenBlocks,
    scale: float,
    window: int,
    gate: Tensor | None,  # [T, Hq * D]
    rounded_out: RoundedTokens | None = None,  # written instead of `out`
    *,
    num_tokens: int,
    deterministic: bool,
) -> None:
    """softmax(q k^T * scale) v for the tokens of all blocks, times sigmoid(gate): one launch, or
    two.
    """
    (_, num_heads, head_dim), num_blocks = q.shape, len(blocks.table)
    if num_blocks == 0:
        return
    assert q.is_contiguous()
    assert gate is None or gate.stride(1) == 1
    page_size, num_kv_heads = keys.shape[1:3]
    shape = (num_heads, num_kv_heads, head_dim, page_size)
    # Two 8-bit blocks, and one in the queries' dtype, take as much memory as two of the latter.
    tile = _prefill_rule(shape, q.dtype, shared_memory(q.device))
    if not deterministic:
        tile = choose("prefill_attention", shape, num_tokens, tile, q.device)
    if stored_as(keys) != "plain" and not has_dependent_launch(q.device):
        tile = _without_wgmma(tile, head_dim)
    num_groups = num_kv_heads * cdiv(num_heads // num_kv_heads, tile["BLOCK_HEADS"])
    max_keys = page_table.shape[1] * page_size
    num_splits = 1 if deterministic else _plan_splits(num_blocks * num_groups, max_keys, q.device)
    partial = log_sums = None  # the splits' results, and their log-sum-exp
    if num_splits > 1:
        partial = q.new_empty(
            (num_blocks, rows.BLOCK_TOKENS, num_heads, num_splits, head_dim), dtype=torch.float32
        )
        log_sums = q.new_empty(partial.shape[:-1], dtype=torch.float32)
    places = (blocks.table, query_start, context_lens)
    gate_stride = 0 if gate is None else gate.stride(0)
    constants = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "WINDOW": window}
    constants |= {"BLOCK_D": max(16, next_power_of_2(head_dim)), **launch_options(q.device)}
    key_scales, value_scales = (None, None) if kv_scales is None else kv_scales
    codes = code_scales = None
    if rounded_out is not None:
        codes, code_scales = rounded_out.codes, rounded_out.scales
    scale_stride = 0 if code_scales is None else code_scales.stride(0)
    _prefill_kernel[num_groups, num_blocks, num_splits](
        q,
        view_codes(keys, torch.int32),
        view_codes(values, torch.int32),
        key_scales,
        value_scales,
        page_table,
        *places,
        gate if partial is None else None,
        out,
        codes,
        code_scales,
        partial,
        log_sums,
        scale * LOG2_E.value,
        page_table.stride(0),
        gate_stride,
        scale_stride,
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=page_size,
        STORED=stored_as(keys),
        **constants,
        **tile,
    )
    if partial is not None:
        grid = (num_heads, num_blocks, rows.BLOCK_TOKENS)
        _merge_kernel[grid](
            partial,
            log_sums,
            *places,
            gate,
            out,
            codes,
            code_scales,
            gate_stride,
            scale_stride,
            num_splits,
            **constants,
            **MERGE_TILE,
        )


def _plan_splits(num_programs: int, max_keys: int, device: torch.device) -> int:
    """As many as give every SM a program, if the longest row may have enough keys."""
    longest = max_keys // (rows.BLOCK_TOKENS * WORTHWHILE_SPLIT.value)
    return max(1, min(num_processors(device) // num_programs, longest))


def _prefill_rule(shape: tuple[int, ...], dtype: torch.dtype, shared_memory: int) -> Tile:
    """The largest of a few tiles whose queries, and two blocks of keys and values, fit into shared
    memory.
    """
    num_heads, num_kv_heads, head_dim, page_size = shape
    padded_dim = next_power_of_2(head_dim)
    if (
        dtype == torch.float32
    ):  # no tensor cores: every product is an instruction, and registers are scarce
        block_keys = math.gcd(page_size, min(max(EXACT_BLOCK // padded_dim, 16), 64))
        return {"BLOCK_HEADS": 1, "BLOCK_KEYS": block_keys, "num_warps": 4, "num_stages": 1}
    max_heads = next_power_of_2(num_heads // num_kv_heads)
    for num_stacked, num_keys in ((2, 64), (2, 32), (1, 64), (1, 32)):
        block_heads, block_keys = min(num_stacked, max_heads), math.gcd(num_keys, page_size)
        if (
            rows.BLOCK_TOKENS * block_heads + 4 * block_keys
        ) * padded_dim * dtype.itemsize <= shared_memory:
            break
    # wgmma needs a full warp group (4 warps) per 64 rows.
    tile = {"BLOCK_HEADS": block_heads, "BLOCK_KEYS": block_keys}
    return {**tile, "num_warps": 4 * block_heads, "num_stages": 2}


def _without_wgmma(tile: Tile, head_dim: int) -> Tile:
    """For 8-bit KV before sm_90, where `mma` takes widened keys from registers: with another block
    of them in flight, wide heads do not fit.
    """
    return {**tile, "num_stages": 1} if head_dim > 128 else tile


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles that `penstock tune` tries for a kernel of this file; none for others."""
    if kernel != "prefill_attention":
        return []
    num_heads, num_kv_heads, _, page_size = shape
    choices = ((2, 64, 2), (2, 64, 3), (2, 32, 2), (2, 32, 3), (1, 64, 2), (1, 32, 2), (1, 32, 3))
    return [
        {"BLOCK_HEADS": heads, "BLOCK_KEYS": size, "num_warps": 4 * heads, "num_stages": num_stages}
        for heads, size, num_stages in choices
        if page_size % size == 0 and heads <= num_heads // num_kv_heads
    ]


@triton.jit
def _find_block(p_blocks, p_query_start, p_context_lens, i_block):
    """Its row, its first token, its number of tokens, and the position of the first."""
    row = tl.load(p_blocks + i_block * 4).to(tl.int64)
    first_token = tl.load(p_blocks + i_block * 4 + 1)
    num_tokens = tl.load(p_blocks + i_block * 4 + 2)
    num_ahead = (tl.load(p_context_lens + row) - tl.load(p_query_start + row + 1)).to(tl.int32)
    return row, first_token, num_tokens, num_ahead + first_token


@triton.jit
def _share_keys(position, num_tokens, num_splits, WINDOW: tl.constexpr):
    """In units of 64 keys: the first that the block sees, their number, and how many a split
    takes.
    """
    first = tl.maximum(position - WINDOW + 1, 0) // BLOCK_TOKENS if WINDOW else 0
    number = tl.cdiv(position + num_tokens, BLOCK_TOKENS) - first
    return first, number, tl.maximum(tl.cdiv(number, num_splits), WORTHWHILE_SPLIT)


@triton.jit
def _apply_gate(b_out, b_gate):
    return b_out / (1.0 + tl.exp2(b_gate.to(tl.float32) * -LOG2_E))


# Parts of one buffer with any alignment, and a stride that follows the longest row.
@triton.jit(
    do_not_specialize=[
        "p_pages",
        "p_blocks",
        "p_query_start",
        "p_context_lens",
        "table_stride",
        "scale_stride",
    ]
)
def _prefill_kernel(
    p_q,
    p_keys,
    p_values,
    p_key_scales,  # None: keys and values are not quantized
    p_value_scales,
    p_pages,
    p_blocks,
    p_query_start,
    p_context_lens,
    p_gate,
    p_out,
    p_codes,  # None: the result goes to `p_out`
    p_code_scales,
    p_partial,
    p_log_sums,
    scale,
    table_stride,
    gate_stride,
    scale_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block and BLOCK_HEADS of the query heads of one key head, against one split of the block's
    keys.

    The values of a block are multiplied one iteration after its weights are known. So the tensor
    cores have work while the weights of the next block are computed; the last iteration has no keys
    of its own.
    """
    let_next_start(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    NUM_GROUPS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    BLOCK_M: tl.constexpr = BLOCK_HEADS * BLOCK_TOKENS
    i_kv_head, i_group = tl.program_id(0) // NUM_GROUPS, tl.program_id(0) % NUM_GROUPS
    # Later blocks of a row see more keys: they start first, so that the tail is short.
    i_block = tl.num_programs(1) - 1 - tl.program_id(1)
    i_split, num_splits = tl.program_id(2), tl.num_programs(2)
    row, first_token, num_tokens, position = _find_block(
        p_blocks, p_query_start, p_context_lens, i_block
    )
    first, number, share = _share_keys(position, num_tokens, num_splits, WINDOW)
    wait_for_previous(PDL)
    if (num_tokens == 0) | (i_split * share >= number):
        return
    first_key = (first + i_split * share) * BLOCK_TOKENS
    end_key = tl.minimum(position + num_tokens, (first + (i_split + 1) * share) * BLOCK_TOKENS)
    num_key_blocks = tl.cdiv(end_key - first_key, BLOCK_KEYS)

    lead = position % BLOCK_TOKENS
    base = position - lead  # the position of the tile's first row
    tokens, members = (
        tl.arange(0, BLOCK_M) % BLOCK_TOKENS,
        i_group * BLOCK_HEADS + tl.arange(0, BLOCK_M) // BLOCK_TOKENS,
    )
    dims, keys = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KEYS)
    heads = i_kv_head * GROUP + members
    is_query = (tokens >= lead) & (tokens < lead + num_tokens) & (members < GROUP)
    is_dim = (dims < HEAD_DIM)[None, :]
    is_output = is_query[:, None] & is_dim
    first_row = (first_token - lead).to(tl.int64)
    in_tile = (tokens * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    b_q = tl.load(p_q + first_row * (NUM_HEADS * HEAD_DIM) + in_tile, mask=is_output, other=0.0)

    p_pages += row * table_stride
    # 8-bit KV is read as words of four elements.
    WIDTH: tl.constexpr = 1 if STORED == "plain" else 4
    STORED_DIM: tl.constexpr = HEAD_DIM // WIDTH
    stored_dims = tl.arange(0, BLOCK_D // WIDTH)
    is_stored = (stored_dims < STORED_DIM)[None, :]
    p_keys += i_kv_head * STORED_DIM
    p_values += i_kv_head * STORED_DIM
    in_block = keys[:, None] * (NUM_KV_HEADS * STORED_DIM) + stored_dims[None, :]
    in_scales = keys * NUM_KV_HEADS + i_kv_head
    page = tl.load(p_pages + first_key // PAGE_SIZE)
    value_place = tl.zeros((), tl.int64)
    b_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_decay = tl.zeros((BLOCK_M,), tl.float32)
    b_weights = tl.zeros((BLOCK_M, BLOCK_KEYS), tl.float32)
    b_out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # There is always a block. If the compiler does not know that, tensor cores wait in every
    # iteration.
    for i_key_block in range(tl.maximum(num_key_blocks, 1) + 1):
        start = first_key + i_key_block * BLOCK_KEYS
        key_place = page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE
        key_place *= NUM_KV_HEADS * STORED_DIM
        page = tl.load(
            p_pages + (start + BLOCK_KEYS) // PAGE_SIZE,
            mask=i_key_block + 1 < num_key_blocks,
            other=0,
        )
        b_k = tl.load(p_keys + key_place + in_block, mask=is_stored, other=0.0)
        b_k = widen(b_k, b_q.dtype, STORED)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if STORED != "plain":
            b_scores *= tl.load(p_key_scales + key_place // STORED_DIM + in_scales)[None, :]
        # Unwritten page entries can hold anything, and 0 * NaN is NaN.
        num_values = tl.where(i_key_block > 0, end_key - start + BLOCK_KEYS, 0)
        is_value = (keys < num_values)[:, None] & is_stored
        b_v = tl.load(p_values + value_place + in_block, mask=is_value, other=0.0)
        b_v = widen(b_v, b_q.dtype, STORED)
        if STORED != "plain":
            p_scales = p_value_scales + value_place // STORED_DIM + in_scales
            b_v_scales = tl.load(p_scales, mask=keys < num_values, other=0.0)
            b_weights *= (b_v_scales * SCALE_UNIT)[None, :]
        b_out = tl.dot(
            b_weights.to(b_q.dtype), b_v, b_out * b_decay[:, None], input_precision="ieee"
        )
        is_edge = start >= tl.minimum(base, end_key)
        if WINDOW:
            is_edge = is_edge | (start < base + BLOCK_TOKENS - WINDOW)
        if is_edge:
            b_last_key = tl.minimum(base + tokens, end_key - 1)
            is_seen = keys[None, :] <= (b_last_key - start)[:, None]
            if WINDOW:
                is_seen = is_seen & (keys[None, :] > (base + tokens - WINDOW - start)[:, None])
            b_scores = tl.where(is_seen, b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1) * scale)
        b_decay = tl.exp2(b_max - b_new_max)
        b_weights = tl.exp2(b_scores * scale - b_new_max[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_weights, axis=1)
        b_max = b_new_max
        value_place = key_place

    b_sum = tl.where(
        b_sum > 0.0, b_sum, 1.0
    )  # a row of the tile without a token may have seen no keys
    if STORED != "plain":
        b_out *= 1.0 / SCALE_UNIT
    b_out = b_out * (1.0 / b_sum)[:, None]
    if p_partial is not None:
        to_split = (
            (i_block * BLOCK_TOKENS + tokens).to(tl.int64) * NUM_HEADS + heads
        ) * num_splits + i_split
        tl.store(p_partial + to_split[:, None] * HEAD_DIM + dims[None, :], b_out, mask=is_output)
        tl.store(p_log_sums + to_split, b_max + tl.log2(b_sum), mask=is_query)
    else:
        if p_gate is not None:
            in_gate = tokens[:, None] * gate_stride + heads[:, None] * HEAD_DIM + dims[None, :]
            b_gate = tl.load(p_gate + first_row * gate_stride + in_gate, mask=is_output, other=0.0)
            b_out = _apply_gate(b_out, b_gate)
        b_out = b_out.to(p_out.dtype.element_ty)
        to_output = first_row * (NUM_HEADS * HEAD_DIM) + in_tile
        if p_codes is None:
            tl.store(p_out + to_output, b_out, mask=is_output)
        else:
            tl.static_assert(HEAD_DIM == BLOCK_D)
            p_scales = p_code_scales + heads * (HEAD_DIM // 128) * scale_stride + first_row + tokens
            places = (p_codes + to_output, is_output, p_scales, scale_stride, is_query)
            store_codes(b_out.to(tl.float32), *places)


@triton.jit(
    do_not_specialize=["p_blocks", "p_query_start", "p_context_lens", "num_splits", "scale_stride"]
)
def _merge_kernel(
    p_partial,
    p_log_sums,
    p_blocks,
    p_query_start,
    p_context_lens,
    p_gate,
    p_out,
    p_codes,
    p_code_scales,
    gate_stride,
    scale_stride,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges the splits of one query head of one token, each weighted by its share of the sum."""
    let_next_start(PDL)
    i_head, i_block, i_token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, first_token, num_tokens, position = _find_block(
        p_blocks, p_query_start, p_context_lens, i_block
    )
    _, number, share = _share_keys(position, num_tokens, num_splits, WINDOW)
    lead = position % BLOCK_TOKENS
    wait_for_previous(PDL)
    if (i_token < lead) | (i_token >= lead + num_tokens):
        return
    num_written = tl.cdiv(number, share)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    from_output = (
        (i_block * BLOCK_TOKENS + i_token).to(tl.int64) * NUM_HEADS + i_head
    ) * num_splits
    b_max = tl.full((), LOWEST, tl.float32)
    b_sum = tl.zeros((), tl.float32)
    b_out = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_written, BLOCK_SPLITS):
        splits = start + tl.arange(0, BLOCK_SPLITS)
        is_written = splits < num_written
        b_log_sums = tl.load(
            p_log_sums + from_output + splits, mask=is_written, other=float("-inf")
        )
        from_splits = (from_output + splits)[:, None] * HEAD_DIM + dims[None, :]
        is_number = is_written[:, None] & is_dim[None, :]
        b_partial = tl.load(p_partial + from_splits, mask=is_number, other=0.0)
        b_new_max = tl.maximum(b_max, tl.max(b_log_sums, axis=0))
        b_decay = tl.exp2(b_max - b_new_max)
        b_weights = tl.exp2(b_log_sums - b_new_max)
        b_sum = b_sum * b_decay + tl.sum(b_weights, axis=0)
        b_out = b_out * b_decay + tl.sum(b_weights[:, None] * b_partial, axis=0)
        b_max = b_new_max
    b_out = b_out / b_sum
    token = (first_token - lead + i_token).to(tl.int64)
    in_heads = i_head * HEAD_DIM + dims
    if p_gate is not None:
        b_out = _apply_gate(
            b_out, tl.load(p_gate + token * gate_stride + in_heads, mask=is_dim, other=0.0)
        )
    b_out = b_out.to(p_out.dtype.element_ty)
    to_output = token * (NUM_HEADS * HEAD_DIM) + in_heads
    if p_codes is None:
        tl.store(p_out + to_output, b_out, mask=is_dim)
    else:
        is_row = tl.full([1], 1, tl.int1)
        p_scales = p_code_scales + i_head * (HEAD_DIM // 128) * scale_stride + token
        p_scales += tl.zeros([1], tl.int64)
        places = ((p_codes + to_output)[None, :], is_dim[None, :], p_scales, scale_stride, is_row)
        store_codes(b_out.to(tl.float32)[None, :], *places)
