"""What the machine can do, measured in a moment: the scale on which an engine's times are read."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from penstock.forge.target import Target

CLEAR_GAIN = 1.2  # of one thread over all: below it they stay as they are
PROBED_ROWS = 8
PROBED_PRODUCTS = 20
PROBED_STRETCHES = 5


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    device: str
    capability: str  # of a GPU, "9.0"
    memory_bytes: int
    bytes_per_second: float  # read and written by a copy
    flops_per_second: float  # of a product in the model's type
    launch_s: float  # of the smallest operation, from Python
    one_thread_gain: float = 1.0  # on a CPU: times as fast as with all threads, for a few rows of the model

    @classmethod
    def measure(cls, target: Target) -> Machine:
        device = torch.device(target.device)
        name, capability, memory = "CPU", "", 0
        if target.is_cuda:
            properties = torch.cuda.get_device_properties(device)
            name, memory = properties.name, properties.total_memory
            capability = f"{properties.major}.{properties.minor}"
        num_bytes, width = (1 << 30, 4096) if target.is_cuda else (1 << 24, 512)
        source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        copy = torch.empty_like(source)
        square = torch.randn(width, width, device=device).to(target.dtype)
        small = torch.zeros(1, device=device)
        copy_s = _least_s(lambda: copy.copy_(source), device)
        product_s = _least_s(lambda: square @ square, device)
        launch_s = _least_s(lambda: [small.add_(1) for _ in range(100)], device) / 100
        bandwidth, flops = 2 * num_bytes / copy_s, 2 * width**3 / product_s
        gain = 1.0 if target.is_cuda else _one_thread_gain(target)
        return cls(name, target.device, capability, memory, bandwidth, flops, launch_s, gain)

    @property
    def is_quicker_with_one_thread(self) -> bool:
        return self.one_thread_gain >= CLEAR_GAIN

    @contextlib.contextmanager
    def quickest_threads(self) -> Iterator[None]:
        """Torch computes inside with as many as are quickest here."""
        before = torch.get_num_threads()
        torch.set_num_threads(1 if self.is_quicker_with_one_thread else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def describe(self) -> str:
        speed = f"{self.bytes_per_second / 1e9:.0f} GB/s, {self.flops_per_second / 1e12:.2f} TFLOP/s"
        return f"{self.name}, {speed}, {self.launch_s * 1e6:.1f} µs an operation"

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    def decode_floor_s(self, target: Target, batch: int, context_len: float) -> float:
        """Every weight once, and the keys and values of every row."""
        return (target.weight_bytes + batch * context_len * target.kv_bytes_per_token) / self.bytes_per_second

    def prefill_floor_s(self, target: Target, num_tokens: int) -> float:
        """Two operations a weight and token; the head is for last tokens only."""
        head = target.shape.vocab_size * target.shape.hidden_size
        weights = target.weight_bytes // target.dtype.itemsize - head
        return 2 * weights * num_tokens / self.flops_per_second


def _one_thread_gain(target: Target) -> float:
    """Small products are where threads cost more than they give, and most of all where others use the CPU:
    each waits for the one that is not running. Whole stretches are compared, since that comes and goes."""
    before = torch.get_num_threads()
    if before == 1:
        return 1.0
    rows = torch.randn(PROBED_ROWS, target.shape.hidden_size)
    weight = torch.randn(target.shape.intermediate_size, target.shape.hidden_size)
    seconds: dict[int, list[float]] = {1: [], before: []}
    try:
        for _ in range(PROBED_STRETCHES):
            for num_threads, taken in seconds.items():
                torch.set_num_threads(num_threads)
                started = time.perf_counter()
                for _ in range(PROBED_PRODUCTS):
                    torch.nn.functional.silu(rows @ weight.T)
                taken.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return statistics.median(seconds[before]) / statistics.median(seconds[1])


def _least_s(run: Callable[[], Any], device: torch.device) -> float:
    def once() -> float:
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    return min(once() for _ in range(5))
