"""Steps captured once and replayed: kernels and memory are fixed, the numbers are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def write_numbers(place: Tensor, numbers: list[list[int]]) -> None:
    """From the host, without waiting for what the device does."""
    told = torch.tensor(numbers)
    place.copy_(told.pin_memory() if place.is_cuda else told, non_blocking=True)


def capture(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
    """What replays the step, and the memory that its result is in afterwards."""
    run()  # loads what is not yet there, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    graph.replay()  # the first one brings it to the device
    return graph.replay, result
