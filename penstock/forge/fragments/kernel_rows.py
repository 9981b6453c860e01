# mypy: disable-error-code="no-untyped-def"
"""Kernels that treat tokens one by one: embedding, norm, rotation and storing, activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.forge.fragments.cache_pages import Cache
from penstock.forge.fragments.launch import launch
from penstock.forge.fragments.shape import Shape, rope_angles
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.triton.matmul import _swiglu_kernel

FEW_TOKENS = 64
HEADS_AT_ONCE = 16
COLUMNS_AT_ONCE = 1024


def embed(tokens: Tensor, embedding: Tensor) -> Tensor:
    """[T] -> [T, H]. A plain launch, which waits for everything before the step.

    A token that is out of range, which is refused later, must not be read.
    """
    out = torch.empty(
        len(tokens), embedding.shape[1], dtype=embedding.dtype, device=embedding.device
    )
    vocab_size, hidden_size = embedding.shape
    grid = (len(tokens), cdiv(hidden_size, COLUMNS_AT_ONCE))
    launch(embed_kernel, grid)(
        tokens, embedding, out, vocab_size, WIDTH=hidden_size, BLOCK=COLUMNS_AT_ONCE
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["p_tokens"])
def embed_kernel(
    p_tokens, p_embedding, p_out, vocab_size, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    i_token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(p_tokens + i_token).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    b_row = tl.load(p_embedding + token * WIDTH + columns, mask=columns < WIDTH)
    tl.store(p_out + i_token * WIDTH + columns, b_row, mask=columns < WIDTH)


def scale_rows(x: Tensor, eps: float) -> Tensor:
    """x / rms(x): [T, H] -> [T, H], in float32 inside. The norm's weight is part of the weights
    behind it.
    """
    out = torch.empty_like(x)
    block = next_power_of_2(x.shape[1])
    num_warps = max(1, min(block // 256, 16))
    options = launch_options(x.device)
    launch(scale_kernel, (len(x),))(
        x, out, eps, WIDTH=x.shape[1], BLOCK=block, num_warps=num_warps, **options
    )
    return out


@triton.jit
def scale_kernel(p_x, p_out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    wait_for_previous(PDL)
    b_x = tl.load(p_x + i_row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    b_out = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / WIDTH + eps)
    tl.store(p_out + i_row * WIDTH + columns, b_out.to(p_out.dtype.element_ty), mask=inside)


def gate_rows(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2F] -> [T, F]"""
    width = gate_up.shape[1] // 2
    out = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (len(gate_up), cdiv(width, COLUMNS_AT_ONCE))
    options = launch_options(gate_up.device)
    launch(_swiglu_kernel, grid)(
        gate_up, out, 2 * width, K=width, BLOCK_K=COLUMNS_AT_ONCE, num_warps=4, **options
    )
    return out


def rope_table(shape: Shape, device: torch.device) -> Tensor:
    """[max_len, 2, D / 2]: cosines, then sines"""
    angles = rope_angles(shape, device)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def turn_and_store(
    qkv: Tensor,  # [T, (Hq + 2 Hkv) * D]
    rope: Tensor,  # [max_len, 2, D / 2]
    slots: Tensor,  # [T]
    positions: Tensor,  # [T]
    cache: Cache,
    layer: int,
    shape: Shape,
) -> Tensor:  # [T, (Hq + Hkv) * D]
    """Rotates queries and keys; keys and values also go to the cache."""
    num_turned = shape.num_heads + shape.num_kv_heads
    turned = torch.empty(len(qkv), num_turned * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    # Few tokens fill the device only with programs of few heads.
    block_heads = HEADS_AT_ONCE if len(qkv) > FEW_TOKENS else HEADS_AT_ONCE // 4
    launch(turn_and_store_kernel, (len(qkv), cdiv(num_turned, block_heads)))(
        qkv,
        rope,
        slots,
        positions,
        cache.table,  # forge: when cache=pages
        turned,
        cache.keys[layer],
        cache.values[layer],
        cache.table.shape[1],  # forge: when cache=pages
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        PAGE_SIZE=cache.keys.shape[3],
        BLOCK_HEADS=block_heads,
        BLOCK_D=next_power_of_2(shape.head_dim),
        num_warps=4,
        **launch_options(qkv.device),
    )
    return turned


@triton.jit(do_not_specialize_on_alignment=["p_slots", "p_positions"])
def turn_and_store_kernel(
    p_qkv,
    p_rope,
    p_slots,
    p_positions,
    p_table,  # forge: when cache=pages
    p_turned,
    p_keys,
    p_values,
    table_stride,  # forge: when cache=pages
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few heads of a token. x becomes x * cos + partner * sin; the partner is read once more."""
    let_next_start(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.broadcast_to(tl.arange(0, BLOCK_D)[None, :], (BLOCK_HEADS, BLOCK_D))
    inside = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)
    slot = tl.load(p_slots + i_token).to(tl.int64)
    position = tl.load(p_positions + i_token).to(tl.int64)
    page = slot  # forge: when cache=slots
    # forge: when cache=pages
    page = tl.load(p_table + slot * table_stride + position // PAGE_SIZE).to(tl.int64)
    # forge: end
    p_angles = p_rope + position * HEAD_DIM
    b_cos = tl.load(p_angles + dims // 2, mask=inside, other=1.0)
    b_sin = tl.load(p_angles + HEAD_DIM // 2 + dims // 2, mask=inside, other=0.0)
    b_sin = tl.where(dims % 2 == 0, -b_sin, b_sin)
    wait_for_previous(PDL)
    p_heads = (
        p_qkv + i_token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + heads[:, None] * HEAD_DIM
    )
    b_x = tl.load(p_heads + dims, mask=inside, other=0.0).to(tl.float32)
    b_partner = tl.load(p_heads + (dims ^ 1), mask=inside, other=0.0).to(tl.float32)
    b_x = (b_x * b_cos + b_partner * b_sin).to(p_turned.dtype.element_ty)
    p_to = p_turned + i_token * ((NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM) + heads[:, None] * HEAD_DIM
    tl.store(p_to + dims, b_x, mask=inside)
    is_key = inside & (heads >= NUM_HEADS)[:, None]
    b_value = tl.load(p_heads + NUM_KV_HEADS * HEAD_DIM + dims, mask=is_key, other=0.0)
    in_page = (heads - NUM_HEADS)[:, None] * PAGE_SIZE + position % PAGE_SIZE
    place = (page * (NUM_KV_HEADS * PAGE_SIZE) + in_page) * HEAD_DIM + dims
    tl.store(p_keys + place, b_x, mask=is_key)
    tl.store(p_values + place, b_value, mask=is_key)
