"""How often layers use their experts, read asynchronously from a device that counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Heat:
    """`EngineStats.expert_heat` as last seen by the host. The numbers may be from the middle of a
    step: they are for display.
    """

    def __init__(self, scores: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        self._scores, self._slots = scores, slots  # per layer: [E] float32; [E], -1: in no slot
        self._last: tuple[bytes, ...] = ()
        self._copy: tuple[Tensor, Any] | None = None
        device = scores[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def latest(self) -> tuple[bytes, ...]:
        """On a GPU as of the last call or later."""
        if self._stream is None:
            return self._rows(self._levels())
        if self._copy is not None and self._copy[1].query():
            self._last, self._copy = self._rows(self._copy[0]), None
        if self._copy is None:
            with torch.cuda.stream(self._stream):
                levels = self._levels()
                buffer = torch.empty_like(levels, device="cpu", pin_memory=True)
                buffer.copy_(levels, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
            self._copy = buffer, event
        return self._last

    def _levels(self) -> Tensor:  # [E of all layers] uint8
        levels = (127 * torch.cat(list(self._scores))).round().clamp(0, 127)
        return (levels + 128 * (torch.cat(list(self._slots)) >= 0)).to(torch.uint8)

    def _rows(self, levels: Tensor) -> tuple[bytes, ...]:
        parts = levels.split([len(scores) for scores in self._scores])
        return tuple(part.numpy().tobytes() for part in parts)
