# mypy: disable-error-code="no-untyped-def"
"""Smooth activations inside kernels, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)). Adding one rounds off low bits of exp(x); the quotient restores them."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    kept = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    return tl.maximum(x, 0.0) + tl.where(rounded == 1.0, small, tl.log(rounded) * (small / kept))
