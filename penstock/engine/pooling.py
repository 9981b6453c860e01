"""Embeddings of prompts: pools the hidden states of a step row by row. Launches and does not wait.

The last token's state is read in the step that computes it. A mean is summed chunk by chunk: the
row table keeps the sum between steps, in float64, so that chunk boundaries do not change the
result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.graphs import Model
from penstock.engine.row_table import RowTable
from penstock.types import Pooling, StepPlan

# Tokens at a time: all states of a long prompt in float64 would take gigabytes.
MEAN_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The vectors of rows with the same pooling."""

    rows: tuple[int, ...]
    vectors: Tensor  # [rows, width] float32


def pool_rows(
    model: Model,
    table: RowTable,
    plan: StepPlan,
    hidden: Tensor | None,  # [T, H]; None: no row needs more than `last`
    last: Tensor,  # [R, H]  each row's last token
    deterministic: bool,
) -> list[PooledRows]:
    """For the rows whose prompts this step completes."""
    if hidden is not None:
        _add_to_sums(model, table, plan, hidden)
    places: dict[Pooling, list[int]] = {}
    for place, row in enumerate(plan.rows):
        if row.pooled is not None and row.pooled.is_last:
            places.setdefault(row.pooled.pooling, []).append(place)
    pooled = []
    for pooling, found in places.items():
        rows = tuple(plan.rows[place].row for place in found)
        if pooling.kind == "mean":
            lengths = [plan.rows[place].start + plan.rows[place].num_tokens for place in found]
            assert table.sums is not None
            sums = table.sums[table.upload(rows)]
            vectors = (sums / table.upload(lengths, torch.float64)[:, None]).float()
        else:
            vectors = _read_states(model, table, last[table.upload(found)], pooling, deterministic)
        vectors = vectors[:, : pooling.dimensions].contiguous()
        pooled.append(
            PooledRows(rows, F.normalize(vectors, dim=-1) if pooling.normalize else vectors)
        )
    return pooled


def _read_states(
    model: Model, table: RowTable, last: Tensor, pooling: Pooling, deterministic: bool
) -> Tensor:
    """[rows, H] -> [rows, width] float32: the states themselves, or a head's output for them."""
    if pooling.logit_ids:
        return model.logits(last, deterministic=deterministic)[:, table.upload(pooling.logit_ids)]
    if pooling.is_classified:
        return model.label_logits(last)
    return model.final_norm(last).float()


def _add_to_sums(model: Model, table: RowTable, plan: StepPlan, hidden: Tensor) -> None:
    first = 0
    for row in plan.rows:
        if row.pooled is not None and row.pooled.pooling.kind == "mean":
            total = table.sum_of(row.row, hidden.shape[-1], is_new=row.start == 0)
            for states in hidden[first : first + row.num_tokens].split(MEAN_TOKENS):
                total += model.final_norm(states).sum(0, dtype=torch.float64)
        first += row.num_tokens
