"""Passes over prompts as graphs, by number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.forge.fragments.forward_kernels import Model
from penstock.forge.fragments.graphs import capture
from penstock.forge.fragments.launch import cdiv
from penstock.forge.fragments.prefill_kernel import TILE_TOKENS, Pack, pack_prompts
from penstock.forge.fragments.prefill_pass import run_pack, run_prompts

PASS_SIZES = (32, 64, 128, 256, 512, 1024, 2048)
PASS_PROMPTS = 16


class PromptPass:
    """Up to `size` tokens of up to 16 prompts, from inputs that lie still."""

    def __init__(self, model: Model, size: int) -> None:
        self.model = model
        device = model.rope.device
        num_tiles = cdiv(size, TILE_TOKENS) + PASS_PROMPTS
        self.inputs = torch.zeros(3 * size + PASS_PROMPTS + 3 * num_tiles, dtype=torch.int64, device=device)
        sizes = (size, size, size, PASS_PROMPTS, 3 * num_tiles)
        self.tokens, slots, positions, lasts, tiles = self.inputs.split(sizes)
        self.pack = Pack(slots, positions, lasts, tiles.view(-1, 3))
        slots.fill_(model.cache.spare)

    def run(self) -> Tensor:
        return run_pack(self.model, self.tokens, self.pack)


class PrefillGraphs:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.passes = {size: PromptPass(model, size) for size in PASS_SIZES}
        pool = torch.cuda.graph_pool_handle() if model.rope.is_cuda else None
        self.captured = {size: capture(self.passes[size].run, pool) for size in reversed(PASS_SIZES)}

    def launch(self, tokens: Tensor, lengths: list[int], slots: list[int]) -> Tensor:
        """tokens [T], prompts end to end -> logits [R, V]"""
        num_tokens = len(tokens)
        if num_tokens > PASS_SIZES[-1] or len(lengths) > PASS_PROMPTS:
            return run_prompts(self.model, tokens, lengths, slots)
        size = next(size for size in PASS_SIZES if size >= num_tokens)
        one_pass = self.passes[size]
        padded = pad_pack(
            pack_prompts(lengths, slots, torch.device("cpu")), one_pass.pack, self.model.cache.spare
        )
        one_pass.inputs[size:].copy_(padded.pin_memory() if tokens.is_cuda else padded, non_blocking=True)
        one_pass.tokens[:num_tokens].copy_(tokens, non_blocking=True)
        replay, logits = self.captured[size]
        replay()
        return logits[: len(lengths)].clone()


def pad_pack(pack: Pack, place: Pack, spare: int) -> Tensor:
    """The numbers of a pack, in the order of the place they go to. Tiles without length do nothing."""
    slots = torch.full(place.slots.shape, spare)
    positions, lasts, tiles = (torch.zeros(x.shape, dtype=torch.int64) for x in place[1:])
    for padded, given in zip((slots, positions, lasts, tiles), pack):
        padded[: len(given)] = given
    return torch.cat([slots, positions, lasts, tiles.flatten()])
