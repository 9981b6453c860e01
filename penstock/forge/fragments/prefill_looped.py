"""Attention of packed prompts by torch, one prompt after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.forge.fragments.prefill_lengths import Pack
from penstock.forge.fragments.shape import Shape


def attend_pack(turned: Tensor, qkv: Tensor, pack: Pack, shape: Shape) -> Tensor:
    """turned [T, (Hq + Hkv) * D], qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D]"""
    out = torch.empty(len(qkv), shape.num_query_rows, dtype=qkv.dtype, device=qkv.device)
    is_grouped = shape.num_heads != shape.num_kv_heads
    values = qkv[:, -shape.num_key_rows :]
    start = 0
    for length in pack.lengths:
        span = slice(start, start + length)
        heads = turned[span].unflatten(1, (-1, shape.head_dim)).transpose(0, 1)
        query, key = heads[: shape.num_heads], heads[shape.num_heads :]
        value = values[span].unflatten(1, (-1, shape.head_dim)).transpose(0, 1)
        mixed = F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, enable_gqa=is_grouped
        )
        out[span] = mixed[0].transpose(0, 1).flatten(1)
        start += length
    return out
