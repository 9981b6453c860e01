# mypy: disable-error-code="no-untyped-def"
"""The head and the tail of a decode step, each in one launch: they are all integers, and small.

Which rows run, and what follows, is the business of others; a row that pads a graph has row, length
and pages like any other, but gains no token, so programs never write the same entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    wait_for_previous,
)
from penstock.ops.triton.tuning import Tile

_TILE: Tile = {"BLOCK": 1024, "num_warps": 4}
_ADVANCE_TILE: Tile = {"BLOCK": 128, "num_warps": 4}


def decode_rows(
    rows: Tensor,  # [R] int64  of the tables
    last_token: Tensor,  # [rows] int64
    context_len: Tensor,  # [rows] int64  tokens of the row, its last one included
    page_table: Tensor,  # [rows, P] int32
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows, num_pages = len(rows), page_table.shape[1]
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    positions, kv_index, context_lens = (torch.empty_like(token_ids) for _ in range(3))
    row_pages = torch.empty(num_rows, num_pages, dtype=torch.int32, device=rows.device)
    if num_rows:
        decode_rows_kernel[(num_rows, cdiv(num_pages, _TILE["BLOCK"]))](
            rows,
            last_token,
            context_len,
            page_table,
            token_ids,
            positions,
            kv_index,
            context_lens,
            row_pages,
            num_pages,
            page_size,
            **_TILE,
            **launch_options(rows.device),
        )
    return token_ids, positions, kv_index, context_lens, row_pages


def advance_rows(
    rows: Tensor,  # [R] int64  of the tables; a row that gains tokens occurs once
    num_new: Tensor,  # [R] int64  tokens that the row gains; 0 in a row that pads the step
    token_ids: Tensor,  # [R] int64  the last one of these
    last_token: Tensor,  # [rows] int64  written
    context_len: Tensor,  # [rows] int64  written
) -> None:
    if len(rows):
        advance_rows_kernel[(cdiv(len(rows), _ADVANCE_TILE["BLOCK"]),)](
            rows,
            num_new,
            token_ids,
            last_token,
            context_len,
            len(rows),
            **_ADVANCE_TILE,
            **launch_options(rows.device),
        )


@triton.jit(do_not_specialize=["num_pages"], do_not_specialize_on_alignment=["p_rows"])
def decode_rows_kernel(
    p_rows,  # [R]
    p_last_token,  # [rows]
    p_context_len,  # [rows]
    p_page_table,  # [rows, P]
    p_token_ids,  # [R]
    p_positions,  # [R]
    p_kv_index,  # [R]
    p_context_lens,  # [R]
    p_row_pages,  # [R, P]
    num_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    row = tl.load(p_rows + i_row)
    context_len = tl.load(p_context_len + row)
    position = context_len - 1
    current = position // PAGE_SIZE
    page = i_tile * BLOCK + tl.arange(0, BLOCK)
    b_pages = tl.load(
        p_page_table + row * num_pages + page, mask=(page <= current) & (page < num_pages), other=0
    )
    tl.store(p_row_pages + i_row * num_pages + page, b_pages, mask=page < num_pages)
    if i_tile == 0:
        last_page = tl.load(p_page_table + row * num_pages + current).to(tl.int64)
        tl.store(p_token_ids + i_row, tl.load(p_last_token + row))
        tl.store(p_positions + i_row, position)
        tl.store(p_kv_index + i_row, last_page * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(p_context_lens + i_row, context_len)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["p_rows", "p_num_new", "p_token_ids"],
)
def advance_rows_kernel(
    p_rows,  # [R]
    p_num_new,  # [R]
    p_token_ids,  # [R]
    p_last_token,  # [rows]
    p_context_len,  # [rows]
    num_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_new = tl.load(p_num_new + i_row, mask=i_row < num_rows, other=0)
    gains = num_new > 0
    row = tl.load(p_rows + i_row, mask=gains, other=0)
    token_id = tl.load(p_token_ids + i_row, mask=gains, other=0)
    context_len = tl.load(p_context_len + row, mask=gains, other=0)
    tl.store(p_last_token + row, token_id, mask=gains)
    tl.store(p_context_len + row, context_len + num_new, mask=gains)
