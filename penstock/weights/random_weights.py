"""Random weights on the device: seeded, with the statistics of a freshly initialized model.

The values of a parameter depend only on the seed and its name, not on order or other parameters.
Uses only the name and dimensions of a parameter, and copies nothing through the host.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


def fill_parameter(name: str, values: Tensor, seed: int) -> None:
    """Fills the values of a parameter in place; `name` is its full name in the model."""
    generator = torch.Generator(values.device).manual_seed(_seed_of(name, seed))
    kind = name.lower().rsplit(".", 1)[-1]
    if kind == "a_log":  # decay rates spread over 1 to 16
        values.uniform_(1.0, 16.0, generator=generator).log_()
    elif kind == "dt_bias":  # its softplus is a step size between 0.001 and 0.1, log-uniform
        step = values.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        step.copy_(step.expm1().log_())
    elif kind == "conv":  # [taps, channels]: sums over the taps
        values.normal_(0.0, values.shape[0] ** -0.5, generator=generator)
    elif values.dim() >= 2:  # keeps the variance of its input
        values.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)
    elif "norm" in name:
        values.normal_(1.0, 0.1, generator=generator)
    else:
        values.normal_(0.0, 0.02, generator=generator)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
