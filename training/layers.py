"""The layers of Qwen3.5-MoE as differentiable modules, with the parameter names of the checkpoint.

Parameters are fp32 master weights. GEMMs run in `dtype` (bf16 in training, fp32 in tests); norms,
gates, router softmax, the delta rule and the residual stream are fp32. With a window and a state,
the mixers continue rows token by token instead of starting them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config import LINEAR, ModelConfig
from training.delta_rule import gated_delta_rule, unit_norm


@dataclass(frozen=True, slots=True)
class Rope:
    cos: Tensor  # [T, 1, rot / 2] or [B, T, 1, rot / 2] fp32
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens of one incremental call: each row has `lengths` valid ones, the rest of [B, T] is
    padding.
    """

    positions: Tensor  # [B, T]
    lengths: Tensor  # [B]


@dataclass(slots=True)
class AttentionState:
    keys: Tensor  # [B, S, Hkv, D]
    values: Tensor  # [B, S, Hkv, D]


@dataclass(slots=True)
class DeltaState:
    conv: Tensor  # [B, kernel - 1, C]
    recurrent: Tensor  # [B, Hv, K, V] fp32


LayerState = AttentionState | DeltaState


class Linear(nn.Module):
    """y = x W^T in the dtype of x."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RmsNorm(nn.Module):
    """Multiplies by 1 + w: stored weights are centred on zero. Returns fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight, self.eps)


class GatedRmsNorm(nn.Module):
    """Norm, times weight, times silu(gate). Returns fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps) * F.silu(
            gate.float()
        )


class CausalConv(nn.Module):
    def __init__(self, num_channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, kernel))

    def forward(self, padded: Tensor) -> Tensor:  # [B, kernel - 1 + T, C] -> [B, T, C]
        # A sum of shifted products: cuDNN's depthwise convolution needs another layout and is not
        # faster.
        weight = self.weight.to(padded.dtype)
        kernel = weight.shape[-1]
        length = padded.shape[1] - kernel + 1
        out = padded[:, :length] * weight[:, 0, 0]
        for j in range(1, kernel):
            out = out + padded[:, j : j + length] * weight[:, 0, j]
        return F.silu(out)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: ModelConfig, chunk: int) -> None:
        super().__init__()
        self.config = config
        self.chunk = chunk
        hidden, heads = config.hidden_size, config.num_value_heads
        value_width = heads * config.value_head_dim
        self.in_proj_qkv = Linear(hidden, config.num_conv_channels)
        self.in_proj_z = Linear(hidden, value_width)
        self.in_proj_b = Linear(hidden, heads)
        self.in_proj_a = Linear(hidden, heads)
        self.conv1d = CausalConv(config.num_conv_channels, config.conv_kernel)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = GatedRmsNorm(config.value_head_dim, config.norm_eps)
        self.out_proj = Linear(value_width, hidden)

    def forward(
        self, x: Tensor, rope: Rope, window: Window | None = None, state: DeltaState | None = None
    ) -> Tensor:
        config = self.config
        mixed = self.in_proj_qkv(x)
        if state is None:
            padded = F.pad(mixed, (0, 0, config.conv_kernel - 1, 0))
        else:
            padded = torch.cat([state.conv, mixed], 1)
        key_width = config.num_key_heads * config.key_head_dim
        q, k, v = self.conv1d(padded).split(
            [key_width, key_width, mixed.shape[-1] - 2 * key_width], -1
        )
        q = unit_norm(q.unflatten(-1, (config.num_key_heads, -1)), config.key_head_dim**-0.5)
        k = unit_norm(k.unflatten(-1, (config.num_key_heads, -1)), 1.0)
        v = v.unflatten(-1, (config.num_value_heads, -1)).float()
        beta = self.in_proj_b(x).float().sigmoid()
        log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        if state is None or window is None:
            out, _ = gated_delta_rule(q, k, v, log_decay, beta, chunk=self.chunk)
        else:
            real = torch.arange(x.shape[1], device=x.device) < window.lengths[:, None]
            log_decay, beta = log_decay * real[..., None], beta * real[..., None]
            out, state.recurrent = gated_delta_rule(
                q, k, v, log_decay, beta, state.recurrent, self.chunk
            )
            kept = window.lengths[:, None] + torch.arange(config.conv_kernel - 1, device=x.device)
            state.conv = padded[torch.arange(len(x), device=x.device)[:, None], kept]
        gate = self.in_proj_z(x).unflatten(-1, (config.num_value_heads, -1))
        return self.out_proj(self.norm(out.to(x.dtype), gate).flatten(-2).to(x.dtype))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.head_dim
        self.q_proj = Linear(
            hidden, config.num_query_heads * 2 * width
        )  # per head: query rows, gate rows
        self.k_proj = Linear(hidden, config.num_kv_heads * width)
        self.v_proj = Linear(hidden, config.num_kv_heads * width)
        self.o_proj = Linear(config.num_query_heads * width, hidden)
        self.q_norm = RmsNorm(width, config.norm_eps)
        self.k_norm = RmsNorm(width, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        window: Window | None = None,
        state: AttentionState | None = None,
    ) -> Tensor:
        config = self.config
        q, gate = (
            self.q_proj(x).unflatten(-1, (config.num_query_heads, 2, config.head_dim)).unbind(-2)
        )
        k = self.k_proj(x).unflatten(-1, (config.num_kv_heads, -1))
        v = self.v_proj(x).unflatten(-1, (config.num_kv_heads, -1))
        q = rotate(self.q_norm(q), rope).to(x.dtype)
        k = rotate(self.k_norm(k), rope).to(x.dtype)
        if state is None or window is None:
            out = attend(q, k, v, None)
        else:
            rows = torch.arange(len(x), device=x.device)[:, None]
            state.keys[rows, window.positions] = k
            state.values[rows, window.positions] = v
            slots = torch.arange(state.keys.shape[1], device=x.device)
            out = attend(q, state.keys, state.values, slots <= window.positions[..., None])
        return self.o_proj((out * gate.sigmoid()).flatten(-2))


def rotate(x: Tensor, rope: Rope) -> Tensor:  # [B, T, H, D]
    half = rope.cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat(
        [first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin, rest], -1
    )


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Attention of [B, T, Hq, D] to [B, S, Hkv, D]. `visible` is a mask [B, T, S]; None: causal
    rows that start at zero.
    """
    # Repeats the heads, because not every SDPA kernel supports grouped-query attention.
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, 2).transpose(1, 2) for x in (k, v))
    mask = None if visible is None else visible[:, None]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None
    )
    return out.transpose(1, 2)


