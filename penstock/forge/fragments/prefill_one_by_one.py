"""Prompts one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.forge.fragments.forward_torch import (
    Model,
    attend_causally,
    compute_logits,
    run_layers,
)
from penstock.forge.fragments.rope_pairs import rotate


def run_prompts(model: Model, tokens: Tensor, lengths: list[int], slots: list[int]) -> Tensor:
    """The logits after each prompt, [R, V]. tokens [T] are those of all prompts, end to end."""
    prompts = tokens.split(lengths)
    return torch.cat([run_prompt(model, prompt, slot) for prompt, slot in zip(prompts, slots)])


def run_prompt(model: Model, prompt: Tensor, slot: int) -> Tensor:
    angles = model.rope[: len(prompt)]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = rotate(query, angles), rotate(key, angles)
        model.cache.keys[layer, slot, :, : len(prompt)] = key.transpose(0, 1)
        model.cache.values[layer, slot, :, : len(prompt)] = value.transpose(0, 1)
        return attend_causally(query, key, value)

    hidden = run_layers(model, prompt, attend)
    return compute_logits(model, hidden[-1:])
