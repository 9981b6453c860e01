"""Rotation of neighbouring numbers as one product of complex numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.forge.fragments.shape import Shape, rope_angles


def rope_table(shape: Shape, device: torch.device) -> Tensor:
    """[max_len, 1, D / 2] complex: the rotation at each position"""
    angles = rope_angles(shape, device)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [.., heads, D] by angles [.., 1, D / 2]"""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)
