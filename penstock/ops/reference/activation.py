"""Smooth activations in float32, written on `exp` and `log1p` alone. Knows no layer.

torch's own CPU sigmoid, silu and softplus round differently in a vector's tail than inside it, so a value
would change in its last bit with its place in the batch; `exp` and `log1p` do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

SOFTPLUS_LINEAR_ABOVE = 20.0  # log(1 + exp(x)) is x in float32 from here on


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x.float()))


def silu(x: Tensor) -> Tensor:
    x = x.float()
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    x = x.float()
    bent = torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_LINEAR_ABOVE)))
    return torch.where(x > SOFTPLUS_LINEAR_ABOVE, x, bent)
