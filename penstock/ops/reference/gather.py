"""Rows of a table by their numbers: the embedding of tokens, or chosen tokens of a step."""

from __future__ import annotations

from torch import Tensor


def take_rows(
    ids: Tensor,  # [T] int64
    table: Tensor,  # [N, H]
) -> Tensor:  # [T, H]
    return table.index_select(0, ids)
