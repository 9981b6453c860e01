"""The model as its config defines it: plain torch, one sequence, every token anew. Knows no cache, no batch.

What an engine says is right when it agrees with this. Norms and rotations are computed in float32, products
and attention in the type that the engine computes in.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.forge.target import Target


class Reference:
    def __init__(self, target: Target, dtype: torch.dtype) -> None:
        shape, device = target.shape, torch.device(target.device)
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.weights = read_weights(target.weight_dir, dtype, device)
        dims = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
        self.frequencies = shape.rope_theta ** (-dims / shape.head_dim)

    @torch.inference_mode()
    def logits(self, tokens: list[int], positions: list[int]) -> Tensor:
        """After the tokens at these positions, [positions, V] float32."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        hidden = self.weights["embed_tokens"][ids]
        for layer in range(self.shape.num_layers):
            hidden = hidden + self._attention(hidden, f"layers.{layer}.")
            hidden = hidden + self._feed_forward(hidden, f"layers.{layer}.")
        wanted = hidden[torch.tensor(positions, device=self.device)]
        return F.linear(self._norm(wanted, "norm"), self.weights["lm_head"]).float()

    def _attention(self, hidden: Tensor, layer: str) -> Tensor:
        x = self._norm(hidden, layer + "input_layernorm")
        query, key, value = (self._heads(x, f"{layer}self_attn.{name}_proj") for name in "qkv")
        query, key = self._rotate(query), self._rotate(key)
        group = self.shape.num_heads // self.shape.num_kv_heads
        key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
        mixed = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
        return F.linear(mixed.transpose(0, 1).flatten(1), self.weights[layer + "self_attn.o_proj"])

    def _feed_forward(self, hidden: Tensor, layer: str) -> Tensor:
        x = self._norm(hidden, layer + "post_attention_layernorm")
        gate = F.silu(F.linear(x, self.weights[layer + "mlp.gate_proj"]))
        up = F.linear(x, self.weights[layer + "mlp.up_proj"])
        return F.linear(gate * up, self.weights[layer + "mlp.down_proj"])

    def _heads(self, x: Tensor, name: str) -> Tensor:  # [heads, T, D]
        return F.linear(x, self.weights[name]).unflatten(1, (-1, self.shape.head_dim)).transpose(0, 1)

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
    return {
        name.removeprefix("model.").removesuffix(".weight"): tensor.to(device).to(dtype)
        for name, tensor in stored.items()
    }
