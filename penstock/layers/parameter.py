"""How a layer declares its weights: uninitialized, never trained, on any device including meta."""

from __future__ import annotations

import torch
from torch import nn

from penstock.ops import Weight
from penstock.ops.cpu.memory import new_tensor
from penstock.ops.weight import are_deferred
from penstock.parallel.share import Share


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(new_tensor(shape, dtype, device), requires_grad=False)


def new_weight(
    *shape: int,
    dtype: torch.dtype,
    device: torch.device | str,
    can_quantize: bool = True,
    share: Share | None = None,
) -> Weight:
    assert share is None or share.own_shape == shape
    place = "meta" if are_deferred() else device
    weight = Weight(parameter(*shape, dtype=dtype, device=place).data, can_quantize=can_quantize)
    weight.share = share
    return weight


def norm_parameter(size: int, device: torch.device | str) -> nn.Parameter:
    """Norm weights are float32 in every model: they are small and multiply float32 values."""
    return parameter(size, dtype=torch.float32, device=device)
