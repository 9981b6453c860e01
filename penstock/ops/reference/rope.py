"""Rotary position embedding: the table of angles, and the rotation of the first dimensions of a head."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(inv_freq: Tensor, max_len: int, scale: float = 1.0) -> Tensor:
    """inv_freq [rot/2] float32 -> [max_len, 2, rot/2] float32: cosines and sines, both times `scale`."""
    positions = torch.arange(max_len, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq)
    return torch.stack((angles.cos(), angles.sin()), dim=1) * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D] float32, cos and sin [T, rot/2]: turns the first `rot` of D, the rest passes through.

    A pair is (j, j + rot/2), or (2j, 2j + 1) when interleaved.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, passed = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated, passed), dim=-1)
