# mypy: disable-error-code="no-untyped-def"
"""Attention of packed prompts: a program takes a tile of tokens and heads of one key head."""

from __future__ import annotations

import functools
import math
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.forge.fragments.launch import launch
from penstock.forge.fragments.shape import Shape
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    shared_memory,
    wait_for_previous,
)

TILE_TOKENS = 64
LOWEST = tl.constexpr(-1e30)  # below every score; unlike infinity it can be subtracted from itself


class Pack(NamedTuple):
    """Prompts end to end: T tokens of R prompts."""

    slots: Tensor  # [T]
    positions: Tensor  # [T]
    lasts: Tensor  # [R]  where the last token of each prompt is
    # [N, 3]  start and length of the prompt, and the token that the tile starts with
    tiles: Tensor


def pack_prompts(lengths: list[int], slots: list[int], device: torch.device) -> Pack:
    """In one copy to the device."""
    ends = list(accumulate(lengths))
    per_token = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    tiles = [
        (end - length, length, first)
        for end, length in zip(ends, lengths)
        for first in range(0, length, TILE_TOKENS)
    ]
    lasts = torch.tensor(ends) - 1
    packed = torch.cat([per_token, positions, lasts, torch.tensor(tiles).flatten()]).to(device)
    per_token, positions, lasts, flat = packed.split(
        (ends[-1], ends[-1], len(lengths), 3 * len(tiles))
    )
    return Pack(per_token, positions, lasts, flat.view(-1, 3))


def attend_pack(turned: Tensor, qkv: Tensor, pack: Pack, shape: Shape) -> Tensor:
    """turned [T, (Hq + Hkv) * D], qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D]"""
    out = torch.empty(len(qkv), shape.num_query_rows, dtype=qkv.dtype, device=qkv.device)
    group = shape.num_heads // shape.num_kv_heads
    padded_dim = max(16, next_power_of_2(shape.head_dim))
    block_heads, block_keys = choose_blocks(group, padded_dim, qkv.dtype, qkv.device)
    launch(
        prefill_attention_kernel, (shape.num_kv_heads * cdiv(group, block_heads), len(pack.tiles))
    )(
        turned,
        qkv,
        pack.tiles,
        out,
        shape.head_dim**-0.5 * math.log2(math.e),
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_T=TILE_TOKENS,
        BLOCK_HEADS=block_heads,
        BLOCK_KEYS=block_keys,
        BLOCK_D=padded_dim,
        num_warps=4 * block_heads,  # wgmma needs a warp group (4 warps) per 64 rows
        num_stages=2,
        **launch_options(qkv.device),
    )
    return out


@functools.cache
def choose_blocks(
    group: int, padded_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, int]:
    """The largest tile whose queries and two blocks of keys and values fit into shared memory."""
    if dtype == torch.float32:
        return 1, max(16, min(64, 4096 // padded_dim))
    for heads, keys in ((2, 64), (2, 32), (1, 64)):
        rows = TILE_TOKENS * heads + 4 * keys
        if heads <= group and rows * padded_dim * dtype.itemsize <= shared_memory(device):
            return heads, keys
    return 1, 32


@triton.jit(do_not_specialize_on_alignment=["p_tiles"])
def prefill_attention_kernel(
    p_turned,
    p_qkv,
    p_tiles,
    p_out,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """The queries of several heads are the rows of one tile, so that keys are read once for all of
    them.

    The values of a block are multiplied one iteration after its weights are known, so that the
    tensor cores are busy while the weights of the next block are computed. The last iteration has
    no keys of its own.
    """
    let_next_start(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    NUM_GROUPS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    BLOCK_M: tl.constexpr = BLOCK_HEADS * BLOCK_T
    TURNED_WIDTH: tl.constexpr = (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
    QKV_WIDTH: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    i_kv_head, i_group = tl.program_id(0) // NUM_GROUPS, tl.program_id(0) % NUM_GROUPS
    # Later tiles of a prompt see more keys: they start first, so that the last ones are short.
    p_tile = p_tiles + (tl.num_programs(1) - 1 - tl.program_id(1)) * 3
    wait_for_previous(PDL)
    start = tl.load(p_tile)
    length = tl.load(p_tile + 1).to(tl.int32)
    base = tl.load(p_tile + 2).to(tl.int32)
    if length == 0:
        return
    end_key = tl.minimum(base + BLOCK_T, length)
    num_blocks = tl.cdiv(end_key, BLOCK_KEYS)

    tokens, members = (
        tl.arange(0, BLOCK_M) % BLOCK_T,
        i_group * BLOCK_HEADS + tl.arange(0, BLOCK_M) // BLOCK_T,
    )
    dims, keys = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KEYS)
    heads = i_kv_head * GROUP + members
    is_dim = (dims < HEAD_DIM)[None, :]
    is_output = ((base + tokens < length) & (members < GROUP))[:, None] & is_dim
    in_head = heads[:, None] * HEAD_DIM + dims[None, :]
    b_q = tl.load(
        p_turned + (start + base + tokens)[:, None] * TURNED_WIDTH + in_head,
        mask=is_output,
        other=0.0,
    )

    p_keys = p_turned + start * TURNED_WIDTH + (NUM_HEADS + i_kv_head) * HEAD_DIM
    p_values = p_qkv + start * QKV_WIDTH + (NUM_HEADS + NUM_KV_HEADS + i_kv_head) * HEAD_DIM
    in_keys = keys[:, None] * TURNED_WIDTH + dims[None, :]
    in_values = keys[:, None] * QKV_WIDTH + dims[None, :]
    b_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_decay = tl.zeros((BLOCK_M,), tl.float32)
    b_weights = tl.zeros((BLOCK_M, BLOCK_KEYS), tl.float32)
    b_out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # There is always a block. If the compiler does not know, the tensor cores wait in every
    # iteration.
    for block in range(tl.maximum(num_blocks, 1) + 1):
        first = block * BLOCK_KEYS
        far = tl.cast(first, tl.int64)  # a prompt's rows may have more than 2 ** 31 elements
        is_key = (first + keys < end_key)[:, None] & is_dim
        b_k = tl.load(p_keys + far * TURNED_WIDTH + in_keys, mask=is_key, other=0.0)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        before = first - BLOCK_KEYS
        is_value = (keys < tl.where(block > 0, end_key - before, 0))[:, None] & is_dim
        b_v = tl.load(
            p_values + (far - BLOCK_KEYS) * QKV_WIDTH + in_values, mask=is_value, other=0.0
        )
        b_out = tl.dot(
            b_weights.to(b_v.dtype), b_v, b_out * b_decay[:, None], input_precision="ieee"
        )
        if first + BLOCK_KEYS > tl.minimum(base, end_key):
            b_last_key = tl.minimum(base + tokens, end_key - 1)
            b_scores = tl.where(
                keys[None, :] <= (b_last_key - first)[:, None], b_scores, float("-inf")
            )
        b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1) * scale)
        b_decay = tl.exp2(b_max - b_new_max)
        b_weights = tl.exp2(b_scores * scale - b_new_max[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_weights, axis=1)
        b_max = b_new_max

    b_out = b_out / b_sum[:, None]
    p_to = p_out + (start + base + tokens)[:, None] * (NUM_HEADS * HEAD_DIM) + in_head
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=is_output)
