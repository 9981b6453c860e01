"""Cache memory on a CPU: zeros that use no memory before they are written."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from penstock.ops.cpu.memory import HUGE_PAGE, zeros_on_demand


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_a_cache_takes_memory_when_it_is_written() -> None:
    before = resident_bytes()
    cache = zeros_on_demand((1000, 1 << 18), torch.float32, "cpu")  # a GB
    assert resident_bytes() - before < 10**8
    cache[7] = 1.0
    assert cache[6].sum() == cache[8].sum() == 0.0
    assert cache[7].sum() == 1 << 18
    assert resident_bytes() - before < 10**8
    del cache
    assert resident_bytes() - before < 10**8


def test_it_is_a_tensor_as_any_other() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        for num_rows in (0, 3, 2 * HUGE_PAGE // 64):
            made = zeros_on_demand((num_rows, 64), dtype, "cpu")
            assert made.dtype == dtype
            assert made.shape == (num_rows, 64)
            assert made.is_contiguous()
            assert made.data_ptr() % 64 == 0
            assert not made.float().any()
