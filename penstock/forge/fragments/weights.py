"""The weights of the model, read from its one file."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.forge.fragments.product_packed import pack
from penstock.forge.fragments.shape import Shape
from penstock.forge.fragments.weights_fused import Layer, load_layer

NUM_READERS = 8  # one thread is limited by the page faults of the file


class Weights(NamedTuple):
    embedding: Tensor  # [V, H]
    layers: list[Layer]
    norm: Tensor  # [H]
    head: Tensor  # [V, H]


class StateDict:
    """The stored tensors, brought to the device one by one."""

    def __init__(self, weight_dir: str, dtype: torch.dtype, device: torch.device) -> None:
        path = os.path.join(weight_dir, "model.pt")
        self.tensors: dict[str, Tensor] = torch.load(
            path, map_location="cpu", weights_only=True, mmap=True
        )
        self.dtype = dtype
        self.device = device

    def take(self, name: str, *shape: int) -> Tensor:
        spellings = (f"{name}.weight", name, f"model.{name}.weight", f"model.{name}")
        stored = next(
            (self.tensors[spelled] for spelled in spellings if spelled in self.tensors), None
        )
        if stored is None:
            raise KeyError(f"model.pt has no tensor {name}.weight")
        if stored.shape != shape:
            raise ValueError(
                f"{name} has shape {list(stored.shape)}; the config says {list(shape)}"
            )
        return stored.to(self.device).to(self.dtype)


def load_weights(
    shape: Shape, weight_dir: str, dtype: torch.dtype, device: torch.device
) -> Weights:
    state = StateDict(weight_dir, dtype, device)
    embedding = state.take("embed_tokens", shape.vocab_size, shape.hidden_size)
    prefixes = [f"layers.{index}." for index in range(shape.num_layers)]
    layers = [load_layer(state, prefix, shape) for prefix in prefixes]  # forge: when layers=torch
    # forge: when layers=kernels
    with ThreadPoolExecutor(NUM_READERS) as threads:
        layers = list(threads.map(lambda prefix: load_layer(state, prefix, shape), prefixes))
    # forge: end
    norm = state.take("norm", shape.hidden_size)
    head = embedding
    if shape.has_own_head:
        head = state.take("lm_head", shape.vocab_size, shape.hidden_size)
    head = head * norm  # forge: when norm=folded|in_kernel
    head = pack(head)  # forge: when products=packed
    return Weights(embedding, layers, norm, head)
