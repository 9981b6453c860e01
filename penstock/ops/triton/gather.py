# mypy: disable-error-code="no-untyped-def"
"""Rows of a table by their numbers, copied in one launch. The library takes twice as long for a few
rows, and does not let the next kernel start early.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.launch import cdiv, launch_options, let_next_start, wait_for_previous
from penstock.ops.tuning import Tile

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
    i_row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(p_ids + i_row)
    b_row = tl.load(p_table + row * row_stride + column, mask=column < H)
    tl.store(p_out + i_row * H + column, b_row, mask=column < H)
