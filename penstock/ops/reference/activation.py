"""Smooth activations in float32. Knows no layer.

torch's own CPU sigmoid, silu and softplus round differently in a vector's tail than inside it, so
the last bit of a value depends on its position in the batch; `exp` and `log1p` do not have this
problem. `deterministic` uses only these two, at several times the cost.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SOFTPLUS_LINEAR_ABOVE = 20.0  # from here on log(1 + exp(x)) is x in float32


def sigmoid(x: Tensor, deterministic: bool) -> Tensor:
    x = x.float()
    return 1.0 / (1.0 + torch.exp(-x)) if deterministic else torch.sigmoid(x)


def silu(x: Tensor, deterministic: bool) -> Tensor:
    x = x.float()
    return x / (1.0 + torch.exp(-x)) if deterministic else F.silu(x)


def softplus(x: Tensor, deterministic: bool) -> Tensor:
    x = x.float()
    if not deterministic:
        return F.softplus(x, threshold=SOFTPLUS_LINEAR_ABOVE)
    bent = torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_LINEAR_ABOVE)))
    return torch.where(x > SOFTPLUS_LINEAR_ABOVE, x, bent)
