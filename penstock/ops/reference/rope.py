"""Rotary position embedding: the cos/sin table, and the rotation of the first dimensions of a
head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(inv_freq: Tensor, max_len: int, scale: float = 1.0) -> Tensor:
    """inv_freq [rot/2] float32 -> [max_len, 2, rot/2] float32: cosines and sines, both times
    `scale`.
    """
    positions = torch.arange(max_len, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq)
    return torch.stack((angles.cos(), angles.sin()), dim=1) * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D] float32, cos and sin [T, rot/2]: rotates the first `rot` of D dimensions in
    place.

    A pair is (j, j + rot/2), or (2j, 2j + 1) if interleaved.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * cos).addcmul_(second, sin, value=-1.0)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
    return x
