"""Names of the tensors in Qwen3.5 checkpoints, and where each goes in our modules. Opens no file.

Norm weights are stored as `w` of `1 + w`, except the gated norm of DeltaNet; queries and their
gates alternate by head; experts are stored fused or, in some releases, separately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from torch import Tensor

from penstock.models.placement import Placement
from penstock.models.qwen3_5_config import ExpertsConfig, Qwen3_5Config

IGNORED = (r"model\.visual\..*", r".*rotary_emb\.inv_freq", r"mtp\..*")
NESTED, FLAT = "model.language_model.", "model."

Named = Iterator[tuple[str, Placement]]
FindPlacements = Callable[[Qwen3_5Config, bool, Collection[str] | None], dict[str, Placement]]


def stores_mtp(names: Collection[str]) -> bool:
    return any(name.startswith("mtp.") for name in names)


def find_placements(
    config: Qwen3_5Config, with_mtp: bool, names: Collection[str] | None
) -> dict[str, Placement]:
    """The whole table. Without `names`, the table of the published layout with fused experts."""
    stored = frozenset(names or ())
    return dict(_all(config, with_mtp, stored))


def _all(config: Qwen3_5Config, with_mtp: bool, stored: frozenset[str]) -> Named:
    prefix = _prefix(config, stored)
    matrix = (config.vocab_size, config.hidden_size)
    yield f"{prefix}embed_tokens.weight", Placement("embedding", matrix)
    yield f"{prefix}norm.weight", _norm("head.norm", config.hidden_size)
    if not config.is_tied:
        yield "lm_head.weight", Placement("head.weight", matrix)
    elif "lm_head.weight" in stored:  # some tools write the tied head a second time
        yield "lm_head.weight", Placement("embedding", matrix)
    for index, is_attention in enumerate(config.is_attention):
        mixer = _attention if is_attention else _delta_net
        yield from mixer(config, f"{prefix}layers.{index}.", f"layers.{index}.mixer.")
        is_sparse = config.is_sparse[index]
        yield from _mlp(
            config, is_sparse, f"{prefix}layers.{index}.", f"layers.{index}.mlp.", stored
        )
    if with_mtp:
        yield from _mtp(config, stored)


def _prefix(config: Qwen3_5Config, stored: frozenset[str]) -> str:
    usual, other = (NESTED, FLAT) if config.is_nested else (FLAT, NESTED)
    return other if f"{other}embed_tokens.weight" in stored else usual


def _norm(parameter: str, size: int) -> Placement:
    return Placement(parameter, (size,), convert=_one_plus)


def _one_plus(weight: Tensor) -> Tensor:
    return 1.0 + weight.float()


def _attention(config: Qwen3_5Config, source: str, target: str) -> Named:
    hidden, head_dim = config.hidden_size, config.head_dim
    query, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    after_gate, after_k = 2 * query, 2 * query + kv
    qkv = f"{target}qkv.weight"
    yield f"{source}input_layernorm.weight", _norm(f"{target}qkv.norm", hidden)
    yield (
        f"{source}self_attn.q_proj.weight",
        Placement(
            qkv, (2 * query, hidden), (slice(0, after_gate),), partial(_queries_first, config)
        ),
    )
    yield (
        f"{source}self_attn.k_proj.weight",
        Placement(qkv, (kv, hidden), (slice(after_gate, after_k),)),
    )
    yield (
        f"{source}self_attn.v_proj.weight",
        Placement(qkv, (kv, hidden), (slice(after_k, after_k + kv),)),
    )
    yield f"{source}self_attn.o_proj.weight", Placement(f"{target}out.weight", (hidden, query))
    yield f"{source}self_attn.q_norm.weight", _norm(f"{target}q_norm", head_dim)
    yield f"{source}self_attn.k_norm.weight", _norm(f"{target}k_norm", head_dim)


def _queries_first(config: Qwen3_5Config, weight: Tensor) -> Tensor:
    """Rows (query, gate) by head -> all queries, then all gates."""
    heads = weight.unflatten(0, (config.num_heads, 2, config.head_dim))
    return heads.transpose(0, 1).flatten(0, 2)


def _delta_net(config: Qwen3_5Config, source: str, target: str) -> Named:
    hidden, channels = config.hidden_size, config.conv_channels
    value, heads = config.value_size, config.num_value_heads
    yield f"{source}input_layernorm.weight", _norm(f"{target}in_proj.norm", hidden)
    begin = 0
    for name, size in (("qkv", channels), ("z", value), ("b", heads), ("a", heads)):
        rows = (slice(begin, begin + size),)
        yield (
            f"{source}linear_attn.in_proj_{name}.weight",
            Placement(f"{target}in_proj.weight", (size, hidden), rows),
        )
        begin += size
    yield (
        f"{source}linear_attn.conv1d.weight",
        Placement(f"{target}conv", (channels, 1, config.conv_kernel), convert=_taps_by_channel),
    )
    yield f"{source}linear_attn.A_log", Placement(f"{target}a_log", (heads,))
    yield f"{source}linear_attn.dt_bias", Placement(f"{target}dt_bias", (heads,))
    yield f"{source}linear_attn.norm.weight", Placement(f"{target}gated_norm", (config.value_dim,))
    yield f"{source}linear_attn.out_proj.weight", Placement(f"{target}out.weight", (hidden, value))


def _taps_by_channel(weight: Tensor) -> Tensor:
    return weight.squeeze(1).t()  # [C, 1, Kc] -> [Kc, C]


def _mlp(
    config: Qwen3_5Config, is_sparse: bool, source: str, target: str, stored: frozenset[str]
) -> Named:
    hidden = config.hidden_size
    norm = f"{source}post_attention_layernorm.weight"
    if config.experts is None or not is_sparse:
        width = config.intermediate_size
        yield norm, _norm(f"{target}gate_up.norm", hidden)
        yield from _swiglu(
            f"{source}mlp.", f"{target}gate_up.weight", f"{target}down.weight", hidden, width
        )
        return
    yield norm, _norm(f"{target}norm", hidden)
    experts, shared = config.experts, config.experts.shared_expert_size
    yield f"{source}mlp.gate.weight", Placement(f"{target}router", (experts.num_experts, hidden))
    yield from _experts(experts, f"{source}mlp.experts.", target, hidden, stored)
    names = f"{target}shared_gate_up", f"{target}shared_down"
    yield from _swiglu(f"{source}mlp.shared_expert.", *names, hidden, shared)
    yield f"{source}mlp.shared_expert_gate.weight", Placement(f"{target}shared_gate", (1, hidden))


def _swiglu(
    source: str, gate_up: str, down: str, hidden: int, width: int, expert: tuple[int, ...] = ()
) -> Named:
    yield (
        f"{source}gate_proj.weight",
        Placement(gate_up, (width, hidden), (*expert, slice(0, width))),
    )
    yield (
        f"{source}up_proj.weight",
        Placement(gate_up, (width, hidden), (*expert, slice(width, 2 * width))),
    )
    yield f"{source}down_proj.weight", Placement(down, (hidden, width), expert)


def _experts(
    experts: ExpertsConfig, source: str, target: str, hidden: int, stored: frozenset[str]
) -> Named:
    num, width = experts.num_experts, experts.expert_size
    gate_up, down = f"{target}gate_up", f"{target}down"
    if f"{source}0.gate_proj.weight" in stored:
        for expert in range(num):
            yield from _swiglu(f"{source}{expert}.", gate_up, down, hidden, width, (expert,))
    else:
        yield f"{source}gate_up_proj", Placement(gate_up, (num, 2 * width, hidden))
        yield f"{source}down_proj", Placement(down, (num, hidden, width))


def _mtp(config: Qwen3_5Config, stored: frozenset[str]) -> Named:
    hidden = config.hidden_size
    yield "mtp.pre_fc_norm_embedding.weight", _norm("mtp.embedding_norm", hidden)
    yield "mtp.pre_fc_norm_hidden.weight", _norm("mtp.hidden_norm", hidden)
    yield "mtp.fc.weight", Placement("mtp.fc.weight", (hidden, 2 * hidden))
    yield from _attention(config, "mtp.layers.0.", "mtp.attention.")
    yield from _mlp(config, config.experts is not None, "mtp.layers.0.", "mtp.mlp.", stored)
    yield "mtp.norm.weight", _norm("mtp.norm", hidden)
