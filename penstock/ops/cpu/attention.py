"""Attention of rows of a few tokens on a CPU in float32 (`attention.cpp`), and for any number of
tokens what comes before it (`rope.cpp`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int64, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cpu import library

LANES = 16


def can_rotate(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, *places: Tensor) -> bool:
    """Whether `rope_and_store` supports q [T, Hq, D], k and v [T, Hkv, D]. The number of tokens
    does not matter, so that a token has the same bits alone and among others.
    """
    head_dim = q.shape[2]
    return (
        q.is_cpu
        and cache.dtype == q.dtype == torch.float32
        and head_dim % LANES == 0
        and all(one.stride(-1) == 1 and one.stride(-2) == head_dim for one in (q, k, v))
        and cache.is_contiguous()
        and all(one.dtype == torch.int64 for one in places)
        and _rope_and_store() is not None
    )


def can_attend(q: Tensor, cache: Tensor, page_table: Tensor) -> bool:
    """Whether `attend` supports q [T, Hq, D]."""
    return (
        q.is_cpu
        and cache.dtype == q.dtype == torch.float32
        and q.shape[2] % LANES == 0
        and page_table.dtype == torch.int32
        and page_table.stride(-1) == 1
        and cache.is_contiguous()
        and _attend() is not None
    )


def rope_and_store(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, D]
    q_norm: Tensor | None,  # [D]
    k_norm: Tensor | None,  # [D]
    eps: float,
    rope: Tensor,  # [max_len, 2, rot/2]
    positions: Tensor,  # [T]
    kv_index: Tensor,  # [T]
    keys: Tensor,  # [pages, page_size, Hkv, D]  written
    values: Tensor,  # [pages, page_size, Hkv, D]  written
    interleaved: bool,
) -> Tensor:  # [T, Hq, D]
    function = _rope_and_store()
    assert function is not None, "called only where it is available"
    (num_tokens, q_heads, head_dim), kv_heads = q.shape, k.shape[1]
    turned = torch.empty(num_tokens, q_heads, head_dim)
    norms = (None if one is None else one.data_ptr() for one in (q_norm, k_norm))
    function(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr()),
        (c_long * 3)(q.stride(0), k.stride(0), v.stride(0)),
        *(*norms, eps, rope.data_ptr(), rope.shape[2], interleaved),
        *(positions.data_ptr(), kv_index.data_ptr(), num_tokens, q_heads, kv_heads, head_dim),
        *(turned.data_ptr(), keys.data_ptr(), values.data_ptr()),
    )
    return turned


def attend(
    q: Tensor,  # [T, Hq, D]
    keys: Tensor,  # [pages, page_size, Hkv, D]
    values: Tensor,  # [pages, page_size, Hkv, D]
    page_table: Tensor,  # [R, P] int32
    num_tokens: Sequence[int],  # of each row
    context_lens: Sequence[int],  # of each row, with these tokens
    window: int,
    scale: float,
    gate: Tensor | None,  # [T, Hq * D]
) -> Tensor:  # [T, Hq * D]
    """Each token over its visible keys, times sigmoid(gate)."""
    function = _attend()
    assert function is not None, "called only where it is available"
    q = q.contiguous()
    _, page_size, kv_heads, head_dim = keys.shape
    out = torch.empty(len(q), q.shape[1] * head_dim)
    if gate is not None and gate.stride(-1) != 1:
        gate = gate.contiguous()
    by_row = c_int64 * len(num_tokens)
    function(
        *(q.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(page_table.data_ptr(), page_table.stride(0)),
        *(by_row(*num_tokens), by_row(*context_lens), len(num_tokens)),
        *(page_size, q.shape[1], kv_heads, head_dim, window, scale),
        None if gate is None else gate.data_ptr(),
        *(0 if gate is None else gate.stride(0), out.data_ptr()),
    )
    return out


@functools.cache
def _rope_and_store() -> Callable[..., None] | None:
    source = Path(__file__).with_name("rope.cpp")
    types = [
        *[c_void_p] * 6,
        *(c_float, c_void_p, c_long, c_int, c_void_p, c_void_p),
        *(c_long, c_long, c_long, c_long, c_void_p, c_void_p, c_void_p),
    ]
    return library.load_function(source, "rope_and_store", types, "-ffp-contract=off")


@functools.cache
def _attend() -> Callable[..., None] | None:
    types = [
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_long),
        *(c_void_p, c_void_p, c_long),
        *(c_long, c_long, c_long, c_long, c_long, c_float),
        *(c_void_p, c_long, c_void_p),
    ]
    return library.load_function(Path(__file__).with_suffix(".cpp"), "attend", types)
