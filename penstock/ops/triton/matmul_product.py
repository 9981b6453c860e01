# mypy: disable-error-code="no-untyped-def"
"""How kernels load the activations of a `Product`. Does not know how it is computed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.triton.activation import silu


def columns_of(block_k: int, dtype: torch.dtype) -> int:
    """Tiles are in 16-bit elements; a wider type gets the same number of bytes."""
    return block_k * 2 // dtype.itemsize


@triton.jit
def load_inside(pointers, inside, IS_WHOLE: tl.constexpr):
    """Zeros outside; without a mask if the whole block is inside."""
    if IS_WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_activations(p_x, inside, K: tl.constexpr, IS_SWIGLU: tl.constexpr, IS_WHOLE: tl.constexpr):
    """x, or silu(gate) * up, in float32."""
    b_x = load_inside(p_x, inside, IS_WHOLE).to(tl.float32)
    if IS_SWIGLU:
        b_up = load_inside(p_x + K, inside, IS_WHOLE).to(tl.float32)
        b_x = silu(b_x) * b_up
    return b_x
