"""Memory of large weights on huge pages. A step reads all weights once, and with pages of 4 KB a
tenth of its time and more goes into finding them. Where the system has no huge pages, they stay
small.
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
    # From the system itself: an allocator would give pages that were in use before, and are small.
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % HUGE_PAGE
    return (
        torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=start)
        .view(dtype)
        .view(shape)
    )
