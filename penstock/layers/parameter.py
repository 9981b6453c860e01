"""How a layer declares its weights: uninitialised, never trained, on any device including meta."""

from __future__ import annotations

import ctypes
import functools
import sys

import torch
from torch import Tensor, nn

from penstock.ops import Weight

HUGE_PAGE = 1 << 21
MADV_HUGEPAGE = 14


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    values = torch.empty(shape, dtype=dtype, device=device)
    if values.is_cpu and values.nbytes >= 2 * HUGE_PAGE:
        _ask_for_huge_pages(values)
    return nn.Parameter(values, requires_grad=False)


def new_weight(
    *shape: int, dtype: torch.dtype, device: torch.device | str, can_quantize: bool = True
) -> Weight:
    return Weight(parameter(*shape, dtype=dtype, device=device).data, can_quantize=can_quantize)


def norm_parameter(size: int, device: torch.device | str) -> nn.Parameter:
    """Norm weights are float32 in every model: they are small and multiply float32 values."""
    return parameter(size, dtype=torch.float32, device=device)


def _ask_for_huge_pages(values: Tensor) -> None:
    """Before anything is written: a step reads all weights once, and with pages of 4 KB every tenth of its
    time goes into finding them. Where the system says no, they stay small."""
    if (advise := _madvise()) is None:
        return
    first = -(-values.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (values.data_ptr() + values.nbytes) // HUGE_PAGE * HUGE_PAGE
    advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE)


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    return ctypes.CDLL(None).madvise if sys.platform == "linux" else None
