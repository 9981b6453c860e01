# mypy: disable-error-code="no-untyped-def"
"""A minimal kernel: `reach` checks with it that kernels can be compiled and launched."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one_kernel(numbers, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(numbers + places, tl.load(numbers + places) + 1.0)
