"""The model as its config defines it: plain torch, one sequence, every token anew. Knows no cache, no batch.

What an engine says is right when it agrees with this. Norms and rotations are computed in float32, products
and attention in the type that the engine computes in.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.forge.target import Target

NUM_READERS = 8  # one thread copies to a GPU no faster than it finds the pages of a file


class Reference:
    def __init__(self, target: Target, dtype: torch.dtype) -> None:
        shape, device = target.shape, torch.device(target.device)
        self.shape = shape
        self.dtype = dtype  # in which it computes
        self.device = device
        self.weights = read_weights(target.weight_dir, dtype, device)
        dims = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
        self.frequencies = shape.rope_theta ** (-dims / shape.head_dim)

    def in_float32(self) -> Reference:
        """The same with the same weights, widened one by one as they are used: they are neither read nor
        held twice."""
        wider = copy.copy(self)
        wider.dtype = torch.float32
        return wider

    @torch.inference_mode()
    def logits(self, tokens: list[int], positions: list[int]) -> Tensor:
        """After the tokens at these positions, [positions, V] float32."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        hidden = self.weights["embed_tokens"][ids].to(self.dtype)
        for layer in range(self.shape.num_layers):
            hidden = hidden + self._attention(hidden, f"layers.{layer}.")
            hidden = hidden + self._feed_forward(hidden, f"layers.{layer}.")
        wanted = hidden[torch.tensor(positions, device=self.device)]
        return self._project(self._norm(wanted, "norm"), "lm_head").float()

    def _attention(self, hidden: Tensor, layer: str) -> Tensor:
        x = self._norm(hidden, layer + "input_layernorm")
        query, key, value = (self._heads(x, f"{layer}self_attn.{name}_proj") for name in "qkv")
        query, key = self._rotate(query), self._rotate(key)
        group = self.shape.num_heads // self.shape.num_kv_heads
        key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
        mixed = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
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
        """Even and odd dimensions of a head are the two coordinates of a point that turns."""
        positions = torch.arange(heads.shape[1], device=self.device, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies)
        even, odd = heads[..., 0::2].float(), heads[..., 1::2].float()
        turned = torch.empty(heads.shape, device=self.device)
        turned[..., 0::2] = even * angles.cos() - odd * angles.sin()
        turned[..., 1::2] = even * angles.sin() + odd * angles.cos()
        return turned.to(heads.dtype)


def read_weights(weight_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """By bare names: without `model.` before and `.weight` behind."""
    path = weight_dir / "model.pt"
    if not path.exists():
        raise CheckpointError(
            f"There is no {path}",
            "Weights are one state dict in a file model.pt.",
            "scripts/generate_toy_weights.py makes one from a config.",
        )
    stored: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    names = [name.removeprefix("model.").removesuffix(".weight") for name in stored]
    with ThreadPoolExecutor(NUM_READERS) as threads:
        return dict(zip(names, threads.map(lambda tensor: tensor.to(device).to(dtype), stored.values())))
