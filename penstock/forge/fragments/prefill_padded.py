"""Prompts side by side in one pass, padded to the longest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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

    Prompts are padded at their end, where causal attention does not look. What the padding leaves
    in a slot lies behind the request's length, and is overwritten before it is seen.
    """
    device, longest = tokens.device, max(lengths)
    padded = pad_sequence(tokens.split(lengths), batch_first=True)  # [R, longest]
    angles = model.rope[:longest]
    rows = on_device(slots, device)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = rotate(query, angles), rotate(key, angles)
        model.cache.keys[layer, rows, :, :longest] = key.transpose(1, 2)
        model.cache.values[layer, rows, :, :longest] = value.transpose(1, 2)
        return attend_causally(query, key, value)

    hidden = run_layers(model, padded, attend)
    lasts = on_device([length - 1 for length in lengths], device)
    return compute_logits(model, hidden[torch.arange(len(lengths), device=device), lasts])
