# mypy: disable-error-code="no-untyped-def"
"""Forbids tokens by a bitmap: reads the bits and writes -inf where one is 0. Never reads the
logits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    wait_for_previous,
)
from penstock.ops.tuning import Tile

_TILE: Tile = {"BLOCK": 4096, "num_warps": 4}


def mask_logits(
    logits: Tensor,  # [L, vocab] float32, changed in place
    rows: Tensor,  # [N] int64  rows of the logits, each at most once; others are unchanged
    # [N, words] int32 token t of row i is allowed if bit t % 32 of allowed[i, t // 32] is 1
    allowed: Tensor,
) -> Tensor:
    num_rows, vocab = len(rows), logits.shape[1]
    if num_rows:
        mask_logits_kernel[(num_rows, cdiv(vocab, _TILE["BLOCK"]))](
            logits,
            rows,
            allowed,
            vocab,
            logits.stride(0),
            allowed.stride(0),
            **_TILE,
            **launch_options(logits.device),
        )
    return logits


# Only the number of rows differs between steps, and it is in the grid.
@triton.jit(do_not_specialize_on_alignment=["p_rows", "p_allowed"])
def mask_logits_kernel(
    p_logits,  # [L, vocab]
    p_rows,  # [N]
    p_allowed,  # [N, words]
    vocab,
    logits_stride,
    allowed_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_mask = tl.program_id(0).to(tl.int64)
    row = tl.load(p_rows + i_mask)
    b_token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = b_token < vocab
    b_word = tl.load(p_allowed + i_mask * allowed_stride + b_token // 32, mask=is_inside, other=-1)
    is_forbidden = ((b_word >> (b_token % 32)) & 1) == 0
    b_lowest = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(p_logits + row * logits_stride + b_token, b_lowest, mask=is_inside & is_forbidden)
