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

COMPILERS: list[Callable[..., None]] = []  # if not empty, kernels are compiled and not launched


def compile_at_once(runs: Sequence[Callable[[], Any]], device: torch.device) -> None:
    """Compiles each variant of the kernels that these runs launch once, in threads, since compilers
    release the GIL.
    """
    asked: set[str] = set()

    def compile_one(kernel: Any, grid: Any, words: Sequence[Any], options: dict[str, Any]) -> None:
        """An error here occurs again, and is reported, when the kernel is launched."""
        with torch.cuda.device(device):
            kernel.warmup(*words, grid=grid, **options)[grid]  # indexing also loads it

    def ask(kernel: Any, grid: Any, *words: Any, **options: Any) -> None:
        form = str(
            (kernel, options, [word.dtype if isinstance(word, Tensor) else word for word in words])
        )
        if form not in asked:
            asked.add(form)
            threads.submit(compile_one, kernel, grid, words, options)

    with ThreadPoolExecutor() as threads:
        COMPILERS.append(ask)
        try:
            for run in runs:
                run()
        finally:
            COMPILERS.pop()


def launch(kernel: Any, grid: Any) -> Callable[..., Any]:
    """A function that launches the kernel on this grid."""
    # forge: when graphs!=none
    if COMPILERS:
        return functools.partial(COMPILERS[-1], kernel, grid)
    # forge: end
    started: Callable[..., Any] = kernel[grid]
    return started
