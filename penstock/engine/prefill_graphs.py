"""Short prompts, beside decodes or alone, as CUDA graphs of a few fixed sizes.

A layer of a prompt is a dozen launches. In a long prompt each of them keeps the device busy for
longer than the host needs for the next one; in a short prompt, as after a cached prefix, the host
would limit the speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.graphs import (
    Caches,
    Model,
    Warmup,
    borrow,
    capture,
    run_for_last_tokens,
    warmup_layers,
)
from penstock.engine.row_table import RowTable
from penstock.engine.step_inputs import RowCounts, StepSize, pack_padded
from penstock.layers.inputs import LayerCache
from penstock.ops import BLOCK_TOKENS
from penstock.progress import OnPhase, Phase
from penstock.types import RowPlan

PROMPT_TOKENS = (64, 128, 256, 512, 1024)
DECODES = (0, 1, 4, 16, 32, 64)
MAX_PROMPTS = 8
# Prompts that are launched eagerly; these sizes use every kernel.
LONG_TOKENS = (2048, 4096, 8192, 16384, 32768)
THREAD_TOKENS = 8192  # longest prompt that several threads may launch at the same time


class PrefillStep:
    """A step of a fixed size. Runs eagerly on any device; `PrefillGraphs` captures it."""

    def __init__(
        self, model: Model, caches: Caches, rows: RowTable, size: StepSize, deterministic: bool
    ) -> None:
        self.model = model
        self.caches = caches
        self.rows = rows
        self.size = size
        self.deterministic = deterministic
        empty = pack_padded((), size, rows.padding_row)
        self._lengths = empty.lengths
        self._numbers = rows.upload(empty.numbers)
        self._loaded: Sequence[RowPlan] = ()

    def load(self, plans: Sequence[RowPlan]) -> None:
        packed = pack_padded(plans, self.size, self.rows.padding_row)
        self._numbers.copy_(self.rows.stage(packed.numbers), non_blocking=True)
        self._loaded = plans

    def run(self) -> Tensor:  # [size.num_rows, vocab] float32
        inputs = self.rows.derive_inputs(
            self._numbers,
            self._lengths,
            self.size.spans(self.rows.spans_of(self._loaded)),
            self.rows.page_table.shape[1],
            self.deterministic,
        )
        hidden = run_for_last_tokens(self.model, inputs, self.caches)
        return self.model.logits(hidden, deterministic=self.deterministic)


class PrefillGraphs:
    """The captured steps of an engine. Their results are valid until the next replay."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        rows: RowTable,
        deterministic: bool,
        max_step_tokens: int,
        captures: bool = True,  # False: it only launches every kernel
    ) -> None:
        self._captures = captures
        self._new_step = partial(PrefillStep, model, caches, rows, deterministic=deterministic)
        warmup_caches = warmup_layers(model, caches)
        self._new_warmup_step = partial(
            PrefillStep, model, warmup_caches, rows, deterministic=deterministic
        )
        self._sizes = prefill_sizes(rows.max_rows, max_step_tokens)
        if not captures:  # decodes beside prompts take no kernels of their own
            self._sizes = [size for size in self._sizes if not size.num_decodes]
        self._long_sizes = [
            StepSize(0, _num_prompts(num_tokens, rows.max_rows), num_tokens)
            for num_tokens in LONG_TOKENS
            if num_tokens <= max_step_tokens
        ]
        self._steps: dict[StepSize, tuple[PrefillStep, torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def num_captures(self) -> int:
        return len(self._sizes) if self._captures else 0

    @property
    def warmup(self) -> Warmup:
        """Launches every kernel, see `DecodeGraphs`; memory for the longest prompts suffices for
        one at a time."""
        sizes = [*self._long_sizes, *self._sizes]
        by_bucket = {
            ((size.num_tokens - 1).bit_length(), size.num_decodes.bit_length()): size
            for size in sizes
            if size.num_tokens <= THREAD_TOKENS
        }
        launches = {size: self._new_warmup_step(size).run for size in sizes}
        return Warmup.split(launches, ahead=by_bucket.values())

    def capture(self, pool: Any, on_phase: OnPhase) -> None:
        # The largest first, the others fit into its memory.
        sizes = list(reversed(self._sizes)) if self._captures else []
        for done, size in enumerate(sizes):
            on_phase(Phase("graphs", f"{size.num_tokens} tokens", done / len(sizes)))
            step = self._new_step(size)
            graph, logits = capture(step.run, pool)
            self._steps[size] = step, graph, borrow(logits)

    def size_for(self, rows: Sequence[RowPlan]) -> StepSize | None:
        counts = RowCounts.of(rows)
        sizes = self._sizes if self._captures else ()
        return next((size for size in sizes if size.holds(counts)), None)

    def replay(self, rows: Sequence[RowPlan], size: StepSize) -> Tensor:  # [L, vocab] float32
        """The logits of the sampling rows, in the order of the plan."""
        step, graph, logits = self._steps[size]
        step.load(rows)
        graph.replay()
        wanted = [place for place, row in zip(size.place_of(rows), rows) if row.samples]
        return logits[step.rows.upload(wanted)]


def prefill_sizes(max_rows: int, max_step_tokens: int) -> list[StepSize]:
    """In the order in which to try them: the least work first."""
    return [
        StepSize(num_decodes, _num_prompts(num_tokens, max_rows), num_tokens)
        for num_tokens in PROMPT_TOKENS
        if num_tokens <= max_step_tokens
        for num_decodes in DECODES
        if num_decodes < max_rows
    ]


def _num_prompts(num_tokens: int, max_rows: int) -> int:
    """Steps with many prompts shorter than a block are rare, so they are launched eagerly."""
    return min(num_tokens // BLOCK_TOKENS, MAX_PROMPTS, max_rows)
