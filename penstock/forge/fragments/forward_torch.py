"""The layers in plain torch. The caller decides where keys are stored and how rows attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.forge.fragments.cache_slots import Cache
from penstock.forge.fragments.norm_folded import scale_to_unit
from penstock.forge.fragments.norm_plain import rms_norm
from penstock.forge.fragments.product_packed import multiply
from penstock.forge.fragments.shape import Shape
from penstock.forge.fragments.weights import Weights
from penstock.forge.fragments.weights_fused import feed_forward, project_heads


class Model(NamedTuple):
    shape: Shape
    weights: Weights
    cache: Cache
    rope: Tensor  # by position


# (layer, queries, keys, values) -> [.., Hq * D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def run_layers(model: Model, tokens: Tensor, attend: Attend) -> Tensor:
    """tokens [T] -> [T, H]"""
    shape, weights = model.shape, model.weights
    hidden = F.embedding(tokens, weights.embedding)
    for index, layer in enumerate(weights.layers):
        x = rms_norm(hidden, layer.input_norm, shape.eps)  # forge: when norm!=folded
        x = scale_to_unit(hidden, shape.eps)  # forge: when norm=folded
        mixed = attend(index, *project_heads(x, layer, shape))
        hidden = hidden + multiply(mixed, layer.output)
        x = rms_norm(hidden, layer.post_norm, shape.eps)  # forge: when norm!=folded
        x = scale_to_unit(hidden, shape.eps)  # forge: when norm=folded
        hidden = hidden + feed_forward(x, layer)
    return hidden


def compute_logits(model: Model, hidden: Tensor) -> Tensor:
    """[R, H] -> [R, V]"""
    x = rms_norm(hidden, model.weights.norm, model.shape.eps)  # forge: when norm!=folded
    x = scale_to_unit(hidden, model.shape.eps)  # forge: when norm=folded
    return multiply(x, model.weights.head)


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[T, heads, D] -> [T, Hq * D]: each token sees itself and those before it.

    Not as a batch of one, torch would hold the scores of all pairs of tokens at once.
    """
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
    return mixed[0].transpose(0, 1).flatten(1)


def on_device(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
