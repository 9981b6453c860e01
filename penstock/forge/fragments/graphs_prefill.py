# mypy: disable-error-code="no-untyped-def"
"""Passes over prompts as graphs, by number of tokens."""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.forge.fragments.forward_kernels import Model, run_pack, run_prompts
from penstock.forge.fragments.graphs import capture, write_numbers
from penstock.forge.fragments.launch import launch
from penstock.forge.fragments.prefill_kernel import TILE_TOKENS, Pack
from penstock.ops.triton.launch import cdiv

LONGEST_PASS = 2048  # forge: value
PASS_PROMPTS = 16
SPREAD_TOKENS = 128


class PromptPass:
    """Up to `size` tokens of up to 16 prompts. A prompt is described by its slot and its end."""

    def __init__(self, model: Model, size: int) -> None:
        self.model = model
        device = model.rope.device
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.prompts = torch.zeros(2, PASS_PROMPTS, dtype=torch.int64, device=device)  # ends, slots
        self.num_tiles = cdiv(size, TILE_TOKENS) + PASS_PROMPTS

    def fill(self, tokens: Tensor, lengths: list[int], slots: list[int]) -> None:
        num_tokens, padding = sum(lengths), PASS_PROMPTS - len(lengths)
        ends = [*accumulate(lengths)] + [num_tokens] * padding
        write_numbers(self.prompts, [ends, slots + [0] * padding])
        self.tokens[:num_tokens].copy_(tokens, non_blocking=True)

    def run(self) -> Tensor:
        return run_pack(self.model, self.tokens, self._spread())

    def _spread(self) -> Pack:
        size, new = len(self.tokens), self.prompts.new_empty
        pack = Pack(new(size), new(size), self.prompts[0] - 1, new(self.num_tiles, 3))
        grid = (cdiv(max(size, self.num_tiles), SPREAD_TOKENS),)
        launch(spread_kernel, grid)(
            self.prompts,
            pack.slots,
            pack.positions,
            pack.tiles,
            self.model.cache.spare,
            size,
            self.num_tiles,
            PROMPTS=PASS_PROMPTS,
            TILE_TOKENS=TILE_TOKENS,
            BLOCK=SPREAD_TOKENS,
        )
        return pack


@triton.jit(do_not_specialize=["spare", "size", "num_tiles"])
def spread_kernel(
    p_prompts,
    p_slots,
    p_positions,
    p_tiles,
    spare,
    size,
    num_tiles,
    PROMPTS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the inputs of each token and tile from the prompts. Tokens without a prompt use the
    spare slot, and tiles of length 0 do nothing.
    """
    prompts, places = tl.arange(0, PROMPTS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_ends = tl.load(p_prompts + prompts)
    b_starts = tl.load(p_prompts + prompts - 1, mask=prompts > 0, other=0)
    b_slots = tl.load(p_prompts + PROMPTS + prompts)
    is_its = (places[:, None] >= b_starts[None, :]) & (places[:, None] < b_ends[None, :])
    slots = spare + tl.sum(tl.where(is_its, b_slots[None, :] - spare, 0), axis=1)
    positions = tl.sum(tl.where(is_its, places[:, None] - b_starts[None, :], 0), axis=1)
    tl.store(p_slots + places, slots, mask=places < size)
    tl.store(p_positions + places, positions, mask=places < size)

    b_tiles = (b_ends - b_starts + TILE_TOKENS - 1) // TILE_TOKENS
    b_end_tiles = tl.cumsum(b_tiles, axis=0)
    b_first_tiles = b_end_tiles - b_tiles
    is_its = (places[:, None] >= b_first_tiles[None, :]) & (places[:, None] < b_end_tiles[None, :])
    starts = tl.sum(tl.where(is_its, b_starts[None, :], 0), axis=1)
    lengths = tl.sum(tl.where(is_its, (b_ends - b_starts)[None, :], 0), axis=1)
    firsts = (
        tl.sum(tl.where(is_its, places[:, None] - b_first_tiles[None, :], 0), axis=1) * TILE_TOKENS
    )
    tl.store(p_tiles + places * 3, starts, mask=places < num_tiles)
    tl.store(p_tiles + places * 3 + 1, lengths, mask=places < num_tiles)
    tl.store(p_tiles + places * 3 + 2, firsts, mask=places < num_tiles)


def pass_sizes(longest: int) -> list[int]:
    """Each size doubles the last; from 2048 on it grows by a quarter, since padding takes time."""
    sizes = [32]
    while sizes[-1] < longest:
        size = sizes[-1]
        sizes.append(2 * size if size < 2048 else size + (1 << size.bit_length()) // 8)
    return sizes


class PrefillGraphs:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.sizes = pass_sizes(LONGEST_PASS)
        self.passes = {size: PromptPass(model, size) for size in self.sizes}
        pool = torch.cuda.graph_pool_handle() if model.rope.is_cuda else None
        # Largest first: the others fit into its memory.
        self.captured = {
            size: capture(self.passes[size].run, pool) for size in reversed(self.sizes)
        }

    def launch(self, tokens: Tensor, lengths: list[int], slots: list[int]) -> Tensor:
        """tokens [T], prompts end to end -> logits [R, V]"""
        num_tokens = len(tokens)
        is_too_much = num_tokens > self.sizes[-1] or len(lengths) > PASS_PROMPTS
        # forge: when passes=all
        if is_too_much and len(lengths) > 1:
            half = len(lengths) // 2
            first, second = tokens.split((sum(lengths[:half]), sum(lengths[half:])))
            done = self.launch(first, lengths[:half], slots[:half])
            return torch.cat([done, self.launch(second, lengths[half:], slots[half:])])
        # forge: end
        if is_too_much:
            return run_prompts(self.model, tokens, lengths, slots)
        size = next(size for size in self.sizes if size >= num_tokens)
        self.passes[size].fill(tokens, lengths, slots)
        replay, logits = self.captured[size]
        replay()
        return logits[: len(lengths)].clone()
