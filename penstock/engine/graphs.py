"""Decode steps of fixed sizes: static buffers in, the next tokens out, captured once as CUDA graphs.

A graph replays what was launched when it was captured, on the memory it was captured with. So everything a
step depends on is read on the device: four numbers a row from a static buffer, the rest from the row table.
A step with fewer rows than a size is padded with the table's spare row, which owns page 0 and slot 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.engine.rows import Ending, RowTable
from penstock.layers.inputs import LayerCache, RowSpan, StepInputs
from penstock.progress import OnPhase, Phase
from penstock.types import CacheSpec, RowPlan, StepPlan

ENDINGS: tuple[Ending, ...] = ("logits", "greedy", "drawn", "filtered")


class Model(Protocol):
    def __call__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> Tensor: ...  # [T, H]

    def logits(self, hidden: Tensor, *, deterministic: bool) -> Tensor: ...  # [L, H] -> [L, vocab] float32

    def cache_specs(self) -> list[CacheSpec]: ...


class DecodeStep:
    """One token for each of `size` rows. Runs eagerly on any device; `DecodeGraphs` captures it."""

    def __init__(
        self, model: Model, caches: list[LayerCache], rows: RowTable, size: int, deterministic: bool
    ) -> None:
        self.model = model
        self.caches = caches
        self.rows = rows
        self.size = size
        self.deterministic = deterministic
        self.packed = rows.upload(self._pack(()))  # [4, size]: row, position, state slot, initial slot
        self._token_of_row = torch.arange(size + 1, device=rows.device)
        self._no_chunks = ops.Chunks.of((), rows.device)
        self._loaded: tuple[RowPlan, ...] = ()

    def load(self, plans: tuple[RowPlan, ...]) -> None:
        self.packed.copy_(self.rows.stage(self._pack(plans)), non_blocking=True)
        self._loaded = plans

    def run(self, ending: Ending) -> Tensor:  # [size] int64, or [size, vocab] float32
        table = self.rows
        rows, positions, state_slots, initial_slots = self.packed.unbind()
        token_ids, kv_index, context_lens, page_table = ops.decode_rows(
            self.packed, table.last_token, table.page_table, table.page_size
        )
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            query_start=self._token_of_row,
            context_lens=context_lens,
            page_table=page_table,
            kv_index=kv_index,
            state_slots=state_slots,
            initial_slots=initial_slots,
            logit_rows=self._token_of_row[:-1],
            spans=self._spans(),
            chunks=self._no_chunks,
            deterministic=self.deterministic,
        )
        hidden = self.model(inputs, self.caches)
        logits = self.model.logits(hidden, deterministic=self.deterministic)
        if ending == "logits":
            return logits
        token_ids = table.draw(logits, rows, context_lens, ending)
        table.last_token.index_copy_(0, rows, token_ids)
        return token_ids

    def _pack(self, plans: tuple[RowPlan, ...]) -> np.ndarray:
        packed = np.zeros((4, self.size), dtype=np.int64)
        packed[0] = self.rows.spare_row
        for column, plan in enumerate(plans):
            packed[:, column] = plan.row, plan.start, plan.slot, plan.initial_slot
        return packed

    def _spans(self) -> tuple[RowSpan, ...]:
        """For references. Of a captured step only their number is true in every replay: kernels read the
        lengths of contexts on the device.
        """
        spans = [RowSpan(1, plan.start + 1) for plan in self._loaded]
        return (*spans, *[RowSpan(1, 1)] * (self.size - len(spans)))


class DecodeGraphs:
    """The captured steps of an engine, by size and ending."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        rows: RowTable,
        deterministic: bool,
        pool: Any,
        on_phase: OnPhase = lambda _: None,
    ) -> None:
        sizes = graph_sizes(rows.max_rows)
        self._steps = {size: DecodeStep(model, caches, rows, size, deterministic) for size in sizes}
        self._captured: dict[tuple[int, Ending], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        for done, size in enumerate(reversed(sizes)):  # the largest first, the others fit into its memory
            on_phase(Phase("graphs", f"{size} rows", done / len(sizes)))
            for ending in ENDINGS:
                self._captured[size, ending] = capture(partial(self._steps[size].run, ending), pool)

    def replay(self, plan: StepPlan, ending: Ending) -> Tensor:  # [rows] int64, or [rows, vocab] float32
        """Valid until the next replay; to be copied on the same stream."""
        num_rows = len(plan.rows)
        size = min(size for size in self._steps if size >= num_rows)
        self._steps[size].load(plan.rows)
        graph, output = self._captured[size, ending]
        graph.replay()
        return output[:num_rows]


def is_decode(plan: StepPlan) -> bool:
    """Whether every row goes on from its last sample."""
    return all(row.is_decode for row in plan.rows)


def graph_sizes(max_rows: int) -> list[int]:
    """Powers of two while steps are cheap; then so that padding costs at most an eighth to a quarter."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def capture(run: Callable[[], Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    run()  # compiles and loads what is not yet there, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = run()
    return graph, output
