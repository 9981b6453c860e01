"""Layers whose weights stay in pinned RAM, for a model that is larger than its GPU even without
experts, or has none: `--offload-layers N`.

    lane 0   layer 0, 2, ...   read by its GEMMs
    lane 1   layer 1, 3, ...   filled meanwhile

A lane is a staging buffer on the GPU. Every step copies all these layers once, so a token takes at
least their bytes over the link's bandwidth. A layer's weights are views of its lane, so ops and
results are those of a resident model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.offload.lanes import NUM_LANES
from penstock.ops import Weight
from penstock.ops.weight import map_part, tensors_of

ALIGNMENT = 256


def offloaded_names(model: Any, count: int, but: Sequence[str] = ()) -> list[str]:
    """Weights of the last `count` layers, except those in `but`."""
    if count > len(model.layers):
        raise ConfigError(
            f"offload_layers is {count}, but the model has {len(model.layers)} layers",
            todo="Give less, or omit it.",
        )
    layers = list(model.layers.named_children())[-count:]
    names = []
    for number, layer in layers:
        names += [
            f"layers.{number}.{name}"
            for name, one in layer.named_modules()
            if isinstance(one, Weight)
        ]
    excepted = set(but)
    return [name for name in names if name not in excepted]


class DenseLanes:
    def __init__(
        self, layers: Sequence[nn.Module], names: Sequence[set[str]], device: torch.device
    ):
        self._device = device
        weights = [
            [one for name, one in layer.named_modules() if isinstance(one, Weight) and name in own]
            for layer, own in zip(layers, names, strict=True)
        ]
        self._sources = [[t for one in some for t in _tensors(one)] for some in weights]
        sizes = [sum(_aligned(tensor) for tensor in some) for some in self._sources]
        self.host_bytes = sum(sizes)
        count = min(NUM_LANES, len(layers))
        self._memory = [
            torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(count)
        ]
        self._targets = [
            _move_into(self._memory[number % count], some) for number, some in enumerate(weights)
        ]
        self._filled: dict[int, Any] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self._use(number))

    def _use(self, number: int) -> None:
        """Before a layer runs: waits for its weights, and starts copying the next ones."""
        if number not in self._filled:
            self._fill(number)
        event = self._filled.pop(number)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        following = (number + 1) % len(self._sources)
        if (following - number) % len(self._memory):  # it uses another lane
            self._fill(following)

    def _fill(self, number: int) -> None:
        pairs = zip(self._targets[number], self._sources[number], strict=True)
        lane = number % len(self._memory)
        self._filled = {
            key: e for key, e in self._filled.items() if key % len(self._memory) != lane
        }
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            self._filled[number] = None
            return
        # The layer that used this lane before has already been launched.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._filled[number] = event


def use_lanes(model: Any, names: Sequence[str]) -> DenseLanes:
    """For weights in pinned RAM: the model's layers get them through lanes."""
    by_layer: dict[str, set[str]] = {}
    for name in names:
        _, number, own = name.split(".", 2)
        by_layer.setdefault(number, set()).add(own)
    children = dict(model.layers.named_children())
    layers = [children[number] for number in by_layer]
    return DenseLanes(layers, list(by_layer.values()), model.device)


def _tensors(weight: Weight) -> list[Tensor]:
    if not weight.parts:
        return [weight.values.data]
    return [tensor for part in weight.parts for tensor in tensors_of(part)]


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _move_into(memory: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
    """Turns the weights' tensors into views of the memory."""
    views, end = [], 0

    def moved(tensor: Tensor) -> Tensor:
        nonlocal end
        own = memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        end += _aligned(tensor)
        views.append(own)
        return own

    for weight in weights:
        if weight.parts:
            weight.parts = tuple(map_part(part, moved) for part in weight.parts)
        else:
            weight.values = nn.Parameter(moved(weight.values.data), requires_grad=False)
    return views
