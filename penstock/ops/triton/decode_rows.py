# mypy: disable-error-code="no-untyped-def"
"""The head of a decode step in one launch: it is all integers, and small, so it should cost one
launch.

Which rows run, and what follows, is the business of others; a row that pads a graph has row,
position and pages like any other.
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


def decode_rows(
    packed: Tensor,  # [4, R] int64  row of the tables, position, state slot, initial slot
    last_token: Tensor,  # [rows] int64
    page_table: Tensor,  # [rows, P] int32
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, num_pages = packed.shape[1], page_table.shape[1]
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=packed.device)
    kv_index, context_lens = torch.empty_like(token_ids), torch.empty_like(token_ids)
    row_pages = torch.empty(num_rows, num_pages, dtype=torch.int32, device=packed.device)
    if num_rows:
        decode_rows_kernel[(num_rows, cdiv(num_pages, _TILE["BLOCK"]))](
            packed,
            last_token,
            page_table,
            token_ids,
            kv_index,
            context_lens,
            row_pages,
            packed.stride(0),
            num_pages,
            page_size,
            **_TILE,
            **launch_options(packed.device),
        )
    return token_ids, kv_index, context_lens, row_pages


@triton.jit(
    do_not_specialize=["packed_stride", "num_pages"], do_not_specialize_on_alignment=["p_packed"]
)
def decode_rows_kernel(
    p_packed,  # [4, R]
    p_last_token,  # [rows]
    p_page_table,  # [rows, P]
    p_token_ids,  # [R]
    p_kv_index,  # [R]
    p_context_lens,  # [R]
    p_row_pages,  # [R, P]
    packed_stride,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    row = tl.load(p_packed + i_row)
    position = tl.load(p_packed + packed_stride + i_row)
    current = position // PAGE_SIZE
    page = i_tile * BLOCK + tl.arange(0, BLOCK)
    b_pages = tl.load(
        p_page_table + row * num_pages + page, mask=(page <= current) & (page < num_pages), other=0
    )
    tl.store(p_row_pages + i_row * num_pages + page, b_pages, mask=page < num_pages)
    if i_tile == 0:
        last_page = tl.load(p_page_table + row * num_pages + current).to(tl.int64)
        tl.store(p_token_ids + i_row, tl.load(p_last_token + row))
        tl.store(p_kv_index + i_row, last_page * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(p_context_lens + i_row, position + 1)
