# mypy: disable-error-code="no-untyped-def"
"""Rows of tables by their numbers, copied in one launch. The library takes twice as long for a few
rows, and does not let the next kernel start early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.launch import cdiv, launch_options, let_next_start, wait_for_previous
from penstock.ops.tuning import Tile

MOST_TABLES = 3
_TILE: Tile = {"BLOCK": 1024, "num_warps": 4}


def take_rows(
    ids: Tensor,  # [T] int64
    table: Tensor,  # [N, H]
) -> Tensor:  # [T, H]
    assert table.stride(1) == 1
    num_rows, width = len(ids), table.shape[1]
    out = torch.empty(num_rows, width, dtype=table.dtype, device=table.device)
    if num_rows:
        take_rows_kernel[(num_rows, cdiv(width, _TILE["BLOCK"]))](
            ids.contiguous(),
            table,
            out,
            table.stride(0),
            H=width,
            **_TILE,
            **launch_options(table.device),
        )
    return out


def take_rows_of_each(
    ids: Tensor,  # [T] int64
    tables: Sequence[Tensor],  # [N, H] each, with different H; at most three
) -> list[Tensor]:  # [T, H] each
    assert all(table.stride(1) == 1 for table in tables)
    outs = [
        torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=table.device)
        for table in tables
    ]
    if len(ids):
        widths = [table.shape[1] for table in tables]
        take_rows_of_each_kernel[(len(ids), cdiv(max(widths), _TILE["BLOCK"]), len(tables))](
            ids.contiguous(),
            *_padded(tables, None),
            *_padded(outs, None),
            *_padded([table.stride(0) for table in tables], 0),
            *_padded(widths, 0),
            **_TILE,
            **launch_options(ids.device),
        )
    return outs


def _padded(values: Sequence[Any], filler: Any) -> list[Any]:
    """As many as the kernel has parameters for."""
    return [*values, *[filler] * (MOST_TABLES - len(values))]


def put_rows(
    ids: Tensor,  # [T] int64  one that occurs twice has two equal rows
    rows: Tensor,  # [T, H]
    table: Tensor,  # [N, H]  written
) -> None:
    assert rows.stride(1) == table.stride(1) == 1
    num_rows, width = rows.shape
    if num_rows:
        put_rows_kernel[(num_rows, cdiv(width, _TILE["BLOCK"]))](
            ids.contiguous(),
            rows,
            table,
            rows.stride(0),
            table.stride(0),
            H=width,
            **_TILE,
            **launch_options(table.device),
        )


@triton.jit
def _take_row(p_ids, p_table, p_out, row_stride, H: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(p_ids + i_row)
    b_row = tl.load(p_table + row * row_stride + column, mask=column < H)
    tl.store(p_out + i_row * H + column, b_row, mask=column < H)


@triton.jit(do_not_specialize_on_alignment=["p_ids"])
def take_rows_kernel(
    p_ids,  # [T]
    p_table,  # [N, H]
    p_out,  # [T, H]
    row_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # In this order: later kernels read the integers of a step's rows, or keys, before they wait.
    wait_for_previous(PDL)
    let_next_start(PDL)
    _take_row(p_ids, p_table, p_out, row_stride, H, BLOCK)


@triton.jit(do_not_specialize_on_alignment=["p_ids"])
def take_rows_of_each_kernel(
    p_ids,  # [T]
    p_first,  # [N, H]
    p_second,  # [N, H], or None
    p_third,  # [N, H], or None
    p_first_out,  # [T, H]
    p_second_out,  # [T, H], or None
    p_third_out,  # [T, H], or None
    first_stride,
    second_stride,
    third_stride,
    FIRST_H: tl.constexpr,
    SECOND_H: tl.constexpr,
    THIRD_H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)  # in the same order
    let_next_start(PDL)
    i_table = tl.program_id(2)
    if i_table == 0:
        _take_row(p_ids, p_first, p_first_out, first_stride, FIRST_H, BLOCK)
    if SECOND_H and i_table == 1:
        _take_row(p_ids, p_second, p_second_out, second_stride, SECOND_H, BLOCK)
    if THIRD_H and i_table == 2:
        _take_row(p_ids, p_third, p_third_out, third_stride, THIRD_H, BLOCK)


@triton.jit(do_not_specialize_on_alignment=["p_ids"])
def put_rows_kernel(
    p_ids,  # [T]
    p_rows,  # [T, H]
    p_table,  # [N, H]
    row_stride,
    table_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(p_ids + i_row)
    b_row = tl.load(p_rows + i_row * row_stride + column, mask=column < H)
    tl.store(p_table + row * table_stride + column, b_row, mask=column < H)
