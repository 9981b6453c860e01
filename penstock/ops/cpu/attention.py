"""Attention of one token on a CPU in float32 (`attention.cpp`)."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cpu import library

LANES = 16


def is_better(q: Tensor, k: Tensor, cache: Tensor, *places: Tensor) -> bool:
    """Whether these functions can take a step of one token: q [1, Hq, D], k [.., Hkv, D]."""
    return (
        q.is_cpu
        and cache.dtype == q.dtype == torch.float32
        and q.shape[0] == 1
        and q.shape[2] % LANES == 0
        and q.stride(-1) == k.stride(-1) == 1
        and q.stride(1) == k.stride(-2) == q.shape[2]
        and cache.is_contiguous()
        and all(one.dtype == torch.int64 for one in places)
        and _library() is not None
    )


def rope_and_store(
    q: Tensor,  # [1, Hq, D]
    k: Tensor,  # [1, Hkv, D]
    v: Tensor,  # [1, Hkv, D]
    rope: Tensor,  # [max_len, 2, rot/2]
    positions: Tensor,  # [1]
    kv_index: Tensor,  # [1]
    keys: Tensor,  # [pages, page_size, Hkv, D]  written
    values: Tensor,  # [pages, page_size, Hkv, D]  written
    interleaved: bool,
) -> Tensor:  # [1, Hq, D]
    loaded = _library()
    assert loaded is not None, "asked only where it is available"
    (_, q_heads, head_dim), kv_heads = q.shape, k.shape[1]
    turned = torch.empty(1, q_heads, head_dim)
    loaded.rope_and_store(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr()),
        *(rope.data_ptr(), rope.shape[2], interleaved),
        *(positions.data_ptr(), kv_index.data_ptr(), q_heads, kv_heads, head_dim),
        *(turned.data_ptr(), keys.data_ptr(), values.data_ptr()),
    )
    return turned


def attend(
    q: Tensor,  # [1, Hq, D]
    keys: Tensor,  # [pages, page_size, Hkv, D]
    values: Tensor,  # [pages, page_size, Hkv, D]
    pages: Tensor,  # [P] int32
    first: int,
    end: int,
    scale: float,
) -> Tensor:  # [1, Hq * D]
    """Over positions `first` to `end`."""
    loaded = _library()
    assert loaded is not None, "asked only where it is available"
    _, q_heads, head_dim = q.shape
    _, page_size, kv_heads, _ = keys.shape
    out = torch.empty(1, q_heads * head_dim)
    loaded.attend(
        *(q.data_ptr(), keys.data_ptr(), values.data_ptr(), pages.data_ptr()),
        *(page_size, q_heads, kv_heads, head_dim, first, end, scale, out.data_ptr()),
    )
    return out


@functools.cache
def _library() -> ctypes.CDLL | None:
    loaded = library.load(Path(__file__).with_suffix(".cpp"), "-ffp-contract=off")
    if loaded is None:
        return None
    loaded.rope_and_store.argtypes = [
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_long, c_int, c_void_p, c_void_p),
        *(c_long, c_long, c_long, c_void_p, c_void_p, c_void_p),
    ]
    loaded.attend.argtypes = [
        *(c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_long, c_long, c_long, c_long, c_long, c_long, c_float, c_void_p),
    ]
    for function in (loaded.rope_and_store, loaded.attend):
        function.restype = None
    return loaded
