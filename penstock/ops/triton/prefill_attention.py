# mypy: disable-error-code="no-untyped-def"
"""Attention of rows that have several new tokens. Knows blocks, pages and lengths, not the rest of
the step.

A program takes a block (tokens of one aligned stretch of 64 positions) and a few query heads of one
key head. Their queries are the rows of one tile, so that keys and values are read once for all of
them. Positions say which row of the tile a token is and which keys form a block: how a prompt was
cut changes no bit of it.

Where few blocks face a long context their keys are cut into splits, which a second kernel merges;
never when results must be deterministic.

Blocks, lengths and pages are read before the kernels ahead are complete: a step's inputs are
written before its first kernel with an early start.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.reference import rows
from penstock.ops.reference.rows import TokenBlocks
from penstock.ops.triton.launch import (
    LARGE_MEMORY,
    SMALL_MEMORY,
    CompileCase,
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_processors,
    shared_memory,
    wait_for_previous,
)
from penstock.ops.triton.tuning import Tile, choose

BLOCK_TOKENS = tl.constexpr(rows.BLOCK_TOKENS)
LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-1e30)  # below every score; unlike infinity it can be subtracted from itself
WORTHWHILE_SPLIT = tl.constexpr(16)  # stretches of 64 keys that make a split worth its merging
EXACT_BLOCK = 4096  # keys times dimensions that a program in float32 takes at a time
MERGE_TILE: Tile = {"BLOCK_SPLITS": 16, "num_warps": 4, "num_stages": 1}


def prefill_attention(
    out: Tensor,  # [T, Hq * D]  the tokens of the blocks are written, no others
    q: Tensor,  # [T, Hq, D]  contiguous
    keys: Tensor,  # [pages, page_size, Hkv, D]
    values: Tensor,  # [pages, page_size, Hkv, D]
    page_table: Tensor,  # [R, P]
    query_start: Tensor,  # [R + 1]
    context_lens: Tensor,  # [R]
    blocks: TokenBlocks,
    scale: float,
    window: int,
    gate: Tensor | None,  # [T, Hq * D]
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
    tile = _prefill_rule(shape, keys.dtype, shared_memory(q.device))
    if not deterministic:
        tile = choose("prefill_attention", shape, num_tokens, tile, q.device)
    num_groups = num_kv_heads * cdiv(num_heads // num_kv_heads, tile["BLOCK_HEADS"])
    max_keys = page_table.shape[1] * page_size
    num_splits = 1 if deterministic else _plan_splits(num_blocks * num_groups, max_keys, q.device)
    partial = log_sums = None  # the splits' results, and the logarithms of their sums
    if num_splits > 1:
        partial = q.new_empty(
            (num_blocks, rows.BLOCK_TOKENS, num_heads, num_splits, head_dim), dtype=torch.float32
        )
        log_sums = q.new_empty(partial.shape[:-1], dtype=torch.float32)
    places = (blocks.table, query_start, context_lens)
    gate_stride = 0 if gate is None else gate.stride(0)
    constants = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "WINDOW": window}
    constants |= {"BLOCK_D": max(16, next_power_of_2(head_dim)), **launch_options(q.device)}
    _prefill_kernel[num_groups, num_blocks, num_splits](
        q,
        keys,
        values,
        page_table,
        *places,
        gate if partial is None else None,
        out,
        partial,
        log_sums,
        scale * LOG2_E.value,
        page_table.stride(0),
        gate_stride,
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=page_size,
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
            gate_stride,
            num_splits,
            **constants,
            **MERGE_TILE,
        )


def _plan_splits(num_programs: int, max_keys: int, device: torch.device) -> int:
    """As many as make programs for every processor, if the longest row may have the keys for it."""
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
    ):  # no tensor cores: every product is an instruction, and registers are few
        block_keys = math.gcd(page_size, min(max(EXACT_BLOCK // padded_dim, 16), 64))
        return {"BLOCK_HEADS": 1, "BLOCK_KEYS": block_keys, "num_warps": 4, "num_stages": 1}
    max_heads = next_power_of_2(num_heads // num_kv_heads)
    for num_stacked, num_keys in ((2, 64), (2, 32), (1, 64), (1, 32)):
        block_heads, block_keys = min(num_stacked, max_heads), math.gcd(num_keys, page_size)
        if (
            rows.BLOCK_TOKENS * block_heads + 4 * block_keys
        ) * padded_dim * dtype.itemsize <= shared_memory:
            break
    # 4 warps for 64 rows of the tile: that is whom the tensor cores of Hopper obey.
    tile = {"BLOCK_HEADS": block_heads, "BLOCK_KEYS": block_keys}
    return {**tile, "num_warps": 4 * block_heads, "num_stages": 2}


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """What `penstock tune` tries for a kernel of this file; nothing for others."""
    if kernel != "prefill_attention":
        return []
    num_heads, num_kv_heads, _, page_size = shape
    choices = ((2, 64, 2), (2, 64, 3), (2, 32, 2), (2, 32, 3), (1, 64, 2), (1, 32, 2), (1, 32, 3))
    return [
        {"BLOCK_HEADS": heads, "BLOCK_KEYS": size, "num_warps": 4 * heads, "num_stages": num_stages}
        for heads, size, num_stages in choices
        if page_size % size == 0 and heads <= num_heads // num_kv_heads
    ]


def compile_cases() -> list[CompileCase]:
    """Qwen3.5-35B-A3B in bf16: with the tile of small cards, of large ones, these in splits, the
    merge.
    """
    blocks = {"p_blocks": "*i32", "p_query_start": "*i64", "p_context_lens": "*i64"}
    signature = {**dict.fromkeys(("p_q", "p_keys", "p_values", "p_out"), "*bf16"), **blocks}
    signature |= {"p_pages": "*i32", "scale": "fp32", "table_stride": "i32", "gate_stride": "i32"}
    gate = {"p_gate": "*bf16"}
    splits = {"p_partial": "*fp32", "p_log_sums": "*fp32"}
    merge_signature = {**splits, **blocks, **gate, "p_out": "*bf16"}
    merge_signature |= {"gate_stride": "i32", "num_splits": "i32"}
    constants: dict[str, Any] = {
        "NUM_HEADS": 16,
        "HEAD_DIM": 256,
        "WINDOW": 0,
        "BLOCK_D": 256,
        "PDL": False,
    }

    def prefill_case(memory: int, used: dict[str, str], unused: dict[str, str]) -> CompileCase:
        tile, options = _options(_prefill_rule((16, 2, 256, 64), torch.bfloat16, memory))
        given = {**constants, "NUM_KV_HEADS": 2, "PAGE_SIZE": 64, **tile, **dict.fromkeys(unused)}
        return _prefill_kernel, {**signature, **used}, given, options

    merge_tile, merge_options = _options(MERGE_TILE)
    return [
        prefill_case(SMALL_MEMORY, gate, splits),
        prefill_case(LARGE_MEMORY, gate, splits),
        prefill_case(LARGE_MEMORY, splits, gate),
        (_merge_kernel, merge_signature, {**constants, **merge_tile}, merge_options),
    ]


def _options(tile: Tile) -> tuple[dict[str, int], dict[str, int]]:
    """The constexprs of a tile, and what the compiler is told beside them."""
    names = ("num_warps", "num_stages")
    rest = {name: value for name, value in tile.items() if name not in names}
    return rest, {name: tile[name] for name in names}


@triton.jit
def _find_block(p_blocks, p_query_start, p_context_lens, i_block):
    """Its row, the first of its tokens, their number, and the position of the first."""
    row = tl.load(p_blocks + i_block * 4).to(tl.int64)
    first_token = tl.load(p_blocks + i_block * 4 + 1)
    num_tokens = tl.load(p_blocks + i_block * 4 + 2)
    num_ahead = (tl.load(p_context_lens + row) - tl.load(p_query_start + row + 1)).to(tl.int32)
    return row, first_token, num_tokens, num_ahead + first_token


@triton.jit
def _share_keys(position, num_tokens, num_splits, WINDOW: tl.constexpr):
    """In stretches of 64 keys: the first that the block sees, their number, and how many a split
    takes.
    """
    first = tl.maximum(position - WINDOW + 1, 0) // BLOCK_TOKENS if WINDOW else 0
    number = tl.cdiv(position + num_tokens, BLOCK_TOKENS) - first
    return first, number, tl.maximum(tl.cdiv(number, num_splits), WORTHWHILE_SPLIT)


@triton.jit
def _apply_gate(b_out, b_gate):
    return b_out / (1.0 + tl.exp2(b_gate.to(tl.float32) * -LOG2_E))


# Parts of one buffer, aligned anyhow, and a stride that follows the longest row.
@triton.jit(
    do_not_specialize=["p_pages", "p_blocks", "p_query_start", "p_context_lens", "table_stride"]
)
def _prefill_kernel(
    p_q,
    p_keys,
    p_values,
    p_pages,
    p_blocks,
    p_query_start,
    p_context_lens,
    p_gate,
    p_out,
    p_partial,
    p_log_sums,
    scale,
    table_stride,
    gate_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block and BLOCK_HEADS of the query heads of one key head, against one split of the block's
    keys.

    The values of a block meet its weights one turn after they are known. So the tensor cores have
    something to multiply while the weights of the next block are computed; the last turn has no
    keys of its own.
    """
    let_next_start(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    NUM_GROUPS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    BLOCK_M: tl.constexpr = BLOCK_HEADS * BLOCK_TOKENS
    i_kv_head, i_group = tl.program_id(0) // NUM_GROUPS, tl.program_id(0) % NUM_GROUPS
    # Later blocks of a row see more keys: they start first, and what is left at the end is short.
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
    p_keys += i_kv_head * HEAD_DIM
    p_values += i_kv_head * HEAD_DIM
    in_block = keys[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
    page = tl.load(p_pages + first_key // PAGE_SIZE)
    value_place = tl.zeros((), tl.int64)
    b_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_decay = tl.zeros((BLOCK_M,), tl.float32)
    b_weights = tl.zeros((BLOCK_M, BLOCK_KEYS), tl.float32)
    b_out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # There is always a block. A compiler that does not know it keeps the tensor cores waiting in
    # every turn.
    for i_key_block in range(tl.maximum(num_key_blocks, 1) + 1):
        start = first_key + i_key_block * BLOCK_KEYS
        key_place = (page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        page = tl.load(
            p_pages + (start + BLOCK_KEYS) // PAGE_SIZE,
            mask=i_key_block + 1 < num_key_blocks,
            other=0,
        )
        b_k = tl.load(p_keys + key_place + in_block, mask=is_dim, other=0.0).to(b_q.dtype)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        # Pages hold anything where nothing was written, and 0 * NaN is NaN.
        num_values = tl.where(i_key_block > 0, end_key - start + BLOCK_KEYS, 0)
        is_value = (keys < num_values)[:, None] & is_dim
        b_v = tl.load(p_values + value_place + in_block, mask=is_value, other=0.0).to(b_q.dtype)
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
    )  # a row of the tile that is no token may have seen nothing
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
        p_to = p_out + first_row * (NUM_HEADS * HEAD_DIM) + in_tile
        tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["p_blocks", "p_query_start", "p_context_lens", "num_splits"])
def _merge_kernel(
    p_partial,
    p_log_sums,
    p_blocks,
    p_query_start,
    p_context_lens,
    p_gate,
    p_out,
    gate_stride,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """The splits of one query head of one token, each weighted with its share of the sum."""
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
    p_to = p_out + token * (NUM_HEADS * HEAD_DIM) + in_heads
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=is_dim)
