"""Large CPU memory, directly from the system.

Weights use huge pages, if there are any: a step reads all of them once, and with 4 KB pages at
least a tenth of its time goes into address translation. Caches are zero pages that take no memory
and no time before they are used.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21
MEMORY_INFO = Path("/proc/meminfo")


def ram_sizes() -> tuple[int, int]:
    """The machine's RAM, and how much of it can be allocated, which includes the files that the
    system caches. All of it where the system does not say.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = MEMORY_INFO.read_text().splitlines()
    except OSError:  # macOS has no such file
        return total, total
    kilobytes = {key: rest.split()[0] for key, _, rest in (line.partition(":") for line in lines)}
    return total, int(kilobytes["MemAvailable"]) * 1024


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Uninitialized."""
    num_bytes = math.prod(shape) * dtype.itemsize
    is_large = torch.device(device).type == "cpu" and num_bytes >= 2 * HUGE_PAGE
    if not is_large or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    # Directly from the system: an allocator would reuse small pages.
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % HUGE_PAGE
    return _tensor_in(pages, start, shape, dtype)


def release(values: Tensor) -> None:
    """Returns the memory of these values to the system before their tensor is freed: they are lost.
    Whole pages, and only of a contiguous tensor in memory of its own.
    """
    page = mmap.PAGESIZE
    first = -(-values.data_ptr() // page) * page
    end = (values.data_ptr() + values.nbytes) // page * page
    if hasattr(mmap, "MADV_DONTNEED") and values.is_contiguous() and first < end:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED
        )


def zeros_on_demand(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """On a CPU, the system allocates a page when it is first written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return _tensor_in(pages, 0, shape, dtype)


def _tensor_in(pages: mmap.mmap, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    values = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=start)
    return values.view(dtype).view(shape)
