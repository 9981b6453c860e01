# mypy: disable-error-code="no-untyped-def"
"""How kernels read the activations of a `Product`. How it is computed is not known here."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.ops.triton.activation import silu
from penstock.ops.triton.launch import CompileCase


def columns_of(block_k: int, dtype: torch.dtype) -> int:
    """Tiles count in 16-bit elements; a wider type gets as many bytes."""
    return block_k * 2 // dtype.itemsize


@triton.jit
def load_inside(pointers, inside, IS_WHOLE: tl.constexpr):
    """Zeros outside; without a mask where all of the block is inside."""
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


# Of the arguments that kernels of products share, for a model in bf16.
_ARGUMENT_TYPES = {
    "p_x": "*bf16",
    "p_norm": "*fp32",
    "p_weight": "*bf16",
    "p_bias": "*bf16",
    "p_residual": "*bf16",
    "p_parts": "*fp32",
    "p_out": "*bf16",
    "num_tokens": "i32",
    "N": "i32",
    "x_stride": "i32",
    "residual_stride": "i32",
    "eps": "fp32",
}


def compile_case(kernel: Any, constexprs: dict[str, Any], **options: int) -> CompileCase:
    """A kernel, the types of its arguments, the values of the others, and how it is launched."""
    values = {**constexprs, "PDL": False}
    types = {
        name: "constexpr" if name in values else _ARGUMENT_TYPES[name] for name in kernel.arg_names
    }
    return kernel, types, values, options
