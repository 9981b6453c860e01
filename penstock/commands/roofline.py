"""The fewest bytes and operations that a step needs, from a model's own parameters and cache specs.

A decode step reads every weight that is not an expert once, the experts that its tokens are
expected to choose (uniform routing, the worst case), the KV of every context, and reads and writes
every recurrent state. In the last layer of a prefill, only the last token needs more than keys and
values, or an update of the state. Activations and launches count as free, so a measurement can only
be slower. Knows no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.types import KVSpec, StateSpec

_CHUNK = 64  # tokens in one block of the blocked delta rule


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many parameters a model has, by what a step does with them."""

    total: int
    embedding: int  # a lookup reads one row per token
    head: int  # equal to the embedding when they are tied
    is_tied: bool
    experts: int
    num_experts: int  # in one layer; 0 for a dense model
    num_experts_per_token: int
    mtp: int  # the drafting head, which a plain step does not read
    last_experts: int  # in the last layer
    last_dense: int  # in the last layer, needed only for last tokens
    mtp_experts: int = 0  # in the drafting head

    @property
    def in_layers(self) -> int:
        return self.total - self.embedding - (0 if self.is_tied else self.head)

    @property
    def always_read(self) -> int:
        """Parameters that every step reads; the embedding only counts if it is also the head."""
        return self.total - self.experts - self.mtp - (0 if self.is_tied else self.embedding)

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.always_read + self.experts_read(1)

    @property
    def spared(self) -> int:
        """Parameters that prompt tokens before the last do not need."""
        return self.last_dense + round(self.last_experts * self._share_chosen(1))

    def experts_read(self, num_tokens: int, num_last: int | None = None) -> int:
        """Expected parameters of the distinct experts that this many tokens choose; in the last
        layer, only `num_last` tokens choose."""
        before = (self.experts - self.last_experts) * self._share_chosen(num_tokens)
        return round(before + self.last_experts * self._share_chosen(num_last or num_tokens))

    def drafting_read(self, num_rows: int, num_drafts: int) -> int:
        """Parameters that the drafting head's layer reads in a step: once for all tokens of the
        step, and once for each draft after the first."""
        dense = num_drafts * (self.mtp - self.mtp_experts)
        shares = self._share_chosen(num_rows * (1 + num_drafts))
        shares += (num_drafts - 1) * self._share_chosen(num_rows)
        return dense + round(self.mtp_experts * shares) if num_drafts else 0

    def _share_chosen(self, num_tokens: int) -> float:
        if not self.num_experts:
            return 0.0
        return float(1 - (1 - self.num_experts_per_token / self.num_experts) ** num_tokens)


