"""The norm without its weight, which is a factor of the columns of the projection behind it."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_to_unit(x: Tensor, eps: float) -> Tensor:
    """x / rms(x); what the norm multiplies with is part of the weights behind it."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
