"""Rotation of neighbouring numbers: an even dimension and the odd one after it."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.forge.fragments.shape import Shape, rope_angles


def rope_table(shape: Shape, device: torch.device) -> Tensor:
    """[max_len, 2, 1, D / 2]: cosines and sines, in float32"""
    angles = rope_angles(shape, device)
    return torch.stack([angles.cos(), angles.sin()], dim=1)[:, :, None]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [.., heads, D] by angles [.., 2, 1, D / 2]"""
    cos, sin = angles.unbind(-3)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)
