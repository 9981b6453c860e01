"""How a layer declares its weights: uninitialised, never trained, on any device including meta."""

from __future__ import annotations

import torch
from torch import nn


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def norm_parameter(size: int, device: torch.device | str) -> nn.Parameter:
    """Norm weights are float32 in every model: they are small and multiply float32 values."""
    return parameter(size, dtype=torch.float32, device=device)
