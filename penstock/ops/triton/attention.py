# mypy: disable-error-code="no-untyped-def"
"""Attention on a GPU: rope and KV stores in one kernel; the rows decide which attention kernel
runs: `decode_attention` for decodes, `prefill_attention` for rows of several tokens.

Positions and KV indices are read before the preceding kernels are complete: a step's inputs are
written before its first kernel with an early start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.float8 import RoundedTokens
from penstock.ops.reference import attention as reference
from penstock.ops.reference.rows import LEAST_KEYS, Span, TokenBlocks, are_in_blocks, decode_runs
from penstock.ops.tiles import STEP
from penstock.ops.triton import decode_attention as decodes
from penstock.ops.triton import prefill_attention as prefills
from penstock.ops.triton.fp8 import rounded_for
from penstock.ops.triton.kv_codes import encode, stored_as, view_codes
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.tuning import Tile, choose
from penstock.ops.weight import Weight


def rope_and_store(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, D]
    q_norm: Tensor | None,  # [D] float32
    k_norm: Tensor | None,  # [D] float32
    eps: float,
    rope: Tensor,  # [max_len, 2, rot/2] float32
    positions: Tensor,  # [T]
    kv_index: Tensor,  # [T]
    keys: Tensor,  # [pages, page_size, Hkv, D]  written
    values: Tensor,  # [pages, page_size, Hkv, D]  written
    interleaved: bool = False,
    kv_scales: Tensor | None = None,  # [2, pages, page_size, Hkv] float32  written
) -> Tensor:  # [T, Hq, D]
    """Head norms and rope; stores keys and values in their pages; returns the queries."""
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    q, k, v = (_with_heads_adjacent(heads) for heads in (q, k, v))
    # One tile for all sizes: a head norm sums in the same order in every step.
    tile = choose("rope_and_store", (num_heads, num_kv_heads, head_dim), 1, _rope_rule(), q.device)
    num_groups = sum(cdiv(heads, tile["BLOCK_HEADS"]) for heads in (num_heads, num_kv_heads))
    out = q.new_empty(q.shape)
    key_scales, value_scales = (None, None) if kv_scales is None else kv_scales
    _rope_and_store_kernel[num_tokens, num_groups](
        q,
        k,
        v,
        q_norm,
        k_norm,
        rope,
        positions,
        kv_index,
        out,
        view_codes(keys, torch.uint8),
        view_codes(values, torch.uint8),
        key_scales,
        value_scales,
        eps,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=rope.shape[2],
        INTERLEAVED=interleaved,
        STORED=stored_as(keys),
        BLOCK_D=next_power_of_2(head_dim),
        **tile,
        **launch_options(q.device),
    )
    return out


def paged_attention(
    q: Tensor,  # [T, Hq, D]
    keys: Tensor,  # [pages, page_size, Hkv, D]
    values: Tensor,  # [pages, page_size, Hkv, D]
    page_table: Tensor,  # [R, P]
    query_start: Tensor,  # [R + 1]
    context_lens: Tensor,  # [R]
    spans: Sequence[Span],
    blocks: TokenBlocks,
    scale: float,
    window: int = 0,  # keys a query sees, including itself; 0: all
    gate: Tensor | None = None,  # [T, Hq * D]
    kv_scales: Tensor | None = None,  # [2, pages, page_size, Hkv] float32, of 8-bit KV
    reader: Weight | None = None,  # that of the GEMM which alone reads the result
    *,
    deterministic: bool = False,
) -> Tensor | RoundedTokens:  # [T, Hq * D]
    """softmax(q k^T * scale) v for every token of every row, times sigmoid(gate)."""
    if keys.shape[1] % LEAST_KEYS:
        step = (query_start, context_lens, spans, blocks, scale, window, gate, kv_scales)
        return reference.paged_attention(
            q, keys, values, page_table, *step, deterministic=deterministic
        )
    out = q.new_empty(len(q), q.shape[1] * q.shape[2])
    rounded_out = None
    if not deterministic and q.shape[2] in (STEP, 2 * STEP) and are_in_blocks(spans):
        rounded_out = rounded_for(reader, out)
    for rows, tokens in decode_runs(spans):
        decodes.decode_attention(
            out[tokens],
            _with_heads_adjacent(q[tokens]),
            keys,
            values,
            kv_scales,
            page_table[rows],
            context_lens[rows],
            scale,
            window,
            None if gate is None else gate[tokens],
            deterministic,
            max((span.num_newest for span in spans[rows]), default=1),
        )
    prefills.prefill_attention(
        out,
        q,
        keys,
        values,
        kv_scales,
        page_table,
        query_start,
        context_lens,
        blocks,
        scale,
        window,
        gate,
        rounded_out,
        num_tokens=len(q),
        deterministic=deterministic,
    )
    return out if rounded_out is None else rounded_out


def _with_heads_adjacent(x: Tensor) -> Tensor:  # [T, heads, D]
    """A head's elements and a token's heads must be contiguous; tokens may be further apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _rope_rule() -> Tile:
    """One warp per head."""
    return {"BLOCK_HEADS": 4, "num_warps": 4, "num_stages": 1}


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles that `penstock tune` tries for a kernel of this op; none for others."""
    if kernel == "rope_and_store":
        return [{"BLOCK_HEADS": n, "num_warps": n, "num_stages": 1} for n in (1, 2, 4, 8)]
    return decodes.candidates(kernel, shape) + prefills.candidates(kernel, shape, num_tokens)


@triton.jit(do_not_specialize=["p_positions", "p_kv_index"])  # parts of one buffer, any alignment
def _rope_and_store_kernel(
    p_q,
    p_k,
    p_v,
    p_q_norm,
    p_k_norm,
    p_rope,
    p_positions,
    p_kv_index,
    p_out,
    p_keys,
    p_values,
    p_key_scales,  # None: keys and values are not quantized
    p_value_scales,
    eps,
    q_stride,
    k_stride,
    v_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per group of a token's query heads, then per group of its key heads with their
    values.
    """
    let_next_start(PDL)
    NUM_QUERY_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    i_token = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1)
    position = tl.load(p_positions + i_token).to(tl.int64)
    p_angles = p_rope + position * (2 * NUM_PAIRS)
    members = tl.arange(0, BLOCK_HEADS)
    if i_group < NUM_QUERY_GROUPS:
        heads = i_group * BLOCK_HEADS + members
        b_q, in_token, is_inside = _norm_and_rotate(
            p_q + i_token * q_stride,
            p_q_norm,
            p_angles,
            heads,
            eps,
            NUM_HEADS,
            HEAD_DIM,
            NUM_PAIRS,
            INTERLEAVED,
            BLOCK_HEADS,
            BLOCK_D,
            PDL,
        )
        p_to = p_out + i_token * (NUM_HEADS * HEAD_DIM) + in_token
        tl.store(p_to, b_q.to(p_out.dtype.element_ty), mask=is_inside)
    else:
        heads = (i_group - NUM_QUERY_GROUPS) * BLOCK_HEADS + members
        place = tl.load(p_kv_index + i_token).to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
        b_k, in_token, is_inside = _norm_and_rotate(
            p_k + i_token * k_stride,
            p_k_norm,
            p_angles,
            heads,
            eps,
            NUM_KV_HEADS,
            HEAD_DIM,
            NUM_PAIRS,
            INTERLEAVED,
            BLOCK_HEADS,
            BLOCK_D,
            PDL,
        )
        b_k = b_k.to(p_k.dtype.element_ty)
        b_v = tl.load(p_v + i_token * v_stride + in_token, mask=is_inside, other=0.0)
        if STORED != "plain":
            b_k, b_k_scales = encode(b_k.to(tl.float32), STORED)
            b_v, b_v_scales = encode(b_v.to(tl.float32), STORED)
            scale_place = place // HEAD_DIM + heads
            tl.store(p_key_scales + scale_place, b_k_scales, mask=heads < NUM_KV_HEADS)
            tl.store(p_value_scales + scale_place, b_v_scales, mask=heads < NUM_KV_HEADS)
        tl.store(p_keys + place + in_token, b_k.to(p_keys.dtype.element_ty), mask=is_inside)
        tl.store(p_values + place + in_token, b_v.to(p_values.dtype.element_ty), mask=is_inside)


