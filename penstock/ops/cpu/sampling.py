"""The next tokens of rows of logits on a CPU (`sampling.cpp`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_int, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cpu import library


def can_sample(logits: Tensor) -> bool:
    is_plain = logits.is_cpu and logits.dtype == torch.float32 and logits.stride(-1) == 1
    return is_plain and _function() is not None


def sample(
    logits: Tensor,  # [L, vocab] float32, checked by `can_sample`
    temperature: Tensor,  # [L]  0: greedy
    top_k: Tensor,  # [L] int64  0: all tokens
    top_p: Tensor,  # [L]
    min_p: Tensor,  # [L]
    seeds: Tensor,  # [L] int64
    positions: Tensor,  # [L] int64  of the sampled token
    filtered: bool,  # whether any row uses top_k, top_p or min_p
) -> Tensor:  # [L] int64
    function = _function()
    assert function is not None, "called only where it is available"
    params = [
        param.to(dtype).contiguous()
        for param, dtype in (
            (temperature, torch.float32),
            (top_k, torch.int64),
            (top_p, torch.float32),
            (min_p, torch.float32),
            (seeds, torch.int64),
            (positions, torch.int64),
        )
    ]
    num_rows, vocab = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    pointers = (param.data_ptr() for param in params)
    given = (logits.data_ptr(), logits.stride(0), *pointers, filtered)
    function(*given, token_ids.data_ptr(), num_rows, vocab)
    return token_ids


@functools.cache
def _function() -> Callable[..., None] | None:
    types = [c_void_p, c_long, *[c_void_p] * 6, c_int, c_void_p, c_long, c_long]
    return library.load_function(Path(__file__).with_suffix(".cpp"), "sample", types)
