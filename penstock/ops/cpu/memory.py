"""Memory for large weights on huge pages, if the system has them. A step reads all weights once,
and with 4 KB pages at least a tenth of its time goes into address translation.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Uninitialised."""
    num_bytes = math.prod(shape) * dtype.itemsize
    is_large = torch.device(device).type == "cpu" and num_bytes >= 2 * HUGE_PAGE
    if not is_large or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    # Directly from the system: an allocator would reuse small pages.
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % HUGE_PAGE
    return (
        torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=start)
        .view(dtype)
        .view(shape)
    )
