"""Reads a Qwen3.5 config.json, with types. Refuses what the model would compute wrongly.

Published checkpoints nest the text model under `text_config`; text-only exports are flat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import CheckpointError
from penstock.models.reading import MAX_LAYERS, MAX_SHOWN, read, read_size, unusable

LAYER_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int

    @classmethod
    def from_dict(cls, text: Mapping[str, Any]) -> ExpertsConfig:
        _expect(text, "norm_topk_prob", bool, True)
        _expect(text, "decoder_sparse_step", int, 1)
        _expect(text, "mlp_only_layers", list, [])
        num_experts = read_size(text, "num_experts")
        return cls(
            num_experts=num_experts,
            experts_per_token=read_size(text, "num_experts_per_tok", largest=num_experts),
            expert_size=read_size(text, "moe_intermediate_size"),
            shared_expert_size=read_size(text, "shared_expert_intermediate_size"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3_5Config:
    hidden_size: int
    vocab_size: int
    max_position: int
    eps: float
    is_attention: tuple[bool, ...]  # per layer; the others are DeltaNet
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    intermediate_size: int  # of the dense MLP; 0 if all layers have experts
    experts: ExpertsConfig | None
    is_sparse: tuple[bool, ...]  # per layer; the others have the dense MLP
    is_tied: bool
    has_mtp: bool
    is_nested: bool  # with a vision tower, the text model is under `language_model`

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen3_5Config:
        nested = read(config, "text_config", dict, {})
        text: Mapping[str, Any] = nested or config
        _refuse_other_mathematics(text)
        rope = _read_rope(text)
        head_dim = read_size(text, "head_dim")
        experts = ExpertsConfig.from_dict(text) if _is_moe(config) else None
        is_attention = _read_layers(text)
        result = cls(
            hidden_size=read_size(text, "hidden_size"),
            vocab_size=read_size(text, "vocab_size"),
            max_position=read_size(text, "max_position_embeddings"),
            eps=read(text, "rms_norm_eps", float, 1e-6),
            is_attention=is_attention,
            num_heads=read_size(text, "num_attention_heads"),
            num_kv_heads=read_size(text, "num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=_read_rotary_dim(rope, head_dim),
            rope_theta=read(rope, "rope_theta", float),
            num_key_heads=read_size(text, "linear_num_key_heads"),
            num_value_heads=read_size(text, "linear_num_value_heads"),
            key_dim=read_size(text, "linear_key_head_dim"),
            value_dim=read_size(text, "linear_value_head_dim"),
            conv_kernel=read_size(text, "linear_conv_kernel_dim"),
            intermediate_size=0 if experts else read_size(text, "intermediate_size"),
            experts=experts,
            is_sparse=(experts is not None,) * len(is_attention),
            is_tied=read(
                config, "tie_word_embeddings", bool, read(text, "tie_word_embeddings", bool, False)
            ),
            has_mtp=read(text, "mtp_num_hidden_layers", int, 0) > 0,
            is_nested=bool(nested),
        )
        _check_heads(
            "num_attention_heads", result.num_heads, "num_key_value_heads", result.num_kv_heads
        )
        _check_heads(
            "linear_num_value_heads",
            result.num_value_heads,
            "linear_num_key_heads",
            result.num_key_heads,
        )
        return result

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_size + self.value_size


def _is_moe(config: Mapping[str, Any]) -> bool:
    names = [read(config, "model_type", str, ""), *read(config, "architectures", list, [])]
    return any("moe" in str(name).lower() for name in names)


def _read_layers(text: Mapping[str, Any]) -> tuple[bool, ...]:
    num_layers = read_size(text, "num_hidden_layers", largest=MAX_LAYERS)
    interval = read_size(text, "full_attention_interval", 4)
    usual = [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(num_layers)
    ]
    kinds = read(text, "layer_types", list, usual)
    if len(kinds) != num_layers or any(kind not in LAYER_KINDS for kind in kinds):
        seen = ", ".join(sorted({str(kind)[:MAX_SHOWN] for kind in kinds})[:4])
        raise CheckpointError(
            f"layer_types in the model's config lists {len(kinds)} layers of the kinds {seen}",
            f"It must list num_hidden_layers = {num_layers} of linear_attention and "
            "full_attention.",
            "Check that the config is complete and belongs to this model.",
        )
    return tuple(kind == "full_attention" for kind in kinds)


def _read_rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope settings as one mapping, whether they are nested or at the top level."""
    defaults = {"rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
    beside = {key: text[key] for key in defaults if text.get(key) is not None}
    nested = read(text, "rope_parameters", dict, read(text, "rope_scaling", dict, {}))
    rope = {**defaults, **beside, **nested}
    kind = read(rope, "rope_type", str, read(rope, "type", str, "default"))
    if kind not in ("default", "mrope"):  # for text the three mrope positions are one
        raise _unsupported("rope_type", kind, "default")
    return rope


def _read_rotary_dim(rope: Mapping[str, Any], head_dim: int) -> int:
    """How many elements of a head are rotated, in pairs."""
    factor = read(rope, "partial_rotary_factor", float)
    rotary_dim = int(head_dim * factor) if factor <= 1.0 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        raise unusable("partial_rotary_factor", factor, f"an even share of head_dim {head_dim}")
    return rotary_dim


def _refuse_other_mathematics(text: Mapping[str, Any]) -> None:
    _expect(text, "hidden_act", str, "silu")
    _expect(text, "attention_bias", bool, False)
    _expect(text, "attn_output_gate", bool, True)
    _expect(text, "mtp_use_dedicated_embeddings", bool, False)
    gate = read(text, "output_gate_type", str, "swish")
    if gate not in ("swish", "silu"):
        raise _unsupported("output_gate_type", gate, "swish")


def _expect(text: Mapping[str, Any], key: str, kind: type[Any], only: object) -> None:
    value = read(text, key, kind, only)
    if value != only:
        raise _unsupported(key, value, only)


def _unsupported(key: str, seen: object, expected: object) -> CheckpointError:
    return CheckpointError(
        f"{key} in the model's config is {seen!r}",
        f"Only {expected!r} is supported for this family.",
        "Use a checkpoint of a supported variant.",
    )


def _check_heads(key: str, heads: int, group_key: str, groups: int) -> None:
    if groups < 1 or heads % groups:
        raise CheckpointError(
            f"{key} is {heads} and {group_key} is {groups} in the model's config",
            f"{key} must be a multiple of {group_key}.",
            "Check that the config is complete and belongs to this model.",
        )