def count_parameters(
    model: Any,
    config: Mapping[str, Any],
    *,
    in_bytes: bool = False,
    quantized: Mapping[str, int] | None = None,
) -> Parameters:
    """Counts the parameters of a model on any device, meta included. `in_bytes`: counts the bytes
    that they take as stored; `quantized` are those of weights that a checkpoint stores quantized.
    """
    parameters = dict(model.named_parameters())
    parameters.pop("mtp.vocabulary.values", None)  # a copy of the head's rows
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    if in_bytes:
        from penstock.ops import Weight  # imports torch, which help texts do not need

        sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
        weights = ((name, one) for name, one in model.named_modules() if isinstance(one, Weight))
        own = quantized or {}
        stored = {f"{name}.values": own.get(name, weight.num_bytes) for name, weight in weights}
        sizes |= {name: size for name, size in stored.items() if name in parameters}
    drafting = {name for name in sizes if name.startswith("mtp.")}
    # Only stacks of experts have three dimensions: [E, 2I, H] and [E, H, I].
    stacks = [name for name in parameters.keys() - drafting if parameters[name].ndim == 3]
    embedding = sum(size for name, size in sizes.items() if name.startswith("embed"))
    last = {name for name in sizes if name.startswith(f"layers.{len(model.layers) - 1}.")}
    last_dense = sum(sizes[name] for name in last.difference(stacks))
    # With expert parallelism a rank holds some experts; tokens choose among those of all ranks.
    num_holders = model.ranks.size if model.ranks.whole_experts else 1
    spec = model.cache_specs()[-1]
    if isinstance(spec, KVSpec):
        # All tokens need their keys and values.
        last_dense -= 2 * spec.num_kv_heads * spec.head_dim * text_config(config)["hidden_size"]
    else:
        last_dense = sum(sizes[name] for name in last.difference(stacks) if ".mlp." in name)
    return Parameters(
        total=sum(sizes.values()),
        embedding=embedding,
        head=sizes.get("head.weight.values", embedding),
        is_tied="head.weight.values" not in sizes,
        experts=sum(sizes[name] for name in stacks),
        num_experts=parameters[stacks[0]].shape[0] * num_holders if stacks else 0,
        num_experts_per_token=text_config(config)["num_experts_per_tok"] if stacks else 0,
        mtp=sum(sizes[name] for name in drafting),
        last_experts=sum(sizes[name] for name in last.intersection(stacks)),
        last_dense=last_dense,
        mtp_experts=sum(sizes[name] for name in drafting if parameters[name].ndim == 3),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested: Mapping[str, Any] = config.get("text_config", config)
    return nested


@dataclass(frozen=True, slots=True)
class DraftBytes:
    """Bytes of a step with drafts."""

    read: int  # what its kernels load
    floor: int  # weights, every state read and written once, every key and value read once


@dataclass(frozen=True, slots=True)
class Roofline:
    """One model in one dtype: bytes and operations of its steps."""

    parameters: Parameters
    stored: Parameters  # in bytes
    element_bytes: int  # per activation, and per weight that is not quantized
    kv_bytes: int  # per element of KV
    state_bytes: int  # per element of a recurrent state
    hidden_size: int
    query_width: int  # query heads x head width, on one rank
    attention: tuple[KVSpec, ...]
    delta_nets: tuple[StateSpec, ...]
    ends_with_attention: bool
    state_writes: float = 1.0  # per decoded token: with a backlog, not every one writes its states

    @classmethod
    def of(
        cls,
        model: Any,
        config: Mapping[str, Any],
        element_bytes: int,
        state_bytes: int,
        kv_bytes: int | None = None,  # None: as `element_bytes`
        state_writes: float = 1.0,
        quantized: Mapping[str, int] | None = None,  # bytes by weight, of a model without memory
    ) -> Roofline:
        text, specs = text_config(config), model.cache_specs()
        attention = tuple(spec for spec in specs if isinstance(spec, KVSpec))
        head_dim = attention[0].head_dim if attention else 0
        return cls(
            parameters=count_parameters(model, config),
            stored=count_parameters(model, config, in_bytes=True, quantized=quantized),
            element_bytes=element_bytes,
            kv_bytes=kv_bytes or element_bytes,
            state_bytes=state_bytes,
            hidden_size=text["hidden_size"],
            query_width=text["num_attention_heads"] // model.ranks.size * head_dim,
            attention=attention,
            delta_nets=tuple(spec for spec in specs if isinstance(spec, StateSpec)),
            ends_with_attention=isinstance(specs[-1], KVSpec),
            state_writes=state_writes,
        )

    @property
    def weight_bytes(self) -> int:
        return self.stored.total

    @property
    def is_quantized(self) -> bool:
        return self.weight_bytes < self.element_bytes * self.parameters.total

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(spec.num_bytes(self.kv_bytes) for spec in self.attention)

    @property
    def state_bytes_per_request(self) -> int:
        return sum(spec.num_bytes(self.element_bytes, self.state_bytes) for spec in self.delta_nets)

    @property
    def _recurrent_bytes(self) -> int:
        return self.state_bytes * sum(spec.num_recurrent_elements for spec in self.delta_nets)

    def decode_bytes(self, batch: int, context: int) -> int:
        """One token for each of `batch` requests that have `context` tokens in the cache."""
        return self.weight_bytes_read(batch) + batch * self.row_bytes(context)

    def row_bytes(self, context: int) -> int:
        """Bytes that a decode reads and writes for its own request."""
        # The convolution's inputs count once: a token reads all entries of the ring except its
        # own, which it writes.
        state = self.state_bytes_per_request + round(self.state_writes * self._recurrent_bytes)
        return self.kv_bytes_per_token * (context + 1) + state

    def draft_bytes(
        self, batch: int, context: int, num_drafts: int, num_accepted: float, head_bytes: int
    ) -> DraftBytes:
        """One token and `num_drafts` drafts for each of `batch` requests, whose last step accepted
        `num_accepted` drafts; `head_bytes` are read to choose a draft.

        Every position reads all keys and values; positions of one request are adjacent programs, so
        a cache may serve them. A journal entry is a key, a value and three gates for every head.
        """
        num_tokens, own_kv = batch * (1 + num_drafts), 0
        weights = self.weight_bytes_read(num_tokens) + num_drafts * head_bytes
        weights += self.stored.drafting_read(batch, num_drafts)
        if num_drafts and self.attention:
            own_kv = self.attention[0].num_bytes(self.kv_bytes)  # the drafting head's
        kv = (self.kv_bytes_per_token + own_kv) * (context + 1 + num_drafts)
        entry = 4 * sum(
            spec.num_value_heads * (spec.key_dim + spec.value_dim + 3) for spec in self.delta_nets
        )
        state = self.state_bytes_per_request + self._recurrent_bytes
        again = num_drafts * kv + (num_drafts + num_accepted) * entry
        floor = weights + batch * (state + kv)
        return DraftBytes(read=round(floor + batch * again), floor=floor)

    def prefill_bytes(self, batch: int, length: int) -> int:
        """Whole prompts without a cached prefix: reads weights, writes KV and final states once."""
        written = self.kv_bytes_per_token * length + self.state_bytes_per_request
        return self.weight_bytes_read(batch * length, batch) + batch * written

    def weight_bytes_read(self, num_tokens: int, num_last: int | None = None) -> int:
        read = self.stored.always_read + self.stored.experts_read(num_tokens, num_last)
        return read + self.element_bytes * num_tokens * self.hidden_size

    def prefill_operations(self, batch: int, length: int) -> int:
        """Matmuls, causal attention and the blocked delta rule; the head, and most of the last
        layer, only for the last tokens."""
        last = self.parameters.spared + self.parameters.head
        matmuls = 2 * length * (self.parameters.active - last) + 2 * last
        num_pairs = length * (length + 1) // 2 * len(self.attention)
        if self.ends_with_attention:
            num_pairs -= length * (length - 1) // 2
        attention = 4 * self.query_width * num_pairs
        delta_rule = length * sum(_delta_rule_operations(spec) for spec in self.delta_nets)
        return batch * (matmuls + attention + delta_rule)


def _delta_rule_operations(spec: StateSpec) -> int:
    """For one token: two Gram rows, the triangular solve, its product, three K x V products."""
    key, value = spec.key_dim, spec.value_dim
    in_chunk = 4 * _CHUNK * key + _CHUNK * (key + value) + 2 * _CHUNK * value
    return spec.num_value_heads * (in_chunk + 6 * key * value)
