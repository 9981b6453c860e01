"""Replaces `PrefillGraphs` without graphs: the same steps, launched eagerly."""

from __future__ import annotations

from typing import Any

import torch

from penstock.engine.engine import Engine
from penstock.engine.prefill_graphs import Followed, PrefillGraphs, PrefillStep
from penstock.engine.step_inputs import StepSize


class EagerPrompts(PrefillGraphs):
    """Has the sizes that a GPU would capture, or the given ones. Like a graph, the step of a size
    keeps its buffers.
    """

    def __init__(
        self, engine: Engine, max_step_tokens: int, sizes: list[StepSize] | None = None
    ) -> None:
        runner = engine.runner
        given = (runner.model, runner.caches, runner.rows, runner.deterministic)
        super().__init__(*given, max_step_tokens=max_step_tokens, drafter=runner.drafter)
        self._sizes = sizes or self._sizes
        self.replayed: list[StepSize] = []
        self._own_steps: dict[StepSize, PrefillStep] = {}
        self._followed: Followed | None = None

    def replay(self, rows: Any, size: StepSize) -> torch.Tensor:
        self.replayed.append(size)
        if size not in self._own_steps:
            self._own_steps[size] = self._new_step(size=size)
        step = self._own_steps[size]
        step.load(rows)
        logits, self._followed = step.compute()
        return logits[[place for place, row in zip(size.place_of(rows), rows) if row.samples]]

    def follow(self, rows: Any, size: StepSize, sampled: Any) -> None:
        self._own_steps[size].set_next_ids(rows, sampled)
        assert self._followed is not None
        self._own_steps[size].follow(self._followed)