@triton.jit
def _norm_and_rotate(
    p_token,
    p_norm,
    p_angles,
    heads,  # [BLOCK_HEADS]
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Heads of a token, [BLOCK_HEADS, BLOCK_D] float32, with their offsets in the token and a mask.

    A dimension becomes x * cos + partner * sin; the partner is loaded again instead of exchanged
    between threads. For the same reason every warp loads weights and angles for its own head.
    """
    dims = tl.broadcast_to(tl.arange(0, BLOCK_D)[None, :], (BLOCK_HEADS, BLOCK_D))
    if INTERLEAVED:
        is_first = dims % 2 == 0
        pairs, partners = dims // 2, dims ^ 1
    else:
        is_first = dims < NUM_PAIRS
        pairs = tl.where(is_first, dims, dims - NUM_PAIRS)
        partners = tl.where(is_first, dims + NUM_PAIRS, dims - NUM_PAIRS)
    is_inside = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)
    is_turned = is_inside & (dims < 2 * NUM_PAIRS)
    b_cos = tl.load(p_angles + pairs, mask=is_turned, other=1.0)
    b_sin = tl.load(p_angles + NUM_PAIRS + pairs, mask=is_turned, other=0.0)
    b_sin = tl.where(is_first, -b_sin, b_sin)
    if p_norm is not None:
        b_weight = tl.load(p_norm + dims, mask=is_inside, other=0.0)
        b_partner_weight = tl.load(p_norm + partners, mask=is_turned, other=0.0)
    wait_for_previous(PDL)
    p_heads = p_token + heads[:, None] * HEAD_DIM
    b_x = tl.load(p_heads + dims, mask=is_inside, other=0.0).to(tl.float32)
    b_partner = tl.load(p_heads + partners, mask=is_turned, other=0.0).to(tl.float32)
    if p_norm is not None:
        b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / HEAD_DIM + eps)[:, None]
        b_x = b_x * b_scale * b_weight
        b_partner = b_partner * b_scale * b_partner_weight
    return b_x * b_cos + b_partner * b_sin, heads[:, None] * HEAD_DIM + dims, is_inside
