r"""Missing experts that the CPU computes from RAM, while the device fetches others.

    device        take_slots ---> fetch_experts ---> sparse_mlp ---> add_answer
       \                                                             /
        ask_host: x, ids, weights ---> CPU: run_experts ---> sums --+

All of it is in the stream, and so in the graph of a step: a kernel writes the CPU's inputs to host
memory and signals it, and a later one waits for its sums (`ops/cuda/host_calls.py`). The CPU's
share of the missing experts is a number on the device; it is computed from the speeds of both,
measured concurrently, and later from the duration of the CPU's calls.

The CPU sums in float32 in another order than the GPU: results equal those of a resident model up to
the tolerance of kernels, not bit for bit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.ops import Weight, fetch_experts
from penstock.ops.cpu.tiled_experts import HostWorker, Job, Spent, can_run
from penstock.ops.cuda.host_calls import Mailbox, add_answer, ask_host
from penstock.ops.cuda.program import is_available

if TYPE_CHECKING:
    from penstock.layers.mlp import SparseMLP
    from penstock.offload.device_slots import DeviceSlots, LayerSlots

CALL_S = 10e-6  # default overhead of a call: CPU start and device resume
MOST_JOBS = 1 << 16  # layers x step sizes; the limit of call numbers
MEASURED_CALLS = 16
ADAPT_CALLS = 128  # after this many, the share is adjusted to their duration
SMOOTHING = 0.5
TRY_AGAIN_S = 10.0
LEAST_GAIN = 1.1  # minimum speedup over the link alone for the CPU to take part
MEASURED_S = 0.03
REPEATS = 3  # the best counts: sleeping threads or other programs disturb some
MEASURED_EXPERTS = 4  # per call
MEASURED_BYTES = 10**9


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers for steps of one size; layers take turns."""

    x: Tensor  # [T, H]  pinned, like the others
    ids: Tensor  # [T, k] int32
    weights: Tensor  # [T, k] float32
    out: Tensor  # [T, H] float32


@dataclass(frozen=True, slots=True)
class Split:
    """Bytes per second, of both running concurrently."""

    fetch: float
    compute: float

    @property
    def host_share(self) -> float:
        return self.compute / (self.compute + self.fetch)


