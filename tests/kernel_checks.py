"""Shared by all kernel tests: devices, dtypes and tolerances.

Without a GPU the kernels run in Triton's interpreter, which multiplies bf16 wrongly: so fp32 there
(and fp16 with `pytest -m slow`), fp32 and bf16 when compiled. There is one tolerance per dtype,
relative to the largest expected value. It allows for another order of summation and one more or
less rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.ops.reference.kv_codes import encode
from quick_interpreter import quicken

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    quicken()

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")]
INTERPRETED = pytest.mark.skipif(HAS_GPU, reason="kernels run compiled here")

# (device, dtype): use as @pytest.mark.parametrize(("device", "dtype"), PLACES)
PLACES = [
    pytest.param("cpu", torch.float32, marks=INTERPRETED, id="interpreted-fp32"),
    pytest.param(
        "cpu", torch.float16, marks=[INTERPRETED, pytest.mark.slow], id="interpreted-fp16"
    ),
    pytest.param("cuda", torch.float32, marks=ON_GPU, id="compiled-fp32"),
    pytest.param("cuda", torch.bfloat16, marks=ON_GPU, id="compiled-bf16"),
]
FULL_SIZE = [pytest.param("cuda", torch.bfloat16, marks=ON_GPU, id="compiled-bf16")]

# Storage of keys and values: in the model's dtype, or as codes with scales.
STORED = [
    pytest.param(None, id="plain"),
    pytest.param(torch.float8_e4m3fn, id="fp8"),
    pytest.param(torch.int8, id="int8"),
]

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def random(
    *shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0
) -> Tensor:
    """Draws the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)


class PagedCache(NamedTuple):
    keys: Tensor  # [pages, page_size, Hkv, D]
    values: Tensor
    scales: Tensor | None  # of codes
    page_table: Tensor  # [R, P]


def make_paged_cache(
    context_lens: Sequence[int],
    kv_heads: int,
    dim: int,
    *,
    dtype: torch.dtype,
    device: str,
    page_size: int,
    num_pages: int,  # width of the table; at least what the longest row needs
    stored: torch.dtype | None,  # of codes
) -> PagedCache:
    """Random keys and values of rows, and NaN where no row has written. Pages are assigned in
    random order; no row uses page 0 or the last one.
    """
    owned = [-(-context_len // page_size) for context_len in context_lens]
    order = torch.randperm(sum(owned), generator=torch.Generator().manual_seed(0)) + 1
    shape = (2 + sum(owned), page_size, kv_heads, dim)
    keys, values = (random(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    width = max(num_pages, *owned, 1)
    table = torch.full((len(context_lens), width), shape[0] - 1, dtype=torch.int32)
    written = torch.zeros(shape[:2], dtype=torch.bool)
    for row, (context_len, pages) in enumerate(zip(context_lens, order.split(owned))):
        table[row, : len(pages)] = pages
        in_row = torch.arange(len(pages) * page_size) < context_len
        written[pages] = in_row.view(len(pages), page_size)
    for cache in (keys, values):
        cache[~written.to(device)] = torch.nan
    if stored is None:
        return PagedCache(keys, values, None, table.to(device))
    (keys, key_scales), (values, value_scales) = (encode(x, stored) for x in (keys, values))
    return PagedCache(keys, values, torch.stack((key_scales, value_scales)), table.to(device))


def assert_near(seen: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Checks the difference against the table's tolerance for `dtype`, the narrowest type used; NaN
    fails.
    """
    assert seen.shape == expected.shape
    assert seen.isfinite().all(), "a value is NaN or infinite"
    largest = expected.float().abs().max().clamp(min=1e-6)
    difference = (seen.float() - expected.float()).abs().max() / largest
    assert difference <= TOLERANCES[dtype], f"differs by {difference:.2e} of the largest value"
