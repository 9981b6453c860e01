"""Prompts end to end in one pass of kernels."""

from __future__ import annotations

from torch import Tensor

from penstock.forge.fragments.forward_kernels import Model, compute_logits, run_layers
from penstock.forge.fragments.prefill_kernel import Pack, attend_pack, pack_prompts


def run_prompts(model: Model, tokens: Tensor, lengths: list[int], slots: list[int]) -> Tensor:
    """The logits after each prompt, [R, V]. tokens [T] are those of all prompts, end to end."""
    return run_pack(model, tokens, pack_prompts(lengths, slots, tokens.device))


def run_pack(model: Model, tokens: Tensor, pack: Pack) -> Tensor:
    def attend(layer: int, turned: Tensor, qkv: Tensor) -> Tensor:
        return attend_pack(turned, qkv, pack, model.shape)

    hidden = run_layers(model, tokens, pack.slots, pack.positions, attend, kept=pack.lasts)
    return compute_logits(model, hidden)
