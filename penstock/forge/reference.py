"""The model as its config defines it, in plain torch: one sequence, no cache, no batch.

An engine is correct if it agrees with this. Norms and rotations are computed in float32, products
and attention in the dtype that the engine computes in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import CapacityError, CheckpointError
from penstock.forge.fragments.shape import Shape
from penstock.forge.target import Target

NUM_READERS = 8  # one thread is limited by the page faults of the file
DERIVED_TENSOR = "rotary_emb.inv_freq"  # in older checkpoints; it follows from the config
MOST_NAMED = 6


class Reference:
    def __init__(self, target: Target, dtype: torch.dtype) -> None:
        shape, device = target.shape, torch.device(target.device)
        self.shape = shape
        self.dtype = dtype  # to compute in
        self.device = device
        self.weights = read_weights(target, dtype)
        dims = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
        self.frequencies = shape.rope_theta ** (-dims / shape.head_dim)

    def in_float32(self) -> Reference:
        """The same weights, converted one by one when they are used: not read or stored twice."""
        wider = copy.copy(self)
        wider.dtype = torch.float32
        return wider

    @torch.inference_mode()
    def logits(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Logits after the tokens at these positions, [positions, V] float32."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        hidden = self.weights["embed_tokens"][ids].to(self.dtype)
        for layer in range(self.shape.num_layers):
            hidden = hidden + self._attention(hidden, f"layers.{layer}.")
            hidden = hidden + self._feed_forward(hidden, f"layers.{layer}.")
        wanted = hidden[torch.tensor(positions, device=self.device)]
        head = "lm_head" if self.shape.has_own_head else "embed_tokens"
        return self._project(self._norm(wanted, "norm"), head).float()

    def _attention(self, hidden: Tensor, layer: str) -> Tensor:
        x = self._norm(hidden, layer + "input_layernorm")
        query, key, value = (self._heads(x, f"{layer}self_attn.{name}_proj") for name in "qkv")
        query, key = self._rotate(query), self._rotate(key)
        group = self.shape.num_heads // self.shape.num_kv_heads
        key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
        mixed = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[
            0
        ]
        return self._project(mixed.transpose(0, 1).flatten(1), layer + "self_attn.o_proj")

    def _feed_forward(self, hidden: Tensor, layer: str) -> Tensor:
        x = self._norm(hidden, layer + "post_attention_layernorm")
        gate = F.silu(self._project(x, layer + "mlp.gate_proj"))
        up = self._project(x, layer + "mlp.up_proj")
        return self._project(gate * up, layer + "mlp.down_proj")

    def _project(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name].to(self.dtype))

    def _heads(self, x: Tensor, name: str) -> Tensor:  # [heads, T, D]
        return self._project(x, name).unflatten(1, (-1, self.shape.head_dim)).transpose(0, 1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.eps)
        return (wide * self.weights[name].float()).to(x.dtype)

    def _rotate(self, heads: Tensor) -> Tensor:
        """Rotates pairs of an even and the next odd dimension of a head."""
        positions = torch.arange(heads.shape[1], device=self.device, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies)
        even, odd = heads[..., 0::2].float(), heads[..., 1::2].float()
        turned = torch.empty(heads.shape, device=self.device)
        turned[..., 0::2] = even * angles.cos() - odd * angles.sin()
        turned[..., 1::2] = even * angles.sin() + odd * angles.cos()
        return turned.to(heads.dtype)


def read_weights(target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors by bare names, without the prefix `model.` and the suffix `.weight`."""
    path = target.weight_dir / "model.pt"
    if not path.exists():
        raise CheckpointError(
            f"There is no {path}",
            "Weights are one state dict in a file model.pt.",
            "scripts/generate_toy_weights.py makes one from a config.",
        )
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file can raise anything
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        todo = "Write it with torch.save, or copy it here again."
        raise CheckpointError(f"{path} cannot be read", why, todo) from error
    tensors = _check_tensors(stored, target.shape, path)
    device = torch.device(target.device)
    try:
        with ThreadPoolExecutor(NUM_READERS) as threads:
            read = threads.map(lambda tensor: tensor.to(device).to(dtype), tensors.values())
            return dict(zip(tensors, read))
    except torch.OutOfMemoryError as error:
        size_gb = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize / 1e9
        raise CapacityError(
            f"The weights do not fit on {target.device}", f"As {dtype} they take {size_gb:.1f} GB."
        ) from error


def _check_tensors(stored: Any, shape: Shape, path: Path) -> dict[str, Tensor]:
    """All tensors of the model in their shapes, and no others: an unused one is an error."""
    if not isinstance(stored, dict) or not all(
        isinstance(tensor, Tensor) for tensor in stored.values()
    ):
        raise CheckpointError(
            f"{path} is not a state dict", "A dict from names to tensors is expected."
        )
    names = [str(name).removeprefix("model.").removesuffix(".weight") for name in stored]
    tensors = {
        name: tensor
        for name, tensor in zip(names, stored.values())
        if not name.endswith(DERIVED_TENSOR)
    }
    head, embedding = tensors.get("lm_head"), tensors.get("embed_tokens")
    if (
        not shape.has_own_head
        and head is not None
        and embedding is not None
        and torch.equal(head, embedding)
    ):
        del tensors["lm_head"]  # stored twice, as tied weights often are
    sizes = dict(tensor_shapes(shape))
    faults = {
        "It lacks": [name for name in sizes if name not in tensors],
        "Nothing uses its": [name for name in tensors if name not in sizes],
        "It has twice": [name for name in tensors if names.count(name) > 1],
        "In another shape it has": [
            f"{name} {list(tensors[name].shape)} instead of {list(size)}"
            for name, size in sizes.items()
            if name in tensors and tensors[name].shape != size
        ],
    }
    said = [f"{what} {_tell(found)}." for what, found in faults.items() if found]
    if said:
        todo = "Use the config that these weights were made with."
        raise CheckpointError(f"{path} does not belong to the config", " ".join(said), todo)
    return tensors


def _tell(found: list[str]) -> str:
    more = len(found) - MOST_NAMED
    return ", ".join(found[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shape of every tensor of the model, by its bare name."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    yield "embed_tokens", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        at = f"layers.{layer}."
        yield at + "input_layernorm", (hidden,)
        yield at + "self_attn.q_proj", (shape.num_query_rows, hidden)
        yield at + "self_attn.k_proj", (shape.num_key_rows, hidden)
        yield at + "self_attn.v_proj", (shape.num_key_rows, hidden)
        yield at + "self_attn.o_proj", (hidden, shape.num_query_rows)
        yield at + "post_attention_layernorm", (hidden,)
        yield at + "mlp.gate_proj", (width, hidden)
        yield at + "mlp.up_proj", (width, hidden)
        yield at + "mlp.down_proj", (hidden, width)
    yield "norm", (hidden,)
    if shape.has_own_head:
        yield "lm_head", (shape.vocab_size, hidden)
