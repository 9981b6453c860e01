"""The speed of the machine, measured quickly: the scale for the times of an engine."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from penstock.forge.fragments.product_packed import multiply, pack
from penstock.forge.target import Target

CLEAR_GAIN = 1.2  # with a smaller gain, one thread or packed weights are not chosen
PROBED_ROWS = 8
PROBED_PRODUCTS = 10
PROBED_STRETCHES = 5


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    device: str
    capability: str  # of a GPU, "9.0"
    memory_bytes: int
    bytes_per_second: float  # read and written by a copy
    flops_per_second: float  # for a product in the model's dtype
    launch_s: float  # for the smallest operation, from Python
    one_thread_gain: float = 1.0  # on a CPU: one thread over all, for a few rows
    packed_gain: float = 1.0  # on a CPU: packed weights over torch's own products

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
        gains = (1.0, 1.0) if target.is_cuda else _gains_on_cpu(target)
        return cls(name, target.device, capability, memory, bandwidth, flops, launch_s, *gains)

    @property
    def is_quicker_with_one_thread(self) -> bool:
        return self.one_thread_gain >= CLEAR_GAIN

    @property
    def is_quicker_with_packed_weights(self) -> bool:
        return self.packed_gain >= CLEAR_GAIN

    @contextlib.contextmanager
    def quickest_threads(self) -> Iterator[None]:
        """A context in which torch uses the fastest number of threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(1 if self.is_quicker_with_one_thread else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def describe(self) -> str:
        speed = (
            f"{self.bytes_per_second / 1e9:.0f} GB/s, {self.flops_per_second / 1e12:.2f} TFLOP/s"
        )
        return f"{self.name}, {speed}, {self.launch_s * 1e6:.1f} µs per operation"

    def decode_floor_s(self, target: Target, batch: int, context_len: float) -> float:
        """Reads every weight once, and the keys and values of every row."""
        return (
            target.weight_bytes + batch * context_len * target.kv_bytes_per_token
        ) / self.bytes_per_second

    def prefill_floor_s(self, target: Target, num_tokens: int) -> float:
        """Two operations per weight and token; the head is for last tokens only."""
        head = target.shape.vocab_size * target.shape.hidden_size
        weights = target.weight_bytes // target.dtype.itemsize - head
        return 2 * weights * num_tokens / self.flops_per_second


def _gains_on_cpu(target: Target) -> tuple[float, float]:
    """The gain of one thread over all threads, and of packed weights over plain ones, for products
    with a few rows.

    In small products threads can cost more than they gain, above all if other processes use the
    CPU: each waits for the one that is not running. Compares long runs, since that varies.
    """
    before = torch.get_num_threads()
    rows = torch.randn(PROBED_ROWS, target.shape.hidden_size)
    plain = torch.randn(target.shape.intermediate_size, target.shape.hidden_size)
    weights = {"plain": plain, "packed": pack(plain)}
    seconds: dict[tuple[int, str], list[float]] = {}
    try:
        for num_threads in PROBED_STRETCHES * (1, before):
            torch.set_num_threads(num_threads)
            for name, weight in weights.items():
                started = time.perf_counter()
                for _ in range(PROBED_PRODUCTS):
                    F.silu(multiply(rows, weight))
                seconds.setdefault((num_threads, name), []).append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    usual = {way: statistics.median(taken) for way, taken in seconds.items()}
    best = {name: min(usual[1, name], usual[before, name]) for name in weights}
    of_packed = best["plain"] / best["packed"]
    chosen = "packed" if of_packed >= CLEAR_GAIN else "plain"
    return usual[before, chosen] / usual[1, chosen], of_packed


def _least_s(run: Callable[[], Any], device: torch.device) -> float:
    def once() -> float:
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    return min(once() for _ in range(5))
