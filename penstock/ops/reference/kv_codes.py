"""How keys and values are stored in 8 bits: codes, and one scale for each token and head.

The largest number of a head becomes the largest code, E4M3's 448 or int8's 127. A scale depends on
its own token only, so a page is the same however its prompt was cut and whatever else ran with it,
and nothing can overflow. Scales of keys and values lie side by side in one tensor beside the pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # code of each type
LEAST_AMAX = 1e-30  # instead of 0: a head of zeros has the codes 0


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[.., D] in any float type -> codes [.., D], scales [..] float32."""
    x = x.float()
    amax = x.abs().amax(-1).clamp(min=LEAST_AMAX)
    # A tensor: with a number torch multiplies by a reciprocal, and rounds twice.
    largest = torch.full_like(amax, LARGEST[dtype])
    codes = x * (largest / amax)[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), amax / largest


def store(cache: Tensor, scales: Tensor | None, places: Tensor, x: Tensor) -> None:
    """x [T, Hkv, D] into the places [T] of a cache [pages, page_size, Hkv, D]."""
    if scales is None:
        cache.flatten(0, 1).index_copy_(0, places, x.to(cache.dtype))
        return
    codes, own_scales = encode(x, cache.dtype)
    # As bytes: torch has few operations for FP8.
    cache.view(torch.uint8).flatten(0, 1).index_copy_(0, places, codes.view(torch.uint8))
    scales.flatten(0, 1).index_copy_(0, places, own_scales)


def read_pages(cache: Tensor, scales: Tensor | None, pages: Tensor) -> Tensor:
    """[n] -> [n, page_size, Hkv, D] float32. Of flat tensors, what is at the places."""
    # index_select, because indexing with a tensor takes several times as long.
    if scales is None:
        return cache.index_select(0, pages).float()
    codes = cache.view(torch.uint8).index_select(0, pages).view(cache.dtype)
    return codes.float().mul_(scales.index_select(0, pages)[..., None])
