"""GEMMs of a few tokens with a bf16 weight on a CPU (`skinny_gemm.cpp`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_int, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cpu import library

MOST_TOKENS = 8  # for more, arithmetic dominates, and torch's libraries are as fast


def is_better(x: Tensor, weight: Tensor) -> bool:
    """Whether `multiply` is faster for x [T, K] and a weight [N, K]."""
    return (
        weight.dtype == torch.bfloat16
        and x.dtype == torch.bfloat16
        and weight.is_cpu
        and 1 <= x.shape[0] <= MOST_TOKENS
        and not weight.is_mkldnn
        and weight.is_contiguous()
        and is_available()
    )


def multiply(
    x: Tensor,  # [T, K] bf16
    weight: Tensor,  # [N, K] bf16
    bias: Tensor | None = None,  # [N] bf16
    residual: Tensor | None = None,  # [T, N] bf16, consumed: the result overwrites it
    *,
    out_dtype: torch.dtype = torch.bfloat16,  # or float32
) -> Tensor:  # [T, N]
    (T, K), N = x.shape, weight.shape[0]
    function = _function()
    assert function is not None, "called only where it is available"
    if residual is not None:
        residual = residual.contiguous()
    out = residual if residual is not None else torch.empty(T, N, dtype=out_dtype)
    function(
        x.contiguous().data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        out.dtype == torch.float32,
        T,
        N,
        K,
    )
    return out


def is_available() -> bool:
    return _function() is not None


@functools.cache
def _function() -> Callable[..., None] | None:
    types = [c_void_p] * 5 + [c_int] + [c_long] * 3
    return library.load_function(Path(__file__).with_suffix(".cpp"), "skinny_gemm", types)
