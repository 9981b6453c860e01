"""Experts in slots, managed by the host: the device holds some, the host all of them.

    slots on the device   <-  RAM: stacks, or records   <-  files
    [ gate_up | down ] x S     pinned for a GPU              parallel reads

Layers with the same expert format share one pool of slots, so that layers which need more get
more. Before the GEMMs of a layer, `OffloadedExperts` fetches the experts that its tokens chose
and that no slot holds; the GEMMs then run as for a resident model, with slots in place of
experts. All chosen experts run, always.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CapacityError
from penstock.layers.mlp import SparseMLP
from penstock.offload.expert_log import ExpertLog
from penstock.offload.host import HostExperts
from penstock.offload.layout import ExpertLayout
from penstock.offload.residency import Residency, Taken
from penstock.ops import Weight, sparse_mlp
from penstock.ops.reference.moe import add_experts, run_experts_grouped


class SlotPool:
    """Slots for experts of one layout, and the expert in each."""

    def __init__(
        self, layout: ExpertLayout, residency: Residency, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.residency = residency
        self.gate_up, self.down, self.tensors = layout.new_slots(self.num_slots, dtype, device)
        self.slot_bytes = layout.slot_bytes(dtype)

    @property
    def num_slots(self) -> int:
        return self.residency.num_places

    def fill(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Copies from the host; on a GPU on the current stream."""
        for own, tensor in zip(self.tensors, tensors, strict=True):
            own[slot].copy_(tensor, non_blocking=True)


class ExpertStore:
    def __init__(self, host: HostExperts, device: torch.device) -> None:
        self.host, self.device = host, device
        self.pools: list[SlotPool] = []
        self.pool_of: dict[int, tuple[SlotPool, int]] = {}  # with the number of experts, by layer
        self.num_layers = self.num_experts = 0
        self._counters: Counter[str] = Counter(hits=0, misses=0, fetched_bytes=0)
        self._wait_us = 0
        self.log: ExpertLog | None = None
        self._copies = _Copies(device)

    def fetch(self, layer: int, experts: Sequence[int], pool: SlotPool) -> list[int]:
        """The slots of these experts, which they keep until `release`."""
        taken = pool.residency.take(layer, experts)
        missing = [one for one in taken if one.is_new]
        self._counters["hits"] += len(taken) - len(missing)
        self._counters["misses"] += len(missing)
        if missing:
            started = time.perf_counter()
            self._fill(missing, pool)
            self._wait_us += int(1e6 * (time.perf_counter() - started))
        return [one.place for one in taken]

    def _fill(self, missing: Sequence[Taken], pool: SlotPool) -> None:
        slot_of = {one.key: one.place for one in missing}
        try:
            with self._copies.after_products():
                layer, experts = missing[0].key[0], [one.key[1] for one in missing]
                for key, tensors in self.host.read(layer, experts, self._copies.wait):
                    pool.fill(slot_of[key], tensors)
                    del slot_of[key]
                    self._counters["fetched_bytes"] += pool.slot_bytes
        finally:
            for key in slot_of:  # on an error, these slots do not hold their experts
                pool.residency.forget(key)

    @property
    def num_slots(self) -> int:
        return sum(pool.num_slots for pool in self.pools)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.num_slots * pool.slot_bytes for pool in self.pools)

    def stats(self) -> dict[str, int]:
        """Totals since the start."""
        return {**self._counters, **self.host.counters, "wait_us": self._wait_us}

    def waited_s(self) -> float:
        return self._wait_us / 1e6

    def adapt(self) -> None:
        """Nothing to adapt: all misses are fetched."""

    def heat(self) -> tuple[bytes, ...]:
        """In the format of `EngineStats.expert_heat`."""
        found = {id(pool): pool.residency.heat() for pool in self.pools}
        return tuple(
            found[id(pool)][layer, :num_experts].tobytes()
            for layer, (pool, num_experts) in sorted(self.pool_of.items())
        )

    def close(self) -> None:
        self.host.close()
        if self.log is not None:
            self.log.close()


