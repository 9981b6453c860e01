"""The layers as a few kernels each, and prompts end to end in one pass of them. Every input is on
the device: a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from penstock.forge.fragments.cache_pages import Cache
from penstock.forge.fragments.kernel_rows import embed, turn_and_store
from penstock.forge.fragments.prefill_kernel import Pack, attend_pack, pack_prompts
from penstock.forge.fragments.projection_kernels import project_gated, project_normed, project_onto
from penstock.forge.fragments.shape import Shape
from penstock.forge.fragments.weights import Weights


class Model(NamedTuple):
    shape: Shape
    weights: Weights
    cache: Cache
    rope: Tensor  # [max_len, 2, D / 2]


# (layer, rotated queries and keys, queries, keys and values) -> [T, Hq * D]
Attend = Callable[[int, Tensor, Tensor], Tensor]


def run_layers(
    model: Model,
    tokens: Tensor,  # [T]
    slots: Tensor,  # [T]
    positions: Tensor,  # [T]
    attend: Attend,
    kept: Tensor | None = None,  # [R], or all
) -> Tensor:  # [R, H]
    """In the last layer, tokens that are not kept only store their key and value."""
    shape, eps = model.shape, model.shape.eps
    hidden = embed(tokens, model.weights.embedding)
    for index, layer in enumerate(model.weights.layers):
        qkv = project_normed(hidden, eps, layer.qkv)
        turned = turn_and_store(qkv, model.rope, slots, positions, model.cache, index, shape)
        attended = attend(index, turned, qkv)
        if kept is not None and index == shape.num_layers - 1:
            hidden, attended = hidden[kept], attended[kept]
        hidden = project_onto(hidden, attended, layer.output)
        hidden = project_onto(hidden, project_gated(hidden, eps, layer.gate_up), layer.down)
    return hidden


def compute_logits(model: Model, hidden: Tensor) -> Tensor:
    """[R, H] -> [R, V]"""
    return project_normed(hidden, model.shape.eps, model.weights.head)


def run_prompts(model: Model, tokens: Tensor, lengths: list[int], slots: list[int]) -> Tensor:
    """The logits after each prompt, [R, V]. tokens [T] are those of all prompts, end to end."""
    return run_pack(model, tokens, pack_prompts(lengths, slots, tokens.device))


def run_pack(model: Model, tokens: Tensor, pack: Pack) -> Tensor:
    def attend(layer: int, turned: Tensor, qkv: Tensor) -> Tensor:
        return attend_pack(turned, qkv, pack, model.shape)

    hidden = run_layers(model, tokens, pack.slots, pack.positions, attend, kept=pack.lasts)
    return compute_logits(model, hidden)
