"""Shared by all kernel tests: devices, dtypes and tolerances.

Without a GPU the kernels run in Triton's interpreter, which multiplies bf16 wrongly: so fp32 there
(and fp16 with `pytest -m slow`), fp32 and bf16 when compiled. There is one tolerance per dtype,
relative to the largest expected value. It allows for another order of summation and one more or
less rounding.
"""

from __future__ import annotations

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


def encode_caches(
    keys: Tensor, values: Tensor, stored: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The values that a cache of these keys and values holds; NaN stays NaN, at least in the
    scales.
    """
    if stored is None:
        return keys, values, None
    (keys, key_scales), (values, value_scales) = (encode(x, stored) for x in (keys, values))
    return keys, values, torch.stack((key_scales, value_scales))


def assert_near(seen: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Checks the difference against the table's tolerance for `dtype`, the narrowest type used; NaN
    fails.
    """
    assert seen.shape == expected.shape
    assert seen.isfinite().all(), "a value is NaN or infinite"
    largest = expected.float().abs().max().clamp(min=1e-6)
    difference = (seen.float() - expected.float()).abs().max() / largest
    assert difference <= TOLERANCES[dtype], f"differs by {difference:.2e} of the largest value"
