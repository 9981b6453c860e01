"""MoE offload on a GPU: all experts in pinned RAM, some cached in slots that the device manages.

    few tokens    take_slots -> fetch_experts -> sparse_mlp, on slots      all on the device
    many tokens   lane 0: layer 0, 2, ..., all experts    copied while another layer computes
                  lane 1: layer 1, 3, ...

The host knows neither which experts a step needs nor which ones are in slots, so a decode step is
one graph, as for a resident model. Each layer has its own slots. The GEMMs are those of a resident
model, with slots in place of experts, and give the same bits. All chosen experts run, always.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.layers.mlp import SparseMLP
from penstock.offload.expert_log import ExpertLog
from penstock.offload.heat import Heat
from penstock.offload.host_products import (
    LEAST_GAIN,
    HostProducts,
    measure_call,
    measure_split,
)
from penstock.offload.lanes import NUM_LANES, Lanes
from penstock.offload.layout import ExpertLayout
from penstock.offload.pinned import large_addresses, unpin
from penstock.ops import Weight, copy_table, fetch_experts, sparse_mlp, take_slots
from penstock.ops.reference.expert_cache import NUM_COUNTS

LISTED_TOKENS = 5  # from this many tokens on, `sparse_mlp` uses another kernel


class DeviceSlots:
    """All experts of a model."""

    place = "RAM"

    def __init__(
        self,
        mlps: Sequence[SparseMLP],
        layouts: Sequence[ExpertLayout],
        stacks: Sequence[list[Tensor]],  # per layer, pinned
        slot_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device, self.dtype, self.host = device, dtype, self
        self.num_layers = len(mlps)
        self.num_experts = sum(mlp.router.shape[0] for mlp in mlps)
        self.log: ExpertLog | None = None
        self.lock = threading.Lock()
        self.lanes = Lanes(layouts, stacks, dtype, device)
        self.counts = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device)
        self.host_share = torch.zeros(1, device=device)  # the CPU's share of missing experts
        self.products: HostProducts | None = None  # None: all are fetched
        self._seen = Seen(self.counts)
        counts = share_out(mlps, layouts, slot_bytes - self.lanes.num_bytes, dtype)
        self.layers = [
            LayerSlots.of(self, number, mlp, layout, stack, count, dtype)
            for number, (mlp, layout, stack, count) in enumerate(
                zip(mlps, layouts, stacks, counts, strict=True)
            )
        ]
        self._heat = Heat(
            [layer.scores for layer in self.layers], [layer.slot_of for layer in self.layers]
        )
        self.num_slots = sum(counts)
        self.num_bytes = self.lanes.num_bytes + sum(layer.num_bytes for layer in self.layers)
        # A step of up to this many tokens never needs the lanes.
        self.most_captured = min(layer.most_fetched for layer in self.layers)
        addresses = large_addresses(tensor for stack in stacks for tensor in stack)
        self._unpin = weakref.finalize(self, unpin, addresses)
        self._unpin.atexit = False  # at exit the system frees it

    def stats(self) -> dict[str, int]:
        """Totals since the start; on a GPU as of the last call or later, to avoid synchronizing."""
        return self._describe(self._seen.latest())

    def heat(self) -> tuple[bytes, ...]:
        """In the format of `EngineStats.expert_heat`; on a GPU as of the last call or later,
        too.
        """
        return self._heat.latest()

    def stats_now(self) -> dict[str, int]:
        """The current totals: waits for the device."""
        return self._describe(self.counts.tolist())

    def _describe(self, counts: Sequence[int]) -> dict[str, int]:
        hits, misses, fetched = counts
        each = self.layers[0].expert_bytes
        return {
            "hits": hits,
            "misses": misses,
            "ram_hits": misses,
            "fetched_bytes": fetched * each + self.lanes.copied_bytes,
            "computed_bytes": (misses - fetched) * each,
            "wait_us": 0,
        }

    def close(self) -> None:
        if self.products is not None:
            self.products.close()
        self._unpin()
        if self.log is not None:
            self.log.close()

    def use_cpu(self, misses: str) -> None:
        """Lets the CPU compute misses from now on: all of them, or the best share."""
        products = HostProducts(self.device, self.dtype)
        if misses == "auto":
            products.split = split = measure_split(self, self.dtype)
            products.call_s = measure_call(products, self.layers[0])
            if split.fetch + split.compute < LEAST_GAIN * max(split.fetch, 1.0):
                return
        self.host_share.fill_(1.0 if products.split is None else products.split.host_share)
        self.products = products

    def adapt(self) -> None:
        """Called by every step: adjusts the CPU's share to the duration of its calls."""
        if self.products is not None and (share := self.products.adapt()) is not None:
            self.host_share.fill_(share)