@dataclass(slots=True)
class OffloadedExperts:
    """The MoE of one layer: `sparse_mlp` on the slots where the store has put the experts."""

    store: ExpertStore
    pool: SlotPool
    layer: int
    num_experts: int

    def run(
        self,
        x: Tensor,  # [T, H]  normed
        weights: Tensor,  # [T, k] float32
        ids: Tensor,  # [T, k]  experts
        gate_up: Weight,  # [S, 2I, H]
        down: Weight,  # [S, H, I]
        residual: Tensor,  # [T, H]
        shared_weight: Tensor | None = None,  # [T, 1] float32
        shared_gate_up: Weight | None = None,  # [2I', H]
        shared_down: Weight | None = None,  # [H, I']
        counters: Tensor | None = None,
        *,
        deterministic: bool = False,
    ) -> Tensor:  # [T, H]
        experts = ids.unique().tolist()
        if self.store.log is not None:
            self.store.log.add(self.layer, experts)
        shared = (shared_weight, shared_gate_up, shared_down)
        if len(experts) > self.pool.num_slots:
            outputs = self._run_in_passes(x, ids, experts, deterministic)
            return add_experts(outputs, weights, x, residual, *shared, deterministic=deterministic)
        try:
            slots = self._fetch(experts, ids)
            return sparse_mlp(
                x,
                weights,
                ids,
                gate_up,
                down,
                residual,
                *shared,
                counters,
                slots=slots,
                deterministic=deterministic,
            )
        finally:
            self.pool.residency.release()

    def _fetch(self, experts: Sequence[int], ids: Tensor) -> Tensor:  # [E]
        """The slot of each of these experts; 0, which a kernel may read, for others."""
        slots = self.store.fetch(self.layer, experts, self.pool)
        table = torch.zeros(self.num_experts, dtype=ids.dtype)
        table[torch.tensor(experts)] = torch.tensor(slots, dtype=ids.dtype)
        return table.to(ids.device)

    def _run_in_passes(
        self, x: Tensor, ids: Tensor, experts: Sequence[int], deterministic: bool
    ) -> Tensor:  # [T, k, H]
        """For a CPU with fewer slots than a step needs: each expert is fetched once, and multiplies
        all of its tokens, as if all were resident.
        """
        assert x.is_cpu, "a GPU has slots for all experts of a layer"
        outputs = x.new_empty(*ids.shape, self.pool.down.shape[-2])
        most = self.pool.num_slots
        for first in range(0, len(experts), most):
            some = experts[first : first + most]
            tokens, choices = torch.isin(ids, torch.tensor(some)).nonzero(as_tuple=True)
            try:
                slots = self._fetch(some, ids)[ids[tokens, choices].long()]
                outputs[tokens, choices] = run_experts_grouped(
                    x[tokens],
                    slots[:, None],
                    self.pool.gate_up,
                    self.pool.down,
                    deterministic=deterministic,
                )[:, 0]
            finally:
                self.pool.residency.release()
        return outputs


class _Copies:
    """Orders copies into slots between the GEMMs before and after them.

    On a GPU they run on a separate stream, which waits for the GEMMs that may still read a slot;
    the next GEMMs wait for the copies. On a CPU everything is sequential.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_products(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        products = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(products)
        with torch.cuda.stream(self._stream):
            yield
        products.wait_stream(self._stream)

    def wait(self) -> None:
        """Waits until all copies have read their source."""
        if self._stream is not None:
            self._stream.synchronize()


def attach(
    mlps: Sequence[SparseMLP], store: ExpertStore, slot_bytes: int, dtype: torch.dtype
) -> None:
    """Gives layers slots of this many bytes in total, in place of their own stacks."""
    layouts: dict[str, ExpertLayout] = {}
    layers_of: dict[str, list[int]] = {}
    for layer in range(len(mlps)):
        layout = store.host.layout_of(layer)
        layouts.setdefault(layout.key, layout)
        layers_of.setdefault(layout.key, []).append(layer)
    counts = {
        key: sum(mlps[layer].router.shape[0] for layer in layers)
        for key, layers in layers_of.items()
    }
    store.num_layers, store.num_experts = len(mlps), sum(counts.values())
    total = sum(counts[key] * layouts[key].slot_bytes(dtype) for key in layouts)
    for key, layout in layouts.items():
        share = min(1.0, slot_bytes / total)
        least = min(counts[key], least_slots(mlps, layers_of[key], store.device))
        num_slots = max(int(share * counts[key]), least)
        most = max(mlps[layer].router.shape[0] for layer in layers_of[key])
        residency = Residency(num_slots, len(mlps), most)
        pool = SlotPool(layout, residency, dtype, store.device)
        store.pools.append(pool)
        for layer in layers_of[key]:
            mlp = mlps[layer]
            mlp.gate_up, mlp.down = pool.gate_up, pool.down
            mlp.offloaded = OffloadedExperts(store, pool, layer, mlp.router.shape[0])
            store.pool_of[layer] = pool, mlp.router.shape[0]


def least_slots(mlps: Sequence[SparseMLP], layers: Sequence[int], device: torch.device) -> int:
    """For one token on a CPU; on a GPU for all experts of a layer, which a prefill may need."""
    return max(
        mlps[layer].router.shape[0] if device.type == "cuda" else mlps[layer].experts_per_token
        for layer in layers
    )


def use_slots(model: Any, mlps: list[SparseMLP], host: HostExperts, slot_bytes: int) -> None:
    layouts = {(layout := host.layout_of(layer)).key: layout for layer in range(len(mlps))}
    widest = max(layout.slot_bytes(model.dtype) for layout in layouts.values())
    least = len(layouts) * widest * least_slots(mlps, range(len(mlps)), model.device)
    if slot_bytes < least:
        kind = "all experts of a layer" if model.device.type == "cuda" else "the experts of a token"
        raise CapacityError(
            f"{slot_bytes / 1e9:.3g} GB of expert cache is too little",
            f"It must hold {kind}: {least / 1e9:.3g} GB.",
            f"Set --expert-cache {-(-least // 10**6)}MB or more.",
        )
    store = ExpertStore(host, model.device)
    try:
        attach(mlps, store, slot_bytes, model.dtype)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{slot_bytes / 1e9:.1f} GB of expert cache does not fit on {model.device}",
            "The other weights already take the rest.",
            "Set a smaller --expert-cache.",
        ) from error
    model.expert_store = store
    for mlp in mlps:
        assert mlp.offloaded is not None


def sparse_layers(model: nn.Module) -> dict[str, SparseMLP]:
    return {name: one for name, one in model.named_modules() if isinstance(one, SparseMLP)}


def stack_names(model: nn.Module) -> list[str]:
    return [f"{name}.{stack}" for name in sparse_layers(model) for stack in ("gate_up", "down")]
