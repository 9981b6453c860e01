"""Attention of packed prompts by torch's own flash kernel."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from penstock.forge.fragments.prefill_lengths import Pack
from penstock.forge.fragments.shape import Shape


def attend_pack(turned: Tensor, qkv: Tensor, pack: Pack, shape: Shape) -> Tensor:
    """turned [T, (Hq + Hkv) * D], qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D]"""
    heads = turned.unflatten(1, (-1, shape.head_dim))
    query, key = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
    value = qkv.unflatten(1, (-1, shape.head_dim))[:, -shape.num_kv_heads :]
    starts = torch.tensor([0, *accumulate(pack.lengths)], dtype=torch.int32).to(
        qkv.device, non_blocking=True
    )
    longest = max(pack.lengths)
    mixed = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest, longest, 0.0, True, False
    )[0]
    return mixed.flatten(1)
