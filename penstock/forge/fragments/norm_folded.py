"""The norm without its weight, which is multiplied into the columns of the next projection."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_to_unit(x: Tensor, eps: float) -> Tensor:
    """x / rms(x); the norm's weight is part of the next projection's."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
