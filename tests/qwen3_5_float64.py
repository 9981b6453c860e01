"""Qwen3.5 in float64, token by token, from a checkpoint's tensors: the exact result for parity
tests.

Shares no code with the engine. Two float32 implementations differ by rounding; this shows which one
is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class ExactModel:
    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.tensors = {name: values.detach().double() for name, values in tensors.items()}

    def logits(self, token_ids: list[int]) -> Tensor:  # [t, vocab]
        hidden = self.tensors["model.embed_tokens.weight"][token_ids]
        for layer, kind in enumerate(self.config["layer_types"]):
            x = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
            mixer = self._attention if kind == "full_attention" else self._delta_net
            hidden = hidden + mixer(x, f"model.layers.{layer}.")
            x = self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm.weight")
            hidden = hidden + self._feed_forward(x, f"model.layers.{layer}.mlp.")
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        return self._norm(hidden, "model.norm.weight") @ head.T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (
            _unit(x, x.shape[-1] * self.config["rms_norm_eps"])
            * x.shape[-1] ** 0.5
            * (1 + self.tensors[name])
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        config, prefix = self.config, f"{prefix}self_attn."
        width, num_heads = config["head_dim"], config["num_attention_heads"]
        q, gate = self._linear(x, f"{prefix}q_proj").view(len(x), num_heads, 2, width).unbind(2)
        k, v = (self._linear(x, f"{prefix}{name}_proj").view(len(x), -1, width) for name in "kv")
        q = self._rotate(self._norm(q, f"{prefix}q_norm.weight"))
        k = self._rotate(self._norm(k, f"{prefix}k_norm.weight"))
        k, v = (y.repeat_interleave(num_heads // y.shape[1], dim=1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * width**-0.5
        scores = scores + torch.full(scores.shape[1:], -torch.inf, dtype=torch.float64).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self._linear((attended * gate.sigmoid()).flatten(1), f"{prefix}o_proj")

    def _rotate(self, x: Tensor) -> Tensor:  # [t, heads, D]
        rope = self.config["rope_parameters"]
        half = int(x.shape[-1] * rope["partial_rotary_factor"]) // 2
        frequencies = 1 / rope["rope_theta"] ** (torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
        first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    def _delta_net(self, x: Tensor, prefix: str) -> Tensor:
        config, prefix = self.config, f"{prefix}linear_attn."
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        mixed, weight = (
            self._linear(x, f"{prefix}in_proj_qkv").T,
            self.tensors[f"{prefix}conv1d.weight"],
        )
        mixed = F.silu(
            F.conv1d(F.pad(mixed, (weight.shape[-1] - 1, 0)), weight, groups=len(weight))
        ).T
        q, k, v = mixed.split(
            (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim), dim=-1
        )
        q, k = (_unit(y.view(len(x), key_heads, key_dim), 1e-6) for y in (q, k))
        q, k = (
            y.repeat_interleave(value_heads // key_heads, dim=1) for y in (q * key_dim**-0.5, k)
        )
        v, z = (
            y.view(len(x), value_heads, value_dim)
            for y in (v, self._linear(x, f"{prefix}in_proj_z"))
        )
        beta = self._linear(x, f"{prefix}in_proj_b").sigmoid()
        step = F.softplus(self._linear(x, f"{prefix}in_proj_a") + self.tensors[f"{prefix}dt_bias"])
        decay = (-self.tensors[f"{prefix}A_log"].exp() * step).exp()
        read = delta_rule_by_token(q, k, v, decay, beta)[0]
        scale = self.tensors[f"{prefix}norm.weight"] * value_dim**0.5
        out = _unit(read, value_dim * config["rms_norm_eps"]) * scale * F.silu(z)
        return self._linear(out.flatten(1), f"{prefix}out_proj")

    def _feed_forward(self, x: Tensor, prefix: str) -> Tensor:
        if "num_experts" not in self.config:
            return self._swiglu(x, prefix)
        probabilities = self._linear(x, f"{prefix}gate").softmax(-1)
        weights, ids = probabilities.topk(self.config["num_experts_per_tok"])
        weights = weights / weights.sum(-1, keepdim=True)
        gate_up = self.tensors[f"{prefix}experts.gate_up_proj"][ids]  # [t, k, 2I, H]
        gate, up = torch.einsum("th,tkih->tki", x, gate_up).chunk(2, dim=-1)
        down = self.tensors[f"{prefix}experts.down_proj"][ids]
        routed = torch.einsum("tki,tkhi,tk->th", F.silu(gate) * up, down, weights)
        shared = self._swiglu(x, f"{prefix}shared_expert.")
        return routed + self._linear(x, f"{prefix}shared_expert_gate").sigmoid() * shared

    def _swiglu(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = (self._linear(x, f"{prefix}{name}_proj") for name in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"{prefix}down_proj")


def delta_rule_by_token(
    q: Tensor,  # [t, H, K]
    k: Tensor,  # [t, H, K]
    v: Tensor,  # [t, H, V]
    decay: Tensor,  # [t, H]
    beta: Tensor,  # [t, H]
    state: Tensor | None = None,  # [H, K, V]
) -> tuple[Tensor, Tensor]:  # [t, H, V], [H, K, V]
    """The definition: one token after the other."""
    if state is None:
        state = q.new_zeros(*q.shape[1:], v.shape[-1])
    outputs = []
    for t in range(len(q)):
        state = decay[t, :, None, None] * state
        held = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - held))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), state


def _unit(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)