class HostProducts:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._buffers: dict[tuple[int, ...], Buffers] = {}
        self._jobs: dict[tuple[int, ...], Job] = {}
        self._mailbox = Mailbox(device, MOST_JOBS)
        self._worker = HostWorker(self._mailbox.calls, self._mailbox.answered)
        self.spent = Spent.nothing()
        self._seen = (0.0, 0, 0)
        self.split: Split | None = None  # None: the share is fixed
        self.call_s = CALL_S
        self._at_start: Split | None = None
        self._seen_at = time.monotonic()

    def launch(
        self, layer: LayerSlots, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Callable[[Tensor], object]:
        """Starts the CPU; the returned function adds its sums to a tensor, once they are ready."""
        size = (*ids.shape, x.shape[1])
        if size not in self._buffers:
            self._buffers[size] = self._new_buffers(*size)
        own = self._buffers[size]
        key = (layer.layer, *size)
        if key not in self._jobs:
            rows = layer.host_rows
            self._jobs[key] = Job(*rows, own.x, own.ids, own.weights, own.out, self.spent)
        job = self._jobs[key]
        given, targets = (x.contiguous(), ids.int(), weights), (own.x, own.ids, own.weights)
        if self.device.type == "cuda":
            number = self._worker.number_of(job)
            ask_host(self._mailbox, number, given, targets)
            return lambda out: add_answer(self._mailbox, number, out, own.out)
        for tensor, target in zip(given, targets, strict=True):
            target.copy_(tensor)
        job.run()
        return lambda out: out.add_(own.out)

    def close(self) -> None:
        self._worker.close()

    def describe(self) -> str:
        """For the start-up log."""
        if self.split is None:
            return "the CPU computes all missing experts"
        return (
            f"the CPU computes {self.split.host_share:.0%} of missing experts at "
            f"{self.split.compute / 1e9:.0f} GB/s, the link transfers the others at "
            f"{self.split.fetch / 1e9:.0f} GB/s; call overhead {1e6 * self.call_s:.0f} us"
        )

    def adapt(self) -> float | None:
        """The CPU's new share of missing experts; None: unchanged."""
        if self.split is None:
            return None
        seconds, num_bytes, num_calls = self._seen
        now = (self.spent.seconds, self.spent.num_bytes, self.spent.num_calls)
        if now[2] < num_calls + ADAPT_CALLS:
            return self._try_again()
        self._seen, self._seen_at = now, time.monotonic()
        taken = now[0] - seconds + self.call_s * (now[2] - num_calls)
        speed = (now[1] - num_bytes) / taken
        smooth = SMOOTHING * speed + (1 - SMOOTHING) * self.split.compute
        self.split = Split(self.split.fetch, smooth)
        return self.split.host_share

    def _try_again(self) -> float | None:
        """If other programs kept the CPU busy, its share may have become so small that it is never
        called: it starts over after a while.
        """
        if self._at_start is None:
            self._at_start = self.split
        if time.monotonic() - self._seen_at < TRY_AGAIN_S or self.split == self._at_start:
            return None
        self._seen_at, self.split = time.monotonic(), self._at_start
        assert self.split is not None
        return self.split.host_share

    def _new_buffers(self, num_tokens: int, k: int, width: int) -> Buffers:
        new = functools.partial(torch.empty, pin_memory=self.device.type == "cuda")
        return Buffers(
            new(num_tokens, width, dtype=self.dtype),
            new(num_tokens, k, dtype=torch.int32),
            new(num_tokens, k, dtype=torch.float32),
            new(num_tokens, width, dtype=torch.float32),
        )


def can_ask(device: torch.device) -> bool:
    """Whether a stream of the device can call the CPU."""
    return device.type == "cpu" or is_available(device)


def can_multiply(gate_up: Weight, down: Weight, dtype: torch.dtype) -> bool:
    """Whether the CPU has a kernel for experts in this format."""
    if len(gate_up.parts) != 1 or len(down.parts) != 1:
        return False
    return can_run(gate_up.parts[0], down.parts[0], dtype)


def measure_compute(store: DeviceSlots, dtype: torch.dtype) -> float:
    """Bytes per second that the CPU processes, alone."""
    calls, spent = _measuring_calls(store, dtype)
    _keep_busy(calls, MEASURED_S)
    best = 0.0
    for _ in range(REPEATS):
        before = spent.num_bytes
        seconds = _keep_busy(calls, MEASURED_S)
        best = max(best, (spent.num_bytes - before) / seconds)
    return best


def _keep_busy(calls: list[Job], least_s: float) -> float:
    started = time.perf_counter()
    while time.perf_counter() - started < least_s:
        for call in calls:
            call.run()
    return time.perf_counter() - started


def measure_split(store: DeviceSlots, dtype: torch.dtype) -> Split:
    """The CPU computes while the device fetches."""
    calls, spent = _measuring_calls(store, dtype)
    layer, device = store.layers[0], store.device
    wanted = layer.held()
    num_bytes = int(wanted[0]) * layer.expert_bytes
    count = max(1, round(MEASURED_S * 50e9 / num_bytes))

    def fetch() -> None:
        fetch_experts(wanted, layer.sources, layer.targets, layer.table)

    def both() -> Split:
        torch.cuda.synchronize(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before, started, place = spent.num_bytes, time.perf_counter(), 0
        begin.record()
        for _ in range(count):
            fetch()
        end.record()
        while not end.query():
            calls[place % len(calls)].run()
            place += 1
        compute = (spent.num_bytes - before) / (time.perf_counter() - started)
        return Split(count * num_bytes / (begin.elapsed_time(end) / 1e3), compute)

    fetch()
    _keep_busy(calls, MEASURED_S)
    return max((both() for _ in range(REPEATS)), key=lambda one: one.fetch + one.compute)


@torch.inference_mode()
def measure_call(products: HostProducts, layer: LayerSlots) -> float:
    """Seconds that a CPU call takes in a graph if it has nothing to compute."""
    device, width = products.device, layer.host_rows[0].num_columns
    x = torch.zeros(1, width, dtype=products.dtype, device=device)
    ids = torch.zeros(1, layer.experts_per_token, dtype=torch.int32, device=device)
    weights = torch.zeros(1, layer.experts_per_token, device=device)

    def call() -> None:
        products.launch(layer, x, ids, weights)(x)

    call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(MEASURED_CALLS):
            call()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times) / MEASURED_CALLS


@torch.inference_mode()
def largest_difference(store: DeviceSlots, mlps: Sequence[SparseMLP], num_tokens: int = 4) -> float:
    """Between outputs of fetched experts and of experts computed by the CPU, for random tokens of
    the first and the last layer, relative to the largest.
    """
    share, worst = store.host_share.clone(), 0.0
    for number in {0, len(mlps) - 1}:
        mlp, layer = mlps[number], store.layers[number]
        k, device = layer.experts_per_token, store.device
        generator = torch.Generator().manual_seed(number)
        rows = [
            torch.randperm(layer.num_experts, generator=generator)[:k] for _ in range(num_tokens)
        ]
        ids = torch.stack(rows).int().to(device)
        x = torch.randn(num_tokens, mlp.router.shape[1], generator=generator)
        x = x.to(device, store.dtype)
        weights = torch.full((num_tokens, k), 1.0 / k, device=device)
        found = []
        for value in (1.0, 0.0):
            store.host_share.fill_(value)
            given = (mlp.gate_up, mlp.down, torch.zeros_like(x))
            found.append(layer.run(x, weights, ids, *given, counters=mlp.counters).float())
        computed, fetched = found
        worst = max(worst, float((computed - fetched).abs().max() / fetched.abs().max()))
    store.host_share.copy_(share)
    return worst


def _measuring_calls(store: DeviceSlots, dtype: torch.dtype) -> tuple[list[Job], Spent]:
    """One token with a few experts of each layer in turn, repeatedly with others: more than any CPU
    cache holds.
    """
    spent, calls, count = Spent.nothing(), [], min(MEASURED_EXPERTS, store.layers[0].num_experts)
    num_bytes, last = 0, min(layer.num_experts for layer in store.layers)
    while last >= count and num_bytes < MEASURED_BYTES:
        for layer in store.layers:
            gate_up, down = layer.host_rows
            ids = torch.arange(last - count, last, dtype=torch.int32)[None]
            x = torch.ones(1, gate_up.num_columns, dtype=dtype)
            out = torch.empty(1, down.num_rows)
            calls.append(Job(gate_up, down, x, ids, torch.ones(1, count), out, spent))
            num_bytes += count * layer.expert_bytes
        last -= count
    return calls, spent