@dataclass(slots=True)
class LayerSlots:
    """The experts of one layer; its `run` is `sparse_mlp` with experts wherever they are."""

    store: DeviceSlots
    layer: int
    num_experts: int
    num_slots: int
    experts_per_token: int
    host_rows: tuple[Any, Any]  # gate and up, and down, in RAM
    sources: list[Tensor]  # [E, ...]  the tensors in RAM
    targets: list[Tensor]  # [S + 1, ...]  the slots; the last one holds zeros
    table: Tensor
    slot_of: Tensor
    scores: Tensor
    marks: Tensor

    @classmethod
    def of(
        cls,
        store: DeviceSlots,
        layer: int,
        mlp: SparseMLP,
        layout: ExpertLayout,
        sources: list[Tensor],
        num_slots: int,
        dtype: torch.dtype,
    ) -> LayerSlots:
        """Gives the layer slots in place of its stacks, and fills them with the first experts."""
        num_experts, device = mlp.router.shape[0], store.device
        gate_up, down = (weight.parts or (weight.values,) for weight in (mlp.gate_up, mlp.down))
        mlp.gate_up, mlp.down, targets = layout.new_slots(num_slots + 1, dtype, device)
        for source, target in zip(sources, targets, strict=True):
            target[:num_slots].copy_(source[:num_slots], non_blocking=True)
        slot_of = torch.arange(num_experts, dtype=torch.int32, device=device)
        slot_of[num_slots:] = -1
        own = cls(
            store,
            layer,
            num_experts,
            num_slots,
            mlp.experts_per_token,
            (gate_up[0], down[0]),
            sources,
            targets,
            copy_table(sources, targets),
            slot_of,
            torch.zeros(num_experts, device=device),
            torch.zeros_like(slot_of),
        )
        mlp.offloaded = own
        return own

    @property
    def expert_bytes(self) -> int:
        return sum(source[0].nbytes for source in self.sources)

    @property
    def num_bytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    @property
    def most_fetched(self) -> int:
        """The most tokens of a step whose experts are fetched one by one. More tokens need most
        experts, which then come through the lanes.
        """
        return self.num_experts // self.experts_per_token

    @property
    def _at_once(self) -> int:
        """Tokens whose experts are guaranteed to have slots."""
        return self.num_slots // self.experts_per_token

    def run(
        self,
        x: Tensor,  # [T, H]  normed
        weights: Tensor,  # [T, k] float32
        ids: Tensor,  # [T, k]  experts
        gate_up: Weight,  # [S + 1, 2I, H]
        down: Weight,  # [S + 1, H, I]
        residual: Tensor,  # [T, H]
        shared_weight: Tensor | None = None,  # [T, 1] float32
        shared_gate_up: Weight | None = None,  # [2I', H]
        shared_down: Weight | None = None,  # [H, I']
        counters: Tensor | None = None,
        *,
        deterministic: bool = False,
    ) -> Tensor:  # [T, H]
        if self.store.log is not None:
            self.store.log.add(self.layer, ids.unique().tolist())
        if len(x) > self.most_fetched:
            return sparse_mlp(
                x,
                weights,
                ids,
                *self.store.lanes.use(self.layer),
                residual,
                shared_weight,
                shared_gate_up,
                shared_down,
                counters,
                deterministic=deterministic,
            )
        parts = []
        for own in token_chunks(len(x), self._at_once):
            given = Chunk.of(own, len(x), x, weights, ids, residual, shared_weight)
            slots, slot_weights, add_rest = self._fetch(given.x, given.weights, given.ids)
            out = sparse_mlp(
                given.x,
                slot_weights,
                slots,
                gate_up,
                down,
                given.residual,
                given.shared_weight,
                shared_gate_up,
                shared_down,
                counters,
                deterministic=deterministic,
            )
            if add_rest is not None:
                add_rest(out)
            parts.append(out[: own.stop - own.start])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _fetch(
        self, x: Tensor, weights: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], object] | None]:
        """Slots and weights, and a function that adds the CPU's sums. Threads that launch
        concurrently, as at start, must not fetch between another's choice and its copies.
        """
        store, add_rest = self.store, None
        tables = (self.slot_of, self.scores, self.marks, store.counts, store.host_share)
        with store.lock:
            ids = ids.contiguous()
            slots, slot_weights, host_weights, wanted = take_slots(
                ids, weights.contiguous(), *tables, self.num_slots
            )
            if store.products is not None:
                add_rest = store.products.launch(self, x, ids, host_weights)
            fetch_experts(wanted, self.sources, self.targets, self.table)
        return slots, slot_weights, add_rest

    def held(self) -> Tensor:  # [1 + 2 * S] int32
        """The current content of all slots, as a list for `fetch_experts`: a fetch that changes
        nothing.
        """
        held = [[expert, slot] for expert, slot in enumerate(self.slot_of.tolist()) if slot >= 0]
        numbers = [len(held), *(number for pair in held for number in pair)]
        return torch.tensor(numbers, dtype=torch.int32, device=self.slot_of.device)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens of a step, as arguments of `LayerSlots.run`."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    residual: Tensor
    shared_weight: Tensor | None

    @classmethod
    def of(
        cls,
        own: slice,
        num_tokens: int,  # of the step
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        residual: Tensor,
        shared_weight: Tensor | None,
    ) -> Chunk:
        """A smaller last chunk is padded with its last token, so that all chunks use the same
        kernel as the whole step would. This needs no additional experts.
        """
        num_more = LISTED_TOKENS - (own.stop - own.start) if num_tokens >= LISTED_TOKENS else 0

        def take(tensor: Tensor) -> Tensor:
            if num_more <= 0:
                return tensor[own]
            last = tensor[own.stop - 1 : own.stop].expand(num_more, -1)
            return torch.cat((tensor[own], last))

        taken = take(weights)
        if num_more > 0:
            taken[-num_more:] = 0
        return cls(
            take(x),
            taken,
            take(ids),
            take(residual),
            None if shared_weight is None else take(shared_weight),
        )


