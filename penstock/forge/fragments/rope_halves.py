"""Rotation of the two halves of a head. The rows of the projections are reordered once, at loading:
scores do not change when queries and keys are reordered alike, and halves are contiguous where
pairs are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.forge.fragments.shape import Shape, rope_angles


def swap_pairs_for_halves(weight: Tensor, head_dim: int) -> Tensor:
    """[heads * D, H] with the even rows of every head before its odd ones: rotation then pairs the
    two halves.

    Scores stay the same, since queries and keys are reordered in the same way.
    """
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def rope_table(shape: Shape, device: torch.device) -> Tensor:
    """[max_len, 2, 1, D]: cosines twice; sines, negative for the first half"""
    angles = rope_angles(shape, device)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], dim=1)[:, :, None]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [.., heads, D] by angles [.., 2, 1, D]"""
    cos, sin = angles.unbind(-3)
    other = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, other, sin).to(x.dtype)
