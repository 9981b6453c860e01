"""The whole model: trunk, tied head and MTP head, for training (whole rows) and decoding (states).

`state_dict` has exactly the published names, except that the MTP experts are fused like the
trunk's. Losses and batches are in step.py, files in export.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config import FULL, LINEAR, ModelConfig
from training.layers import (
    AttentionState,
    DecoderLayer,
    DeltaState,
    LayerState,
    Linear,
    RmsNorm,
    Rope,
    Window,
)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, token_ids: Tensor) -> Tensor:
        # Its gradient is an index_add, which a CUDA graph can capture; that of F.embedding sorts.
        return self.weight.index_select(0, token_ids.flatten()).unflatten(0, token_ids.shape)


class Trunk(nn.Module):
    def __init__(self, config: ModelConfig, chunk: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, kind, chunk, dtype) for kind in config.layer_types
        )
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)


class MtpHead(nn.Module):
    """Computes the hidden state that predicts t + 2, from that at t and the token at t + 1."""

    def __init__(self, config: ModelConfig, chunk: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RmsNorm(config.hidden_size, config.norm_eps)
        self.pre_fc_norm_hidden = RmsNorm(config.hidden_size, config.norm_eps)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, FULL, chunk, dtype)])
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, hidden: Tensor, next_embedding: Tensor, rope: Rope, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        joined = torch.cat(
            [self.pre_fc_norm_embedding(next_embedding), self.pre_fc_norm_hidden(hidden)], -1
        )
        x = self.fc(joined.to(hidden.dtype)).float()
        x, imbalance = self.layers[0](x, rope, counted)
        return self.norm(x).to(hidden.dtype), imbalance


class Qwen35Moe(nn.Module):
    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, chunk: int = 64
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.model = nn.ModuleDict({"language_model": Trunk(config, chunk, dtype)})
        self.mtp = MtpHead(config, chunk, dtype)
        self.register_buffer(
            "rope_table", _rope_table(config), persistent=False
        )  # [positions, 2, rot / 2]
        self.rope_table: Tensor

    @property
    def trunk(self) -> Trunk:
        trunk = self.model["language_model"]
        assert isinstance(trunk, Trunk)
        return trunk

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return [
            layer
            for layer in (*self.trunk.layers, *self.mtp.layers)
            if isinstance(layer, DecoderLayer)
        ]

    def forward(self, token_ids: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [B, T, H] after the final norm, of rows that start at zero, and the summed
        load imbalance.
        """
        rope = self._rope(torch.arange(token_ids.shape[1], device=token_ids.device))
        x = self.trunk.embed_tokens(token_ids).float()
        imbalance = x.new_zeros(())
        for layer in self.trunk.layers:
            x, one = layer(x, rope, counted)
            imbalance = imbalance + one
        return self.trunk.norm(x).to(self.dtype), imbalance

    def draft(self, hidden: Tensor, token_ids: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the MTP head over whole rows; `hidden` was computed from `token_ids`. The last
        position is invalid.
        """
        rope = self._rope(torch.arange(token_ids.shape[1], device=token_ids.device))
        return self.mtp(hidden, self.trunk.embed_tokens(token_ids.roll(-1, 1)), rope, counted)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.trunk.embed_tokens.weight.to(hidden.dtype))

    def new_states(self, num_rows: int, max_len: int) -> list[LayerState]:
        """Empty states for `num_rows` rows of up to `max_len` tokens each."""
        config, device = self.config, self.rope_table.device
        states: list[LayerState] = []
        for kind in config.layer_types:
            if kind == LINEAR:
                conv = (num_rows, config.conv_kernel - 1, config.num_conv_channels)
                recurrent = (
                    num_rows,
                    config.num_value_heads,
                    config.key_head_dim,
                    config.value_head_dim,
                )
                states.append(
                    DeltaState(
                        torch.zeros(conv, dtype=self.dtype, device=device),
                        torch.zeros(recurrent, device=device),
                    )
                )
            else:
                cached = (2, num_rows, max_len, config.num_kv_heads, config.head_dim)
                keys, values = torch.zeros(cached, dtype=self.dtype, device=device)
                states.append(AttentionState(keys, values))
        return states

    def advance(self, token_ids: Tensor, window: Window, states: list[LayerState]) -> Tensor:
        """Hidden states [B, T, H] of the window after the final norm; updates `states`."""
        rope = self._rope(window.positions)
        counted = torch.ones_like(token_ids, dtype=torch.float32)
        x = self.trunk.embed_tokens(token_ids).float()
        for layer, state in zip(self.trunk.layers, states, strict=True):
            x, _ = layer(x, rope, counted, window, state)
        return self.trunk.norm(x).to(self.dtype)

    def _rope(self, positions: Tensor) -> Rope:
        cos, sin = self.rope_table[positions].unsqueeze(-3).unbind(-2)
        return Rope(cos, sin)


def _rope_table(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    angles = torch.arange(config.max_position).float()[:, None] * (
        1.0 / config.rope_theta**exponents
    )
    return torch.stack([angles.cos(), angles.sin()], 1)


def init_weights(model: Qwen35Moe, seed: int) -> None:
    """Draws every parameter from `seed`, on the CPU, so that all machines get the same."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_initial_value(name, parameter.shape, generator))


def _initial_value(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
    if leaf == "dt_bias":
        # softplus(dt_bias) is log-uniform in 0.001 .. 0.1, per head: heads remember from one token
        # to a thousand.
        low, high = math.log(0.001), math.log(0.1)
        step = torch.empty(shape).uniform_(low, high, generator=generator).exp()
        return step + (-torch.expm1(-step)).log()
    if "conv1d" in name:
        bound = shape[-1] ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if len(shape) == 1:
        return torch.ones(shape) if "linear_attn.norm" in name else torch.zeros(shape)
    return torch.empty(shape).normal_(0.0, 0.02, generator=generator)


def count_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        model = Qwen35Moe(config)
    return sum(parameter.numel() for parameter in model.parameters())