def token_chunks(num_tokens: int, at_once: int) -> list[slice]:
    """Chunks of tokens whose experts have slots at the same time."""
    starts = range(0, num_tokens, at_once)
    return [slice(first, min(first + at_once, num_tokens)) for first in starts]


class Seen:
    """Device counters as last seen by the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._last = numbers, [0] * len(numbers)
        self._copy: tuple[Tensor, Any] | None = None
        is_gpu = numbers.device.type == "cuda"
        self._stream = torch.cuda.Stream(numbers.device) if is_gpu else None

    def latest(self) -> list[int]:
        if self._stream is None:
            return self._numbers.tolist()
        if self._copy is not None and self._copy[1].query():
            self._last, self._copy = self._copy[0].tolist(), None
        if self._copy is None:
            with torch.cuda.stream(self._stream):
                buffer = torch.empty_like(self._numbers, device="cpu", pin_memory=True)
                buffer.copy_(self._numbers, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
            self._copy = buffer, event
        return self._last


def share_out(
    mlps: Sequence[SparseMLP], layouts: Sequence[ExpertLayout], num_bytes: int, dtype: torch.dtype
) -> list[int]:
    """Slots of each layer: the same fraction of its experts, and one more that holds zeros."""
    sizes = [layout.slot_bytes(dtype) for layout in layouts]
    experts = [mlp.router.shape[0] for mlp in mlps]
    total = sum(size * count for size, count in zip(sizes, experts, strict=True))
    share = (num_bytes - sum(sizes)) / total
    return [
        min(count, max(int(share * count), mlp.experts_per_token))
        for mlp, count in zip(mlps, experts, strict=True)
    ]


def least_bytes(
    mlps: Sequence[SparseMLP], layouts: Sequence[ExpertLayout], dtype: torch.dtype
) -> int:
    """Two lanes, and slots for one token in each layer."""
    both = list(zip(mlps, layouts, strict=True))
    lanes = NUM_LANES * max(layout.bytes_in(mlp.router.shape[0], dtype) for mlp, layout in both)
    return lanes + sum(
        (mlp.experts_per_token + 1) * layout.slot_bytes(dtype) for mlp, layout in both
    )


def use_device_slots(
    model: Any,
    mlps: Sequence[SparseMLP],
    layouts: Sequence[ExpertLayout],
    stacks: Sequence[list[Tensor]],
    slot_bytes: int,
) -> DeviceSlots:
    least = least_bytes(mlps, layouts, model.dtype)
    if slot_bytes < least:
        raise CapacityError(
            f"{slot_bytes / 1e9:.3g} GB of expert cache is too little",
            f"It must hold two layers' experts and those of a token: {least / 1e9:.3g} GB.",
            f"Set --expert-cache {-(-least // 10**6)}MB or more.",
        )
    try:
        return DeviceSlots(mlps, layouts, stacks, slot_bytes, model.dtype, model.device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{slot_bytes / 1e9:.1f} GB of expert cache does not fit on {model.device}",
            "The other weights already take the rest.",
            "Set a smaller --expert-cache.",
        ) from error
