"""Decode steps as graphs, by number of rows and by whether a row is long."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from penstock.forge.fragments.decode_split_kv import SPLIT_KEYS, run_step, run_tokens
from penstock.forge.fragments.forward_kernels import Model, run_prompts
from penstock.forge.fragments.graphs import capture, write_numbers
from penstock.forge.fragments.launch import compile_at_once
from penstock.ops.triton.launch import next_power_of_2

STEP_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
PROMPT_TOKENS = 2048  # per prompt, of four that have no graph


class DecodeStep:
    """One token for each of `size` rows, from inputs at fixed addresses. Every step advances its
    rows: a step with the same rows needs only their tokens.
    """

    def __init__(self, model: Model, size: int) -> None:
        self.model = model
        self.inputs = torch.zeros(4, size, dtype=torch.int64, device=model.rope.device)
        self.inputs[1] = model.cache.spare
        self.tokens, self.slots, self.positions, self.advance = self.inputs.unbind()
        # Slots, and their positions after the last step.
        self.expected: tuple[list[int], list[int]] = ([], [])

    def fill(self, tokens: Tensor, slots: list[int], positions: list[int]) -> None:
        num_rows, padding = len(slots), len(self.tokens) - len(slots)
        if (slots, positions) != self.expected:
            spare = [self.model.cache.spare] * padding
            advance = [1] * num_rows + [0] * padding
            write_numbers(self.inputs[1:], [slots + spare, positions + [0] * padding, advance])
        self.expected = slots, [position + 1 for position in positions]
        self.tokens[:num_rows].copy_(tokens, non_blocking=True)

    def run(self, is_long: bool) -> Tensor:
        logits = run_step(self.model, self.tokens, self.slots, self.positions, is_long=is_long)
        self.positions.add_(self.advance)
        return logits


class DecodeGraphs:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.steps = {size: DecodeStep(model, size) for size in STEP_SIZES}
        # A step between two powers of two uses the kernels of the larger one.
        steps = [step for size, step in self.steps.items() if size == next_power_of_2(size)]
        runs = [partial(step.run, is_long) for step in steps for is_long in (False, True)]
        compile_at_once([*runs, self.run_large_pass], model.rope.device)
        pool = torch.cuda.graph_pool_handle() if model.rope.is_cuda else None
        # The largest size first: the others fit into its memory.
        self.captured = {
            (size, is_long): capture(partial(self.steps[size].run, is_long), pool)
            for is_long in (False, True)
            for size in reversed(STEP_SIZES)
        }

    def run_large_pass(self) -> Tensor:
        """Runs a pass as large as any, so that later ones find libraries loaded and memory
        allocated.
        """
        lengths = [min(PROMPT_TOKENS, self.model.shape.max_len)] * 4
        tokens = torch.zeros(sum(lengths), dtype=torch.int64, device=self.model.rope.device)
        return run_prompts(self.model, tokens, lengths, [self.model.cache.spare] * len(lengths))

    def launch(self, tokens: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """tokens [R] -> logits [R, V]. Does not wait for the step."""
        num_rows = len(slots)
        if num_rows > STEP_SIZES[-1]:
            on_device = tokens.to(self.model.rope.device, torch.int64)
            return run_tokens(self.model, on_device, slots, positions)
        size = next(size for size in STEP_SIZES if size >= num_rows)
        self.steps[size].fill(tokens, slots, positions)
        replay, logits = self.captured[size, max(positions) >= SPLIT_KEYS]
        replay()
        return logits[:num_rows].clone()
