"""Steps captured once and replayed: kernels and memory are fixed, the numbers are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def write_numbers(place: Tensor, numbers: list[list[int]]) -> None:
    """Copies from the host, without waiting for the device."""
    values = torch.tensor(numbers)
    place.copy_(values.pin_memory() if place.is_cuda else values, non_blocking=True)


def capture(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
    """A function that replays the step, and the tensor with its result."""
    run()  # loads kernels and libraries, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    graph.replay()  # the first replay uploads the graph
    return graph.replay, result
