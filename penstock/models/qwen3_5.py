"""Qwen3.5 (and 3.6, 3.8) text models, dense and MoE: three DeltaNet layers, then one attention
layer.

This file holds the modules; `qwen3_5_config` reads config.json, `qwen3_5_placements` maps
checkpoint tensors, `qwen3_5_mtp` is the drafting head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.layers.attention import Attention
from penstock.layers.delta_net import DeltaNet
from penstock.layers.inputs import ChosenTokens, KVCache, LayerCache, StateCache, StepInputs
from penstock.layers.linear import Linear
from penstock.layers.mlp import DenseMLP, SparseMLP
from penstock.layers.rope import Rope, inverse_frequencies
from penstock.layers.vocabulary import Vocabulary
from penstock.models.placement import Placement
from penstock.models.qwen3_5_config import Qwen3_5Config
from penstock.models.qwen3_5_mtp import MTP
from penstock.models.qwen3_5_placements import IGNORED, FindPlacements, find_placements, stores_mtp
from penstock.ops import linear, rms_norm
from penstock.parallel.ranks import ALONE, Ranks
from penstock.types import CacheSpec


def build(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device | str,
    with_drafting_head: bool,
    ranks: Ranks = ALONE,
) -> Qwen3_5:
    read = Qwen3_5Config.from_dict(config)
    read = dataclasses.replace(read, has_mtp=read.has_mtp and with_drafting_head)
    return Qwen3_5(read, dtype, device, ranks=ranks)


class Layer(nn.Module):
    """One mixer, DeltaNet or attention, and one MLP."""

    def __init__(
        self,
        config: Qwen3_5Config,
        index: int,
        dtype: torch.dtype,
        device: torch.device | str,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.mixer: Attention | DeltaNet
        if config.is_attention[index]:
            self.mixer = make_attention(config, dtype, device, ranks)
        else:
            self.mixer = make_delta_net(config, dtype, device, ranks)
        self.mlp = make_mlp(config, config.is_sparse[index], dtype, device, ranks)

    def forward(
        self,
        hidden: Tensor,
        inputs: StepInputs,
        cache: LayerCache,
        rope: Tensor,
        only_last: bool = False,
    ) -> Tensor:  # [T, H], or [R, H]: each row's last token
        mixer = self.mixer
        if isinstance(mixer, DeltaNet):
            assert isinstance(cache, StateCache)
            hidden = mixer(hidden, inputs, cache)
            hidden = hidden[inputs.last_tokens] if only_last else hidden
        else:
            assert isinstance(cache, KVCache)
            chosen = inputs.choose_last() if only_last else None
            hidden = mixer(hidden, inputs, cache, rope, chosen)
        return self.mlp(hidden, inputs)


class Qwen3_5(nn.Module):
    ignored = IGNORED
    has_head = True
    num_labels = 0

    def __init__(
        self,
        config: Qwen3_5Config,
        dtype: torch.dtype,
        device: torch.device | str,
        find_placements: FindPlacements = find_placements,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.config = config
        self.ranks = ranks
        self.vocabulary = Vocabulary(config.vocab_size, ranks)
        self._find_placements = find_placements
        self.dtype = dtype
        self.device = torch.device(device)
        self.vocab_size = config.vocab_size
        self.max_position = config.max_position
        self.embedding = self.vocabulary.new_weight(config.hidden_size, dtype, device)
        num_layers = len(config.is_attention)
        layers = [Layer(config, index, dtype, device, ranks) for index in range(num_layers)]
        self.layers = nn.ModuleList(layers)
        self._cache_specs: list[CacheSpec] = [layer.mixer.cache_spec for layer in layers]
        self.head = Linear(
            config.hidden_size,
            config.vocab_size,
            weight=self.embedding if config.is_tied else None,
            eps=config.eps,
            outputs=(self.vocabulary.own,),
            ranks=ranks,
            dtype=dtype,
            device=device,
        )
        self.rope = Rope(
            inverse_frequencies(config.rope_theta, config.rotary_dim), config.max_position, device
        )
        self.mtp = make_mtp(config, dtype, device, ranks) if config.has_mtp else None

    def forward(
        self, inputs: StepInputs, caches: Sequence[LayerCache | None], only_last: bool = False
    ) -> Tensor:  # [T, H], or [R, H]
        hidden = self.vocabulary.embed(self.embedding, inputs.token_ids)
        rope = self.rope.table
        for layer, cache in zip(self.layers, caches, strict=True):
            if cache is not None:
                hidden = layer(hidden, inputs, cache, rope, only_last and layer is self.layers[-1])
        return hidden

    def logits(
        self, hidden: Tensor, *, deterministic: bool = False
    ) -> Tensor:  # [L, vocab] float32
        own = self.head(hidden, out_dtype=torch.float32, deterministic=deterministic)
        return self.vocabulary.join(own)

    def likeliest(self, hidden: Tensor, *, deterministic: bool = False) -> Tensor:  # [L] int64
        """The argmax of `logits`, without gathering them on any rank."""
        own = self.head(hidden, out_dtype=torch.float32, deterministic=deterministic)
        return self.vocabulary.likeliest(own)

    def draft(
        self,
        inputs: StepInputs,
        next_token_ids: Tensor,  # [T]
        # [T, H] `final_norm` of what forward returned, or the last result of draft
        hidden: Tensor,
        cache: KVCache,
        chosen: ChosenTokens | None = None,  # None: all
    ) -> Tensor:  # [T, H], or [R, H]  for `draft_logits`, and for the next draft
        assert self.mtp is not None
        embedded = self.vocabulary.embed(self.embedding, next_token_ids)
        return self.mtp(inputs, embedded, hidden, cache, self.rope.table, chosen)

    def final_norm(self, hidden: Tensor) -> Tensor:  # [T, H] -> [T, H]
        assert self.head.norm is not None
        return rms_norm(hidden, self.head.norm, self.config.eps)

    def draft_logits(
        self, hidden: Tensor, *, deterministic: bool = False
    ) -> Tensor:  # [L, vocab] float32
        own = linear(hidden, self.head.weight, deterministic=deterministic).float()
        return self.vocabulary.join(own)

    def likeliest_draft(
        self, hidden: Tensor, *, deterministic: bool = False
    ) -> Tensor:  # [L] int64
        own = linear(hidden, self.head.weight, deterministic=deterministic).float()
        return self.vocabulary.likeliest(own)

    def cache_specs(self) -> list[CacheSpec]:
        return list(self._cache_specs)

    def placements(self, names: Collection[str] | None = None) -> dict[str, Placement]:
        """Where each tensor of the checkpoint goes. `names` are the tensors present, since releases
        differ.

        Many checkpoints have no drafting head although their config.json lists one; the model then
        drops its own.
        """
        if names is not None and not stores_mtp(names):
            self.mtp = None
        return self._find_placements(self.config, self.mtp is not None, names)


def make_attention(
    config: Qwen3_5Config, dtype: torch.dtype, device: torch.device | str, ranks: Ranks
) -> Attention:
    return Attention(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.eps,
        qkv_bias=False,
        out_bias=False,
        qk_norm=True,
        gated=True,
        interleaved_rope=False,
        window=0,
        ranks=ranks,
        dtype=dtype,
        device=device,
    )


def make_delta_net(
    config: Qwen3_5Config, dtype: torch.dtype, device: torch.device | str, ranks: Ranks
) -> DeltaNet:
    return DeltaNet(
        hidden_size=config.hidden_size,
        num_key_heads=config.num_key_heads,
        num_value_heads=config.num_value_heads,
        key_dim=config.key_dim,
        value_dim=config.value_dim,
        conv_kernel=config.conv_kernel,
        eps=config.eps,
        ranks=ranks,
        dtype=dtype,
        device=device,
    )


def make_mlp(
    config: Qwen3_5Config,
    is_sparse: bool,
    dtype: torch.dtype,
    device: torch.device | str,
    ranks: Ranks,
) -> DenseMLP | SparseMLP:
    if config.experts is None or not is_sparse:
        return DenseMLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            eps=config.eps,
            ranks=ranks,
            dtype=dtype,
            device=device,
        )
    return SparseMLP(
        hidden_size=config.hidden_size,
        num_experts=config.experts.num_experts,
        experts_per_token=config.experts.experts_per_token,
        expert_size=config.experts.expert_size,
        shared_expert_size=config.experts.shared_expert_size,
        normalize=True,
        eps=config.eps,
        ranks=ranks,
        dtype=dtype,
        device=device,
    )


def make_mtp(
    config: Qwen3_5Config, dtype: torch.dtype, device: torch.device | str, ranks: Ranks
) -> MTP:
    return MTP(
        hidden_size=config.hidden_size,
        attention=make_attention(config, dtype, device, ranks),
        mlp=make_mlp(config, config.experts is not None, dtype, device, ranks),
        eps=config.eps,
        dtype=dtype,
        device=device,
    )
