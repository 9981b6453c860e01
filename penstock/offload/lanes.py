"""Two staging buffers (lanes) for all experts of a layer: one is filled from RAM while the other is
read.

For steps of many tokens, which need most experts of every layer: each crosses the link once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.offload.layout import ExpertLayout
from penstock.ops import Weight

NUM_LANES = 2


class Lanes:
    """Two staging buffers for all experts of a layer: one is filled while the other is read."""

    def __init__(
        self,
        layouts: Sequence[ExpertLayout],
        stacks: Sequence[list[Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stacks, self._device = stacks, device
        counts = [len(stack[0]) for stack in stacks]
        sizes = [layout.bytes_in(n, dtype) for layout, n in zip(layouts, counts, strict=True)]
        count = min(NUM_LANES, len(stacks))
        self._memory = [
            torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(count)
        ]
        self._views = [
            layout.slots_in(self._memory[number % count], n, dtype)
            for number, (layout, n) in enumerate(zip(layouts, counts, strict=True))
        ]
        self._holds: list[int | None] = [None] * count
        self._filled: list[Any] = [None] * count
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        self.copied_bytes = 0
        self.num_bytes = sum(memory.nbytes for memory in self._memory)

    def use(self, layer: int) -> tuple[Weight, Weight]:
        """The layer's experts, in order, for GEMMs that are launched before the next call. Starts
        copying the next layer's, except for the last layer of a prefill, which has few tokens.
        """
        with self._lock:
            self._fill(layer)
            event = self._filled[layer % len(self._memory)]
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
            if layer + 2 < len(self._stacks):
                self._fill(layer + 1)
        gate_up, down, _ = self._views[layer]
        return gate_up, down

    def take(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """A lane's memory and the layer's stacks, to measure copies between them."""
        with self._lock:
            self._holds[layer % len(self._memory)] = None
        return self._views[layer][2], self._stacks[layer]

    def _fill(self, layer: int) -> None:
        lane = layer % len(self._memory)
        if self._holds[lane] == layer:
            return
        self._holds[lane] = layer
        pairs = list(zip(self._views[layer][2], self._stacks[layer], strict=True))
        self.copied_bytes += sum(source.nbytes for _, source in pairs)
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        # GEMMs that read this lane were launched before those of the layer in between.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._filled[lane] = torch.cuda.Event()
            self._filled[lane].record(self._stream)
