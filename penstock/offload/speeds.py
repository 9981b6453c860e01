"""How fast the tiers of a store are, measured with the store's own parts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from penstock.offload.host import FiledExperts
from penstock.offload.residency import Residency
from penstock.offload.store import ExpertStore, SlotPool

COPIES = 64  # experts
READS = 256


@dataclass(frozen=True, slots=True)
class TierSpeeds:
    """Bytes a second."""

    copy: float  # from RAM into slots
    read: float | None  # from files, page cache included; None: all experts are in RAM


def measure_speeds(store: ExpertStore, experts_of_layer: int) -> TierSpeeds:
    """Reads change what RAM holds, so it is for a store that has not served yet."""
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
    copied = len(experts) * spare.slot_bytes / min(copy_all() for _ in range(3))
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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
