"""Llama, and families that differ from it only in sizes and flags: Mistral, Qwen2, Qwen3, plain
state dicts.

`LlamaConfig` reads a config.json and refuses what this file would compute wrongly; `Llama` is the
model, and its placements say where each checkpoint tensor goes. It knows no files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.layers.attention import Attention
from penstock.layers.inputs import KVCache, LayerCache, StepInputs
from penstock.layers.linear import Linear
from penstock.layers.mlp import DenseMLP, SparseMLP
from penstock.layers.parameter import parameter
from penstock.layers.rope import Rope, inverse_frequencies
from penstock.layers.vocabulary import Vocabulary
from penstock.models import model_type_of
from penstock.models.placement import Placement
from penstock.models.reading import (
    MAX_LAYERS,
    MAX_NUMBER,
    read,
    read_num_experts,
    read_size,
    read_sparse_layers,
    unusable,
)
from penstock.ops import rms_norm
from penstock.parallel.ranks import ALONE, Ranks
from penstock.types import CacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Defaults of a model_type, for keys missing from config.json."""

    qkv_bias: bool = False
    qk_norm: bool = False
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    window: int | None = None  # sliding_window when the key is absent
    window_flag: bool = False  # sliding_window applies only with use_sliding_window
    is_plain: bool = False  # interleaved rope, tensor names without "model."


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(num_kv_heads=8, window=4096),
    "qwen2": Family(qkv_bias=True, num_kv_heads=32, window=4096, window_flag=True),
    "qwen3": Family(qk_norm=True, num_kv_heads=32, head_dim=128, window=4096, window_flag=True),
    "qwen3_moe": Family(qk_norm=True, num_kv_heads=4, window=4096, window_flag=True),
    "tiny_llama": Family(is_plain=True),
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rope scaling beyond the trained length: none, linear, or as in Llama 3.1."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_len: int = 8192

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], max_position: int) -> RopeScaling:
        settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(settings, dict):
            raise _unsupported("rope_scaling", settings)
        theta = read(settings, "rope_theta", float, read(config, "rope_theta", float, 10_000.0))
        kind = read(settings, "rope_type", str, read(settings, "type", str, "default"))
        if any(isinstance(value, dict) for value in settings.values()):
            raise _unsupported("rope_parameters", "one rope per layer type")
        for level in (settings, config):
            if read(level, "partial_rotary_factor", float, 1.0) != 1.0:
                raise _unsupported("partial_rotary_factor", level["partial_rotary_factor"])
        if kind == "default":
            return cls(theta)
        if kind == "linear":
            return cls(theta, kind, read(settings, "factor", float))
        if kind == "llama3":
            return cls(
                theta,
                kind,
                read(settings, "factor", float),
                read(settings, "low_freq_factor", float),
                read(settings, "high_freq_factor", float),
                read(settings, "original_max_position_embeddings", int, max_position),
            )
        raise _unsupported("rope_type", kind)

    def inverse_frequencies(self, head_dim: int) -> Tensor:  # [D/2] float32
        inv_freq = inverse_frequencies(self.theta, head_dim)
        if self.kind == "linear":
            return inv_freq / self.factor
        if self.kind == "llama3":
            # Short wavelengths stay, long ones are stretched, those between are blended.
            low, high = self.low_freq_factor, self.high_freq_factor
            num_waves = self.original_len / (2 * torch.pi / inv_freq)
            keep = ((num_waves - low) / (high - low)).clamp(0.0, 1.0)
            return (1.0 - keep) * inv_freq / self.factor + keep * inv_freq
        return inv_freq


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    eps: float
    rope: RopeScaling
    windows: tuple[int, ...]  # per layer: tokens a query sees, including itself; 0: all
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    is_tied: bool
    is_plain: bool
    sparse_layers: frozenset[int]
    num_experts: int
    experts_per_token: int
    expert_size: int
    normalize_experts: bool
    num_labels: int = 0  # of a classifier that replaces the head; 0: none

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> LlamaConfig:
        model_type = model_type_of(config)
        family = FAMILIES[model_type]
        if read(config, "hidden_act", str, "silu") != "silu":
            raise _unsupported("hidden_act", config["hidden_act"])
        if read(config, "mlp_bias", bool, False):
            raise _unsupported("mlp_bias", True)
        if not read(
            config, "is_causal", bool, True
        ):  # embedding models with bidirectional attention
            raise _unsupported("is_causal", False)
        if read(config, "use_bidirectional_attention", bool, False):
            raise _unsupported("use_bidirectional_attention", True)
        num_layers = read_size(config, "num_hidden_layers", largest=MAX_LAYERS)
        num_heads = read_size(config, "num_attention_heads")
        hidden_size = read_size(config, "hidden_size")
        max_position = read_size(config, "max_position_embeddings")
        attention_bias = read(config, "attention_bias", bool, False)
        sparse = (
            read_sparse_layers(config, num_layers) if model_type == "qwen3_moe" else frozenset()
        )
        num_experts = read_num_experts(config) if sparse else 0
        num_kv_heads = read_size(config, "num_key_value_heads", family.num_kv_heads or num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"The model has {num_heads} attention heads and {num_kv_heads} key-value heads",
                "The first must be a multiple of the second.",
                "Check that the config is complete and belongs to this model.",
            )
        head_dim = read_size(config, "head_dim", family.head_dim or hidden_size // num_heads)
        if head_dim % 2:
            raise unusable("head_dim", head_dim, "even: rotary embeddings rotate pairs of elements")
        return cls(
            hidden_size=hidden_size,
            intermediate_size=read_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=read_size(config, "vocab_size"),
            max_position=max_position,
            eps=read(config, "rms_norm_eps", float, 1e-6),
            rope=RopeScaling.from_dict(config, max_position),
            windows=_windows(config, model_type, family, num_layers),
            qkv_bias=family.qkv_bias or attention_bias,
            out_bias=attention_bias,
            qk_norm=family.qk_norm,
            is_tied=read(config, "tie_word_embeddings", bool, False),
            is_plain=family.is_plain,
            sparse_layers=sparse,
            num_experts=num_experts,
            experts_per_token=read_size(config, "num_experts_per_tok", largest=num_experts)
            if sparse
            else 0,
            expert_size=read_size(config, "moe_intermediate_size") if sparse else 0,
            normalize_experts=read(config, "norm_topk_prob", bool, False),
            num_labels=_num_labels(config),
        )


def _windows(
    config: Mapping[str, Any], model_type: str, family: Family, num_layers: int
) -> tuple[int, ...]:
    """Per layer. A null sliding_window means none; an absent one, the default of the family."""
    window = config.get("sliding_window", family.window)
    if family.window_flag and not read(config, "use_sliding_window", bool, False):
        window = None
    if family.window is None or window is None:
        return (0,) * num_layers
    if type(window) is not int or not 1 <= window <= MAX_NUMBER:
        raise _unsupported("sliding_window", window)
    if model_type not in ("qwen2", "qwen3"):
        return (window,) * num_layers
    layer_types = read(config, "layer_types", list, None)
    if layer_types is None:
        first = read(config, "max_window_layers", int, 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    known = {"sliding_attention": window, "full_attention": 0}
    for layer_type in layer_types:
        if not isinstance(layer_type, str) or layer_type not in known:
            raise _unsupported("layer_types", layer_type)
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"The model's config has {num_layers} layers and {len(layer_types)} layer_types",
            "There must be one for each layer.",
            "Check that the config is complete and belongs to this model.",
        )
    return tuple(known[layer_type] for layer_type in layer_types)


def _num_labels(config: Mapping[str, Any]) -> int:
    """transformers writes label names instead of num_labels, and none for two labels."""
    names = read(config, "architectures", list, None) or []
    if not any(
        isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names
    ):
        return 0
    labels = read(config, "id2label", dict, None) or {}
    return read_size(config, "num_labels", len(labels) or 2)


def _unsupported(key: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"The model's config has {key} {value!r}",
        "Penstock does not support it and would compute wrong results.",
        "Use a model without it.",
    )


class LlamaLayer(nn.Module):
    def __init__(
        self,
        config: LlamaConfig,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.attention = Attention(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.eps,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm=config.qk_norm,
            gated=False,
            interleaved_rope=config.is_plain,
            window=config.windows[index],
            ranks=ranks,
            dtype=dtype,
            device=device,
        )
        self.mlp: DenseMLP | SparseMLP
        if index in config.sparse_layers:
            self.mlp = SparseMLP(
                hidden_size=config.hidden_size,
                num_experts=config.num_experts,
                experts_per_token=config.experts_per_token,
                expert_size=config.expert_size,
                shared_expert_size=0,
                normalize=config.normalize_experts,
                eps=config.eps,
                ranks=ranks,
                dtype=dtype,
                device=device,
            )
        else:
            self.mlp = DenseMLP(
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                eps=config.eps,
                ranks=ranks,
                dtype=dtype,
                device=device,
            )

    def forward(
        self,
        hidden: Tensor,
        inputs: StepInputs,
        cache: KVCache,
        rope: Tensor,
        only_last: bool = False,
    ) -> Tensor:  # [T, H], or [R, H]: each row's last token
        chosen = inputs.choose_last() if only_last else None
        return self.mlp(self.attention(hidden, inputs, cache, rope, chosen), inputs)


class Llama(nn.Module):
    # Rotary tables that some exports store; Penstock computes them.
    ignored: ClassVar[tuple[str, ...]] = (
        r"(.*\.)?(rotary_emb|rope)\..*",
        r"(.*\.)?(inv_freq|(freqs|rope)_(cis|cos|sin)|(cos|sin)_cached)",
    )

    def __init__(
        self,
        config: LlamaConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.config = config
        self.ranks = ranks
        self.vocabulary = Vocabulary(config.vocab_size, ranks)
        self.dtype = dtype
        self.device = device
        self.vocab_size = config.vocab_size
        self.max_position = config.max_position
        self.embedding = self.vocabulary.new_weight(config.hidden_size, dtype, device)
        layers = [
            LlamaLayer(config, index, dtype, device, ranks) for index in range(config.num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self._cache_specs: list[CacheSpec] = [layer.attention.cache_spec for layer in layers]
        self.has_head = not config.num_labels
        self.num_labels = config.num_labels
        self.head = Linear(
            config.hidden_size,
            config.vocab_size,
            weight=self.embedding if config.is_tied or not self.has_head else None,
            eps=config.eps,
            outputs=(self.vocabulary.own,),
            ranks=ranks,
            dtype=dtype,
            device=device,
        )
        self.classifier: nn.Parameter | None = None
        if config.num_labels:
            self.classifier = parameter(
                config.num_labels, config.hidden_size, dtype=dtype, device=device
            )
        self.rope = Rope(
            config.rope.inverse_frequencies(config.head_dim), config.max_position, device
        )

    def forward(
        self, inputs: StepInputs, caches: Sequence[LayerCache | None], only_last: bool = False
    ) -> Tensor:  # [T, H], or [R, H]
        """The residual stream after the last layer, before the final norm."""
        hidden = self.vocabulary.embed(self.embedding, inputs.token_ids)
        rope = self.rope.table
        for layer, cache in zip(self.layers, caches, strict=True):
            if cache is not None:
                hidden = layer(hidden, inputs, cache, rope, only_last and layer is self.layers[-1])
        return hidden

    def logits(
        self, hidden: Tensor, *, deterministic: bool = False
    ) -> Tensor:  # [L, vocab] float32
        """A model without a head uses its embedding, so that every step has the same structure."""
        own = self.head(hidden, out_dtype=torch.float32, deterministic=deterministic)
        return self.vocabulary.join(own)

    def likeliest(self, hidden: Tensor, *, deterministic: bool = False) -> Tensor:  # [L] int64
        """The argmax of `logits`, without gathering them on any rank."""
        own = self.head(hidden, out_dtype=torch.float32, deterministic=deterministic)
        return self.vocabulary.likeliest(own)

    def label_logits(self, hidden: Tensor) -> Tensor:  # [L, labels] float32
        assert self.classifier is not None
        return F.linear(self.final_norm(hidden).float(), self.classifier.float())

    def final_norm(self, hidden: Tensor) -> Tensor:  # [L, H] -> [L, H]
        assert self.head.norm is not None
        return rms_norm(hidden, self.head.norm, self.config.eps)

    def cache_specs(self) -> list[CacheSpec]:
        return list(self._cache_specs)

    def placements(self, names: Collection[str] = ()) -> dict[str, Placement]:
        """Checkpoint tensor name -> its placement. `names`, the tensors present, distinguishes
        exports.
        """
        config = self.config
        present = frozenset(names)
        prefix = "" if config.is_plain else "model."
        if (
            prefix and "embed_tokens.weight" in present
        ):  # embedding models are stored without the head
            prefix, self.has_head, self.head.weight = "", False, self.embedding
        vocabulary = (config.vocab_size, config.hidden_size)
        table = {
            f"{prefix}embed_tokens.weight": Placement("embedding", vocabulary),
            f"{prefix}norm.weight": Placement("head.norm", (config.hidden_size,)),
        }
        if self.classifier is not None:
            table["score.weight"] = Placement("classifier", (config.num_labels, config.hidden_size))
        if self.head.weight is not self.embedding:
            table["lm_head.weight"] = Placement("head.weight", vocabulary)
        elif "lm_head.weight" in present:
            table["lm_head.weight"] = Placement("embedding", vocabulary)
        for i in range(config.num_layers):
            stored, ours = f"{prefix}layers.{i}.", f"layers.{i}."
            table |= {stored + name: place for name, place in _attention_places(config, ours)}
            if i not in config.sparse_layers:
                table |= {stored + name: place for name, place in _dense_places(config, ours)}
            elif f"{stored}mlp.experts.gate_up_proj" in present:
                table |= {
                    stored + name: place for name, place in _fused_expert_places(config, ours)
                }
            else:
                table |= {stored + name: place for name, place in _expert_places(config, ours)}
        return (
            {_spelling(name, present): place for name, place in table.items()}
            if config.is_plain
            else table
        )


Places = Iterator[tuple[str, Placement]]


def _spelling(name: str, present: frozenset[str]) -> str:
    """Removes the prefixes that plain state dicts put before a name."""
    bare = name.removesuffix(".weight")
    return next((s for s in (name, bare, f"model.{name}", f"model.{bare}") if s in present), name)


def _attention_places(config: LlamaConfig, ours: str) -> Places:
    hidden, width = config.hidden_size, config.head_dim
    yield "input_layernorm.weight", Placement(f"{ours}attention.qkv.norm", (hidden,))
    start = 0
    for name, num_heads in (
        ("q", config.num_heads),
        ("k", config.num_kv_heads),
        ("v", config.num_kv_heads),
    ):
        size = num_heads * width
        rows = (slice(start, start + size),)
        yield (
            f"self_attn.{name}_proj.weight",
            Placement(f"{ours}attention.qkv.weight", (size, hidden), rows),
        )
        if config.qkv_bias:
            yield (
                f"self_attn.{name}_proj.bias",
                Placement(f"{ours}attention.qkv.bias", (size,), rows),
            )
        start += size
    yield (
        "self_attn.o_proj.weight",
        Placement(f"{ours}attention.out.weight", (hidden, config.num_heads * width)),
    )
    if config.out_bias:
        yield "self_attn.o_proj.bias", Placement(f"{ours}attention.out.bias", (hidden,))
    if config.qk_norm:
        yield "self_attn.q_norm.weight", Placement(f"{ours}attention.q_norm", (width,))
        yield "self_attn.k_norm.weight", Placement(f"{ours}attention.k_norm", (width,))


def _dense_places(config: LlamaConfig, ours: str) -> Places:
    hidden, width = config.hidden_size, config.intermediate_size
    gate, up = (slice(0, width),), (slice(width, 2 * width),)
    yield "post_attention_layernorm.weight", Placement(f"{ours}mlp.gate_up.norm", (hidden,))
    yield "mlp.gate_proj.weight", Placement(f"{ours}mlp.gate_up.weight", (width, hidden), gate)
    yield "mlp.up_proj.weight", Placement(f"{ours}mlp.gate_up.weight", (width, hidden), up)
    yield "mlp.down_proj.weight", Placement(f"{ours}mlp.down.weight", (hidden, width))


def _expert_places(config: LlamaConfig, ours: str) -> Places:
    hidden, width = config.hidden_size, config.expert_size
    yield "post_attention_layernorm.weight", Placement(f"{ours}mlp.norm", (hidden,))
    yield "mlp.gate.weight", Placement(f"{ours}mlp.router", (config.num_experts, hidden))
    for e in range(config.num_experts):
        stored = f"mlp.experts.{e}."
        gate, up = (e, slice(0, width)), (e, slice(width, 2 * width))
        yield f"{stored}gate_proj.weight", Placement(f"{ours}mlp.gate_up", (width, hidden), gate)
        yield f"{stored}up_proj.weight", Placement(f"{ours}mlp.gate_up", (width, hidden), up)
        yield f"{stored}down_proj.weight", Placement(f"{ours}mlp.down", (hidden, width), (e,))


def _fused_expert_places(config: LlamaConfig, ours: str) -> Places:
    num_experts, hidden, width = config.num_experts, config.hidden_size, config.expert_size
    yield "post_attention_layernorm.weight", Placement(f"{ours}mlp.norm", (hidden,))
    yield "mlp.gate.weight", Placement(f"{ours}mlp.router", (num_experts, hidden))
    yield (
        "mlp.experts.gate_up_proj",
        Placement(f"{ours}mlp.gate_up", (num_experts, 2 * width, hidden)),
    )
    yield "mlp.experts.down_proj", Placement(f"{ours}mlp.down", (num_experts, hidden, width))


def build(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    with_drafting_head: bool,
    ranks: Ranks = ALONE,
) -> Llama:
    """No release of these families has a drafting head."""
    return Llama(LlamaConfig.from_dict(config), dtype, device, ranks)