class Experts(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num, width, hidden = config.num_experts, config.expert_width, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num, hidden, width))

    def forward(
        self, x: Tensor, weights: Tensor
    ) -> Tensor:  # [.., H], [.., E]; zero where not routed
        """Computes all experts as one wide SwiGLU, with routing weight zero for those not chosen.

        This is four times the arithmetic of the sparse form, but only two large GEMMs of static
        shape, which at this size is faster than any gather. The second GEMM's K dimension sums over
        experts.
        """
        num, hidden, width = self.down_proj.shape
        gate_up = F.linear(x, self.gate_up_proj.to(x.dtype).flatten(0, 1)).unflatten(
            -1, (num, 2, width)
        )
        active = F.silu(gate_up[..., 0, :]) * gate_up[..., 1, :] * weights[..., None].to(x.dtype)
        down = self.down_proj.to(x.dtype).permute(1, 0, 2).reshape(hidden, num * width)
        return F.linear(active.flatten(-2), down)


class SharedExpert(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.shared_expert_width)
        self.up_proj = Linear(config.hidden_size, config.shared_expert_width)
        self.down_proj = Linear(config.shared_expert_width, config.hidden_size)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x) * weight)


class SparseMlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_active = config.num_active_experts
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.experts = Experts(config)
        self.shared_expert = SharedExpert(config)
        self.shared_expert_gate = Linear(config.hidden_size, 1)

    def forward(self, x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the load imbalance of the counted tokens (1 or 0, [B, T])."""
        probabilities = self.gate(x.float()).softmax(-1)
        chosen = is_among_largest(probabilities.detach(), self.num_active)
        weights = probabilities * chosen
        weights = weights / weights.sum(-1, keepdim=True)
        shared_weight = self.shared_expert_gate(x).float().sigmoid().to(x.dtype)
        out = self.experts(x, weights) + self.shared_expert(x, shared_weight)
        return out, load_imbalance(probabilities, chosen, counted)


def is_among_largest(x: Tensor, k: int) -> Tensor:
    """True for exactly k entries of the last dimension, [.., E]; ties go to the first.

    Compares all pairs: for a few experts that is one small table, whereas topk launches a block per
    row.
    """
    place = torch.arange(x.shape[-1], device=x.device)
    mine, other = x[..., :, None], x[..., None, :]
    beaten = (other > mine) | ((other == mine) & (place[None, :] < place[:, None]))
    return beaten.sum(-1) < k


def load_imbalance(probabilities: Tensor, chosen: Tensor, counted: Tensor) -> Tensor:
    """E * sum over experts of (share of tokens routed there) * (mean probability); k if perfectly
    balanced.
    """
    share = counted[..., None] / counted.sum().clamp(min=1.0)
    tokens = (chosen * share).flatten(0, -2).sum(0)
    mean = (probabilities * share).flatten(0, -2).sum(0)
    return probabilities.shape[-1] * (tokens * mean).sum()


class DecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, layer_type: str, chunk: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.is_linear = layer_type == LINEAR
        self.dtype = dtype
        self.input_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config, chunk)
        else:
            self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.mlp = SparseMlp(config)

    def forward(
        self,
        x: Tensor,  # [B, T, H] fp32
        rope: Rope,
        counted: Tensor,  # [B, T]
        window: Window | None = None,
        state: LayerState | None = None,
    ) -> tuple[Tensor, Tensor]:
        mixer = self.linear_attn if self.is_linear else self.self_attn
        x = x + mixer(self.input_layernorm(x).to(self.dtype), rope, window, state)
        out, imbalance = self.mlp(self.post_attention_layernorm(x).to(self.dtype), counted)
        return x + out, imbalance
