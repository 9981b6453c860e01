"""The 8-bit KV cache: quantized values, and one scale per token and head.

The largest element of a head maps to the largest value, E4M3's 448 or int8's 127. A scale depends
only on its own token, so a page is the same however its prompt was split and whatever else ran with
it, and nothing can overflow. The scales of keys and values are in one tensor beside the pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # largest value of each type
LEAST_AMAX = 1e-30  # instead of 0: a head of zeros stays zero


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[.., D] in any float type -> codes [.., D], scales [..] float32."""
    x = x.float()
    amax = x.abs().amax(-1).clamp(min=LEAST_AMAX)
    # A tensor: with a scalar torch multiplies by the reciprocal, which rounds twice.
    largest = torch.full_like(amax, LARGEST[dtype])
    codes = x * (largest / amax)[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), amax / largest


def store(cache: Tensor, scales: Tensor | None, places: Tensor, x: Tensor) -> None:
    """Stores x [T, Hkv, D] at the indices [T] of a cache [pages, page_size, Hkv, D]."""
    if scales is None:
        cache.flatten(0, 1).index_copy_(0, places, x.to(cache.dtype))
        return
    codes, own_scales = encode(x, cache.dtype)
    # As bytes: torch has few operations for FP8.
    cache.view(torch.uint8).flatten(0, 1).index_copy_(0, places, codes.view(torch.uint8))
    scales.flatten(0, 1).index_copy_(0, places, own_scales)


def read_pages(cache: Tensor, scales: Tensor | None, pages: Tensor) -> Tensor:
    """[n] -> [n, page_size, Hkv, D] float32. Of flat tensors, the entries at these indices."""
    # index_select, because indexing with a tensor is several times slower.
    if scales is None:
        return cache.index_select(0, pages).float()
    codes = cache.view(torch.uint8).index_select(0, pages).view(cache.dtype)
    return codes.float().mul_(scales.index_select(0, pages)[..., None])
