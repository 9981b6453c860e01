# mypy: disable-error-code="no-untyped-def"
"""Several sums in one reduction, so that threads synchronize only once, and products."""

from __future__ import annotations

import triton


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def multiply(a, b):
    return a * b
