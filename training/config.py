"""The configuration of a run: the model (`ModelConfig`) and its training (`TrainConfig`).

No torch here. `ModelConfig` also writes the published config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The Qwen3.5-MoE text model with one MTP layer and a tied head; defaults are the embedded
    model.
    """

    vocab_size: int = 2560
    hidden_size: int = 256
    num_layers: int = 12
    full_attention_interval: int = 4
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10_000.0
    max_position: int = 8192
    num_key_heads: int = 4  # this and the five below: DeltaNet layers
    num_value_heads: int = 8
    key_head_dim: int = 32
    value_head_dim: int = 32
    conv_kernel: int = 4
    num_experts: int = 16
    num_active_experts: int = 4
    expert_width: int = 64
    shared_expert_width: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        assert self.num_query_heads % self.num_kv_heads == 0
        assert self.num_value_heads % self.num_key_heads == 0
        assert self.rotary_dim % 2 == 0
        assert self.rotary_dim >= 2

    @classmethod
    def of_folder(cls, folder: Path) -> ModelConfig:
        """The embedded model's shape with the vocabulary and depth of an exported model."""
        text = json.loads((folder / "config.json").read_text())["text_config"]
        return cls(vocab_size=text["vocab_size"], num_layers=text["num_hidden_layers"])

    @property
    def layer_types(self) -> tuple[str, ...]:
        interval = self.full_attention_interval
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(self.num_layers))

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_conv_channels(self) -> int:
        return (
            2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim
        )

    def text_config(self) -> dict[str, Any]:
        """The `text_config` of the published layout."""
        return {
            "model_type": "qwen3_5_moe_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "layer_types": list(self.layer_types),
            "full_attention_interval": self.full_attention_interval,
            "num_attention_heads": self.num_query_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "linear_num_key_heads": self.num_key_heads,
            "linear_num_value_heads": self.num_value_heads,
            "linear_key_head_dim": self.key_head_dim,
            "linear_value_head_dim": self.value_head_dim,
            "linear_conv_kernel_dim": self.conv_kernel,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_active_experts,
            "moe_intermediate_size": self.expert_width,
            "shared_expert_intermediate_size": self.shared_expert_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_position,
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "mamba_ssm_dtype": "float32",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
                "mrope_interleaved": True,
                "mrope_section": self.mrope_section,
            },
        }

    @property
    def mrope_section(self) -> list[int]:
        """Frequencies for time, height and width. They make no difference for text, whose three
        positions are equal.
        """
        num_frequencies = self.rotary_dim // 2
        third = num_frequencies // 3
        return [num_frequencies - 2 * third, third, third]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The schedule of a run. Time is the budget: the learning rate depends on the elapsed share."""

    seed: int = 0
    row_lens: tuple[int, ...] = (
        128,
        192,
        256,
        384,
        512,
        768,
        1280,
        2560,
    )  # each with a static shape and a CUDA graph
    tokens_per_batch: int = 65_536
    targets_per_full_step: int = 8_192
    peak_lr: float = 2e-3
    warmup_fraction: float = 0.03
    hold_fraction: float = 0.30  # the peak is held until here, then linear decay to zero
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    ema_decay: float = 0.998
    balance_weight: float = 0.01
    mtp_weight: float = 0.3
    first_token_weight: float = 1.0  # it decides between text and a call, or a sum's leading digit
    delta_chunk: int = 32
    max_reuse: int = 1  # uses of a batch while the generators are too slow

    def rows_of(self, row_len: int) -> int:
        return max(1, self.tokens_per_batch // row_len)

    def learning_rate(self, fraction: float) -> float:
        """Warm-up, plateau, linear decay to zero, by the elapsed share of the budget."""
        if fraction < self.warmup_fraction:
            return self.peak_lr * fraction / self.warmup_fraction
        left = (1.0 - fraction) / (1.0 - self.hold_fraction)
        return self.peak_lr * min(1.0, max(0.0, left))
