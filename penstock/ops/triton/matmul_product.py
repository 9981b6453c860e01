# mypy: disable-error-code="no-untyped-def"
"""What a product of activations and a weight consists of, and how kernels read its activations.

    out [T, N] = prepared(x) [T, K] @ weight [N, K] transposed, + bias [N], + residual [T, N]

`prepared` is x as it is, its RMS norm, or silu(gate) * up of its two halves. How the product is
computed is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.activation import silu
from penstock.ops.triton.launch import CompileCase


@dataclass(frozen=True, slots=True)
class Product:
    x: Tensor  # [T, K], or [T, 2M] (gate, then up) when is_swiglu
    weight: Tensor  # [N, K]
    out_dtype: torch.dtype
    bias: Tensor | None = None  # [N]
    residual: Tensor | None = None  # [T, N]
    norm_weight: Tensor | None = None  # [K] float32
    eps: float = 0.0
    is_swiglu: bool = False

    def __post_init__(self) -> None:
        assert self.x.shape[1] == self.weight.shape[1] * (2 if self.is_swiglu else 1)
        assert self.x.stride(-1) == 1, "activations are read along contiguous rows"
        assert self.residual is None or self.residual.stride(-1) == 1
        assert self.weight.is_contiguous()

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """N, K"""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def row_strides(self) -> tuple[int, int]:
        """Of x and the residual. A single row has the stride of a packed one: kernels are compiled
        for it.
        """
        if self.num_tokens == 1:
            return self.x.shape[1], self.shape[0]
        return self.x.stride(0), self.residual.stride(
            0
        ) if self.residual is not None else self.shape[0]

    def new_out(self) -> Tensor:
        return torch.empty(
            self.num_tokens, self.shape[0], dtype=self.out_dtype, device=self.x.device
        )


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
