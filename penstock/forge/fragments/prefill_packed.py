"""Prompts end to end in one pass; only attention goes through them one by one."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from penstock.forge.fragments.forward_torch import (
    Model,
    attend_causally,
    compute_logits,
    on_device,
    run_layers,
)
from penstock.forge.fragments.rope_pairs import rotate


def run_prompts(model: Model, tokens: Tensor, lengths: list[int], slots: list[int]) -> Tensor:
    """The logits after each prompt, [R, V]. tokens [T] are those of all prompts, end to end.

    They go through the layers in one pass, so that every weight is read once.
    """
    ends = list(accumulate(lengths))
    spans = [slice(end - length, end) for end, length in zip(ends, lengths)]
    angles = torch.cat([model.rope[:length] for length in lengths])

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = rotate(query, angles), rotate(key, angles)
        mixed = torch.empty_like(query).flatten(-2)
        for slot, span in zip(slots, spans):
            length = span.stop - span.start
            model.cache.keys[layer, slot, :, :length] = key[span].transpose(0, 1)
            model.cache.values[layer, slot, :, :length] = value[span].transpose(0, 1)
            mixed[span] = attend_causally(query[span], key[span], value[span])
        return mixed

    hidden = run_layers(model, tokens, attend)
    return compute_logits(model, hidden[on_device([end - 1 for end in ends], hidden.device)])
