"""Measures the speed of a store's tiers, with the store's own code."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.offload.device_slots import DeviceSlots
from penstock.offload.host import FiledExperts
from penstock.offload.host_products import measure_compute
from penstock.offload.residency import Residency
from penstock.offload.store import ExpertStore, SlotPool
from penstock.ops import fetch_experts
from penstock.ops.cpu.tiled_experts import can_run

COPIES = 64  # experts to copy
READS = 256
REPEATS = 3


@dataclass(frozen=True, slots=True)
class TierSpeeds:
    """Bytes per second."""

    copy: float  # from RAM to the device, in large copies
    read: float | None = None  # from files, including the page cache; None: all in RAM
    fetch: float | None = None  # from RAM into slots, by a GPU's own loads
    compute: float | None = None  # of experts computed by the CPU, from RAM

    @property
    def best(self) -> float:
        """The fastest way to serve a miss from RAM."""
        return max(self.copy, self.compute or 0.0)


def measure_speeds(store: ExpertStore | DeviceSlots, experts_of_layer: int) -> TierSpeeds:
    """Reads change what RAM holds, so this is for a store that has not served yet."""
    if isinstance(store, DeviceSlots):
        return _measure_device_slots(store)
    layout = store.host.layout_of(0)
    dtype = store.pools[0].gate_up.values.dtype
    experts = range(min(COPIES, experts_of_layer))
    residency = Residency(len(experts), 1, len(experts))
    spare = SlotPool(layout, residency, dtype, store.device)

    def copy_all() -> float:
        _wait(store.device)
        seconds = 0.0
        found = store.host.read(0, experts, lambda: _wait(store.device))
        for place, (_, tensors) in enumerate(found):
            started = time.perf_counter()
            spare.fill(place, tensors)
            if place == len(experts) - 1:
                _wait(store.device)
            seconds += time.perf_counter() - started
        return seconds

    copy_all()
    copied = len(experts) * spare.slot_bytes / min(copy_all() for _ in range(REPEATS))
    read = None
    if isinstance(store.host, FiledExperts):
        before, started = store.host.counters["disk_bytes"], time.perf_counter()
        for layer in range(store.host.num_layers):
            for _ in store.host.read(layer, experts, lambda: None):
                pass
            if (layer + 1) * len(experts) >= READS:
                break
        seconds = time.perf_counter() - started
        num_bytes = store.host.counters["disk_bytes"] - before
        read = num_bytes / seconds if num_bytes else None
    return TierSpeeds(copied, read)


def _measure_device_slots(store: DeviceSlots) -> TierSpeeds:
    """Refills slots with their current experts, and a lane with its layer."""
    layer = store.layers[0]
    wanted = layer.held()
    seconds = _least(
        lambda: fetch_experts(wanted, layer.sources, layer.targets, layer.table), store.device
    )
    fetched = int(wanted[0]) * layer.expert_bytes / seconds
    targets, sources = store.lanes.take(0)
    num_bytes = sum(source.nbytes for source in sources)

    def copy_all() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    compute = None
    if can_run(*layer.host_rows, store.dtype):
        compute = measure_compute(store, store.dtype)
    copied = num_bytes / _least(copy_all, store.device)
    return TierSpeeds(copied, fetch=fetched, compute=compute)


def _least(launch: Callable[[], None], device: torch.device) -> float:
    launch()
    times = []
    for _ in range(REPEATS):
        _wait(device)
        started = time.perf_counter()
        launch()
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
