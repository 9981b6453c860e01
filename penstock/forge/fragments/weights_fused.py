"""A layer's projections stacked: one product for queries, keys and values, one for gate and up."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.forge.fragments.product_packed import multiply, pack
from penstock.forge.fragments.rope_halves import swap_pairs_for_halves
from penstock.forge.fragments.shape import Shape

if TYPE_CHECKING:
    from penstock.forge.fragments.weights import StateDict


class Layer(NamedTuple):
    input_norm: Tensor  # [H]
    qkv: Tensor  # [(Hq + 2 Hkv) * D, H]
    output: Tensor  # [H, Hq * D]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2F, H]
    down: Tensor  # [H, F]


def load_layer(state: StateDict, prefix: str, shape: Shape) -> Layer:
    hidden, width = shape.hidden_size, shape.intermediate_size
    input_norm = state.take(prefix + "input_layernorm", hidden)
    query = state.take(prefix + "self_attn.q_proj", shape.num_query_rows, hidden)
    key = state.take(prefix + "self_attn.k_proj", shape.num_key_rows, hidden)
    value = state.take(prefix + "self_attn.v_proj", shape.num_key_rows, hidden)
    query = swap_pairs_for_halves(query, shape.head_dim)  # forge: when rope=halves
    key = swap_pairs_for_halves(key, shape.head_dim)  # forge: when rope=halves
    qkv = torch.cat([query, key, value])
    qkv *= input_norm  # forge: when norm=folded|in_kernel
    output = state.take(prefix + "self_attn.o_proj", hidden, shape.num_query_rows)
    post_norm = state.take(prefix + "post_attention_layernorm", hidden)
    gate = state.take(prefix + "mlp.gate_proj", width, hidden)
    gate_up = torch.cat([gate, state.take(prefix + "mlp.up_proj", width, hidden)])
    gate_up *= post_norm  # forge: when norm=folded|in_kernel
    down = state.take(prefix + "mlp.down_proj", hidden, width)
    # forge: when products=packed
    qkv, output, gate_up, down = map(pack, (qkv, output, gate_up, down))
    # forge: end
    return Layer(input_norm, qkv, output, post_norm, gate_up, down)


def project_heads(x: Tensor, layer: Layer, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """[.., H] -> queries [.., Hq, D], keys and values [.., Hkv, D]"""
    heads = multiply(x, layer.qkv).unflatten(-1, (-1, shape.head_dim))
    counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    query, key, value = heads.split(counts, dim=-2)
    return query, key, value


def feed_forward(x: Tensor, layer: Layer) -> Tensor:
    """[.., H] -> [.., H]"""
    gate, up = multiply(x, layer.gate_up).chunk(2, dim=-1)
    return multiply(F.silu(gate) * up, layer.down)
