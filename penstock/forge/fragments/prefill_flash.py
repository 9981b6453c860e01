"""Attention of packed prompts by torch's own flash kernel; lengths stay on the host."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.forge.fragments.shape import Shape


class Pack(NamedTuple):
    """Prompts end to end: T tokens of R prompts."""

    slots: Tensor  # [T]
    positions: Tensor  # [T]
    lasts: Tensor  # [R]  where the last token of each prompt is
    lengths: list[int]


def pack_prompts(lengths: list[int], slots: list[int], device: torch.device) -> Pack:
    """In one copy to the device."""
    ends = list(accumulate(lengths))
    per_token = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = torch.cat([per_token, positions, torch.tensor(ends) - 1]).to(device)
    per_token, positions, lasts = packed.split((ends[-1], ends[-1], len(lengths)))
    return Pack(per_token, positions, lasts, lengths)


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
