# mypy: disable-error-code="no-untyped-def"
"""How kernels are launched: on cards that can, each starts while the one before it still runs.

A kernel first lets the next one start, may read weights, then waits for the one before, and only then reads
activations and writes. Every program waits, so a kernel that is complete implies that all before it are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        tl_cuda.gdc_wait()


class Compilers:
    """Kernels on their way: each form once, in threads, because compilers work without Python's lock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.threads = ThreadPoolExecutor()
        self.asked: set[str] = set()

    def ask(self, kernel: Any, grid: Any, *words: Any, **options: Any) -> None:
        form = str((kernel, options, [word.dtype if isinstance(word, Tensor) else word for word in words]))
        if form not in self.asked:
            self.asked.add(form)
            self.threads.submit(self._compile, kernel, grid, words, options)

    def _compile(self, kernel: Any, grid: Any, words: Sequence[Any], options: dict[str, Any]) -> None:
        """What fails here fails again, and is told, where the kernel is launched."""
        with torch.cuda.device(self.device):
            kernel.warmup(*words, grid=grid, **options)[grid]  # asked for a grid, it is loaded too


COMPILERS: list[Compilers] = []  # while there are some, kernels are compiled and not started


def compile_at_once(runs: Sequence[Callable[[], Any]], device: torch.device) -> None:
    """All kernels that these runs launch, several at a time."""
    COMPILERS.append(Compilers(device))
    try:
        for run in runs:
            run()
    finally:
        COMPILERS.pop().threads.shutdown()


def launch(kernel: Any, grid: Any) -> Callable[..., Any]:
    """What starts the kernel on this grid."""
    # forge: when graphs!=none
    if COMPILERS:
        return functools.partial(COMPILERS[-1].ask, kernel, grid)
    # forge: end
    started: Callable[..., Any] = kernel[grid]
    return started


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Kernels of cards from sm_90 on start early; PDL tells them so."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def num_processors(device: torch.device) -> int:
    """What a grid should fill. An interpreter pretends to have a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """What one program may have of a processor's memory."""
    if device.type != "cuda":
        return 99 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
