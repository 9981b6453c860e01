"""How kernels are launched: at once, or compiled first, many at a time. How one follows the other
is as in `ops/triton/launch.py`, out of which the linker takes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class Compilers:
    """Kernels being compiled: each form once, in threads, since compilers release Python's lock."""

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
