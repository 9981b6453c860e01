"""Steps with drafts as CUDA graphs: drafting, verifying and accepting without the host.

Each shape (`graph_sizes.py`) has one graph up to the logits and one for each sampling mode, with
acceptance and the drafting head's update after it. A greedy step of few rows is a single graph. If
the host changes the logits (masks, penalties), sampling runs outside, and a last graph updates the
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.draft_step import DraftStep
from penstock.engine.graph_sizes import DraftSize, draft_sizes
from penstock.engine.graphs import (
    SAMPLING_MODES,
    WHOLE_ROWS,
    Model,
    Warmup,
    borrow,
    capture,
    warmup_layers,
)
from penstock.engine.mtp_drafter import MTPDrafter
from penstock.engine.row_table import RowTable, SamplingMode
from penstock.layers.inputs import LayerCache
from penstock.progress import OnPhase, Phase
from penstock.types import RowPlan


class DraftGraphs:
    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        rows: RowTable,
        drafter: MTPDrafter | None,
        deterministic: bool,
        max_tokens: int | None = None,  # largest step to capture
    ) -> None:
        self._new_step = partial(DraftStep, model, caches, rows, drafter)
        self._new_warmup_step = partial(
            DraftStep, model, warmup_layers(model, caches), rows, drafter
        )
        self._deterministic = deterministic
        sizes = draft_sizes(rows.max_rows, rows.num_drafts)
        self.sizes = [size for size in sizes if max_tokens is None or size.num_places <= max_tokens]
        self._steps: dict[DraftSize, DraftStep] = {}
        self._logits: dict[DraftSize, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._tokens: dict[tuple[DraftSize, SamplingMode], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._follow: dict[DraftSize, torch.cuda.CUDAGraph] = {}

    @property
    def num_captures(self) -> int:
        """The number of whole steps; what follows the logits is one layer at most."""
        return sum(1 + self._is_whole(size, "greedy") for size in self.sizes)

    @property
    def warmup(self) -> Warmup:
        """The largest comes last: a dry run measures it."""
        sizes = sorted(self.sizes, key=lambda size: size.num_places)
        by_bucket = {
            ((size.num_places - 1).bit_length(), (size.num_rows - 1).bit_length()): size
            for size in sizes
        }
        launches = {
            size: partial(_launch_modes, self._new_warmup_step(size, self._deterministic))
            for size in sizes
        }
        return Warmup.split(launches, ahead=by_bucket.values())

    def capture(self, pool: Any, on_phase: OnPhase) -> None:
        sizes = sorted(self.sizes, key=lambda size: -size.num_places)
        for done, size in enumerate(sizes):
            name = f"{size.num_rows} rows of {size.width} tokens"
            on_phase(Phase("graphs", name, done / len(sizes)))
            step = self._steps[size] = self._new_step(size, self._deterministic)
            graph, verified = capture(step.verify, pool)
            for mode in SAMPLING_MODES:
                run = step.run if self._is_whole(size, mode) else partial(step.finish, verified)
                self._tokens[size, mode] = capture(partial(run, mode), pool)
            self._follow[size], _ = capture(partial(step.follow_given, verified), pool)
            self._logits[size] = graph, borrow(verified.logits)

    def size_for(self, rows: Sequence[RowPlan]) -> DraftSize | None:
        """The smallest captured size that holds these rows."""
        if not all(row.is_decode for row in rows):
            return None
        num_rows, num_drafts = len(rows), max(row.num_drafts for row in rows)
        fitting = [
            size
            for size in self.sizes
            if size.num_rows >= num_rows and size.num_drafts >= num_drafts
        ]
        return min(fitting, key=lambda size: (size.num_places, size.num_rows), default=None)

    def replay(
        self, rows: tuple[RowPlan, ...], size: DraftSize, mode: SamplingMode
    ) -> Tensor:  # [rows, 2 + n]
        """How many tokens each row gains, and those sampled. Valid until the next replay; copy it
        on the same stream.
        """
        self._steps[size].load(rows)
        if not self._is_whole(size, mode):
            self._logits[size][0].replay()
        graph, for_host = self._tokens[size, mode]
        graph.replay()
        return for_host[: len(rows)]

    def replay_logits(self, rows: tuple[RowPlan, ...], size: DraftSize) -> Tensor:
        """[L, vocab] float32: logits of the positions that the rows use, row after row."""
        step = self._steps[size]
        step.load(rows)
        graph, logits = self._logits[size]
        graph.replay()
        return logits[step.rows.upload(places_of(rows, size))]

    def follow(
        self, rows: tuple[RowPlan, ...], size: DraftSize, sampled: Tensor, num_new: Tensor | None
    ) -> None:
        """Runs after `replay_logits`, when these tokens were sampled and accepted."""
        step = self._steps[size]
        if step.drafter is None:
            return
        step.sampled.index_copy_(0, step.rows.upload(places_of(rows, size)), sampled)
        step.num_new.zero_()
        if num_new is None:
            step.num_new[: len(rows)].fill_(1)
        else:
            step.num_new[: len(rows)].copy_(num_new)
        self._follow[size].replay()

    def _is_whole(self, size: DraftSize, mode: SamplingMode) -> bool:
        return mode == "greedy" and size.num_rows <= WHOLE_ROWS


def places_of(rows: Sequence[RowPlan], size: DraftSize) -> list[int]:
    """The positions that the rows use."""
    return [
        index * size.width + place
        for index, row in enumerate(rows)
        for place in range(row.max_tokens)
    ]


def _launch_modes(step: DraftStep) -> None:
    """Launches everything that the graphs will contain."""
    verified = step.verify()
    for mode in SAMPLING_MODES:
        step.finish(verified, mode)
