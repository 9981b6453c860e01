"""Short prompts, beside decodes or alone, as CUDA graphs of a few fixed sizes.

A layer of a prompt is a dozen launches. Of a long prompt each keeps the device busy for longer than the host
needs for the next; of a short one, as after a cached prefix, the host would be what takes the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.graphs import Model, capture
from penstock.engine.packing import RowCounts, StepSize, pack_padded
from penstock.engine.rows import RowTable
from penstock.layers.inputs import LayerCache
from penstock.ops import CHUNK
from penstock.progress import OnPhase, Phase
from penstock.types import RowPlan

PROMPT_TOKENS = (64, 128, 256, 512, 1024)
DECODES = (0, 1, 4, 16, 32, 64)
MAX_PROMPTS = 8
# Of longer prompts, launched as they come: every kernel they use.
WARMED_TOKENS = (2048, 4096, 8192, 16384, 32768)


class PromptStep:
    """A step of a fixed size. Runs eagerly on any device; `PromptGraphs` captures it."""

    def __init__(
        self, model: Model, caches: list[LayerCache], rows: RowTable, size: StepSize, deterministic: bool
    ) -> None:
        self.model = model
        self.caches = caches
        self.rows = rows
        self.size = size
        self.deterministic = deterministic
        empty = pack_padded((), size, rows.spare_row)
        self._lengths = empty.lengths
        self._numbers = rows.upload(empty.numbers)
        self._loaded: Sequence[RowPlan] = ()

    def load(self, plans: Sequence[RowPlan]) -> None:
        packed = pack_padded(plans, self.size, self.rows.spare_row)
        self._numbers.copy_(self.rows.stage(packed.numbers), non_blocking=True)
        self._loaded = plans

    def run(self) -> Tensor:  # [size.num_rows, vocab] float32
        inputs = self.rows.derive_inputs(
            self._numbers,
            self._lengths,
            self.size.spans(self._loaded),
            self.rows.page_table.shape[1],
            self.deterministic,
        )
        hidden = self.model(inputs, self.caches)[inputs.logit_rows]
        return self.model.logits(hidden, deterministic=self.deterministic)


class PromptGraphs:
    """The captured steps of an engine. Their results are valid until the next replay."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        rows: RowTable,
        deterministic: bool,
        max_step_tokens: int,
        pool: Any,
        on_phase: OnPhase = lambda _: None,
    ) -> None:
        sizes = prompt_sizes(rows.max_rows, max_step_tokens)
        self._steps: dict[StepSize, tuple[PromptStep, torch.cuda.CUDAGraph, Tensor]] = {}
        for done, size in enumerate(reversed(sizes)):  # the largest first, the others fit into its memory
            on_phase(Phase("graphs", f"{size.num_tokens} tokens", done / len(sizes)))
            step = PromptStep(model, caches, rows, size, deterministic)
            self._steps[size] = step, *capture(step.run, pool)
        self._sizes = sizes
        for num_tokens in WARMED_TOKENS:
            if num_tokens <= max_step_tokens:
                size = StepSize(0, _num_prompts(num_tokens, rows.max_rows), num_tokens)
                PromptStep(model, caches, rows, size, deterministic).run()

    def size_for(self, rows: Sequence[RowPlan]) -> StepSize | None:
        counts = RowCounts.of(rows)
        return next((size for size in self._sizes if size.holds(counts)), None)

    def replay(self, rows: Sequence[RowPlan], size: StepSize) -> Tensor:  # [L, vocab] float32
        """The logits of the rows that sample, in the order of the plan."""
        step, graph, logits = self._steps[size]
        step.load(rows)
        graph.replay()
        wanted = [place for place, row in zip(size.place_of(rows), rows) if row.samples]
        return logits[step.rows.upload(wanted)]


def prompt_sizes(max_rows: int, max_step_tokens: int) -> list[StepSize]:
    """In the order in which a step is to be tried: the least work first."""
    return [
        StepSize(num_decodes, _num_prompts(num_tokens, max_rows), num_tokens)
        for num_tokens in PROMPT_TOKENS
        if num_tokens <= max_step_tokens
        for num_decodes in DECODES
        if num_decodes < max_rows
    ]


def _num_prompts(num_tokens: int, max_rows: int) -> int:
    """Prompts shorter than a chunk are rare enough to be launched as they come when there are many."""
    return min(num_tokens // CHUNK, MAX_PROMPTS, max_rows)
