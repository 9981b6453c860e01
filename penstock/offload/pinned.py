"""Pinned host memory: a GPU reads it by itself, and copies from it are asynchronous.

Large tensors use huge pages, which all cores allocate in parallel before they are pinned: pinning
page by page would take minutes for a large model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.ops.cpu.memory import HUGE_PAGE, new_tensor

PAGE = 4096
PORTABLE_AND_MAPPED = 1 | 2


def pinned_copy(tensor: Tensor) -> Tensor:
    """The same values in pinned memory; `unpin` releases it, if it is large."""
    own = new_pinned(tuple(tensor.shape), tensor.dtype)
    own.copy_(tensor)
    return own


def new_pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialized."""
    memory = new_tensor(shape, dtype, "cpu")
    if not _is_large(memory):
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
    memory.view(-1).view(torch.uint8)[::PAGE].zero_()  # touched by all threads
    if torch.cuda.is_available():
        code = torch.cuda.cudart().cudaHostRegister(
            memory.data_ptr(), memory.nbytes, PORTABLE_AND_MAPPED
        )
        if int(code):
            raise CapacityError(
                f"{memory.nbytes / 1e9:.1f} GB of RAM cannot be pinned for the GPU",
                f"The driver says: {torch.cuda.cudart().cudaGetErrorString(code)}.",
                "Raise the limit of locked memory (`ulimit -l`), or set a smaller --expert-ram.",
            )
    return memory


def unpin(addresses: Iterable[int]) -> None:
    """For large tensors, before their memory is freed."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)


def large_addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if _is_large(tensor)]


def _is_large(tensor: Tensor) -> bool:
    return tensor.nbytes >= 2 * HUGE_PAGE
