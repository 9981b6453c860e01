"""Memory of large weights on huge pages. A step reads all weights once, and with pages of 4 KB a tenth of its
time and more goes into finding them. Where the system says no, pages stay small.
"""

from __future__ import annotations

import ctypes
import functools
import sys

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21
MADV_HUGEPAGE = 14


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Uninitialised; of large ones on a CPU nothing is written yet, so their pages may still be huge."""
    values = torch.empty(shape, dtype=dtype, device=device)
    if values.is_cpu and values.nbytes >= 2 * HUGE_PAGE:
        _ask_for_huge_pages(values)
    return values


def _ask_for_huge_pages(values: Tensor) -> None:
    if (advise := _madvise()) is None:
        return
    first = -(-values.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (values.data_ptr() + values.nbytes) // HUGE_PAGE * HUGE_PAGE
    advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE)


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    return ctypes.CDLL(None).madvise if sys.platform == "linux" else None
