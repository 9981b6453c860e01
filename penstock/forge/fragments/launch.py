"""Launches kernels, or first compiles many of them in parallel. Programmatic dependent launch is
that of `ops/triton/launch.py`, from which the linker copies it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class Compilers:
    """Compiles each variant of a kernel once, in threads, since compilers release the GIL."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.threads = ThreadPoolExecutor()
        self.asked: set[str] = set()

    def ask(self, kernel: Any, grid: Any, *words: Any, **options: Any) -> None:
        form = str(
            (kernel, options, [word.dtype if isinstance(word, Tensor) else word for word in words])
        )
        if form not in self.asked:
            self.asked.add(form)
            self.threads.submit(self._compile, kernel, grid, words, options)

    def _compile(
        self, kernel: Any, grid: Any, words: Sequence[Any], options: dict[str, Any]
    ) -> None:
        """An error here occurs again, and is reported, when the kernel is launched."""
        with torch.cuda.device(self.device):
            kernel.warmup(*words, grid=grid, **options)[grid]  # indexing also loads it


COMPILERS: list[Compilers] = []  # if not empty, kernels are compiled and not launched


def compile_at_once(runs: Sequence[Callable[[], Any]], device: torch.device) -> None:
    """Compiles all kernels that these runs launch, in parallel."""
    COMPILERS.append(Compilers(device))
    try:
        for run in runs:
            run()
    finally:
        COMPILERS.pop().threads.shutdown()


def launch(kernel: Any, grid: Any) -> Callable[..., Any]:
    """A function that launches the kernel on this grid."""
    # forge: when graphs!=none
    if COMPILERS:
        return functools.partial(COMPILERS[-1].ask, kernel, grid)
    # forge: end
    started: Callable[..., Any] = kernel[grid]
    return started
