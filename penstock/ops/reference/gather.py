"""Rows of a table by their numbers: the embedding of tokens, or chosen tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def take_rows(
    ids: Tensor,  # [T] int64
    table: Tensor,  # [N, H]
) -> Tensor:  # [T, H]
    return table.index_select(0, ids)


def take_rows_of_each(
    ids: Tensor,  # [T] int64
    tables: Sequence[Tensor],  # [N, H] each, with different H; at most three
) -> list[Tensor]:  # [T, H] each
    return [take_rows(ids, table) for table in tables]


def put_rows(
    ids: Tensor,  # [T] int64  one that occurs twice has two equal rows
    rows: Tensor,  # [T, H]
    table: Tensor,  # [N, H]  written
) -> None:
    table.index_copy_(0, ids, rows)
