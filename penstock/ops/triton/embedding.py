# mypy: disable-error-code="no-untyped-def"
"""The embedding of tokens, in one launch: copies rows of a table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.launch import cdiv, launch_options, let_next_start, wait_for_previous
from penstock.ops.tuning import Tile

_TILE: Tile = {"BLOCK": 1024, "num_warps": 4}


def embed(
    token_ids: Tensor,  # [T] int64
    table: Tensor,  # [vocab, H]
) -> Tensor:  # [T, H]
    assert table.stride(1) == 1
    num_tokens, hidden_size = len(token_ids), table.shape[1]
    out = torch.empty(num_tokens, hidden_size, dtype=table.dtype, device=table.device)
    if num_tokens:
        embed_kernel[(num_tokens, cdiv(hidden_size, _TILE["BLOCK"]))](
            token_ids.contiguous(),
            table,
            out,
            table.stride(0),
            H=hidden_size,
            **_TILE,
            **launch_options(table.device),
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["p_token_ids"])
def embed_kernel(
    p_token_ids,  # [T]
    p_table,  # [vocab, H]
    p_out,  # [T, H]
    row_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # In this order, because later kernels read the integers of the step's rows before they wait.
    wait_for_previous(PDL)
    let_next_start(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(p_token_ids + i_token)
    b_row = tl.load(p_table + token_id * row_stride + column, mask=column < H)
    tl.store(p_out + i_token * H + column, b_row, mask=column < H)
