"""A layer's projections as the checkpoint stores them: one product each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from penstock.forge.fragments.product_packed import multiply
from penstock.forge.fragments.rope_halves import swap_pairs_for_halves
from penstock.forge.fragments.shape import Shape

if TYPE_CHECKING:
    from penstock.forge.fragments.weights import StateDict


class Layer(NamedTuple):
    input_norm: Tensor  # [H]
    query: Tensor  # [Hq * D, H]
    key: Tensor  # [Hkv * D, H]
    value: Tensor  # [Hkv * D, H]
    output: Tensor  # [H, Hq * D]
    post_norm: Tensor  # [H]
    gate: Tensor  # [F, H]
    up: Tensor  # [F, H]
    down: Tensor  # [H, F]


def load_layer(state: StateDict, prefix: str, shape: Shape) -> Layer:
    hidden, width = shape.hidden_size, shape.intermediate_size
    input_norm = state.take(prefix + "input_layernorm", hidden)
    query = state.take(prefix + "self_attn.q_proj", shape.num_query_rows, hidden)
    key = state.take(prefix + "self_attn.k_proj", shape.num_key_rows, hidden)
    value = state.take(prefix + "self_attn.v_proj", shape.num_key_rows, hidden)
    output = state.take(prefix + "self_attn.o_proj", hidden, shape.num_query_rows)
    post_norm = state.take(prefix + "post_attention_layernorm", hidden)
    gate = state.take(prefix + "mlp.gate_proj", width, hidden)
    up = state.take(prefix + "mlp.up_proj", width, hidden)
    down = state.take(prefix + "mlp.down_proj", hidden, width)
    query = swap_pairs_for_halves(query, shape.head_dim)  # forge: when rope=halves
    key = swap_pairs_for_halves(key, shape.head_dim)  # forge: when rope=halves
    # forge: when norm=folded
    query, key, value = query * input_norm, key * input_norm, value * input_norm
    gate, up = gate * post_norm, up * post_norm
    # forge: end
    return Layer(input_norm, query, key, value, output, post_norm, gate, up, down)


def project_heads(x: Tensor, layer: Layer, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """[.., H] -> queries [.., Hq, D], keys and values [.., Hkv, D]"""
    query = multiply(x, layer.query).unflatten(-1, (shape.num_heads, shape.head_dim))
    key = multiply(x, layer.key).unflatten(-1, (shape.num_kv_heads, shape.head_dim))
    value = multiply(x, layer.value).unflatten(-1, (shape.num_kv_heads, shape.head_dim))
    return query, key, value


def feed_forward(x: Tensor, layer: Layer) -> Tensor:
    """[.., H] -> [.., H]"""
    return multiply(F.silu(multiply(x, layer.gate)) * multiply(x, layer.up), layer.down)
