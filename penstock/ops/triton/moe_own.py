# mypy: disable-error-code="no-untyped-def"
"""Maps the chosen experts to those of one rank. Knows nothing of weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.launch import (
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)


def own_experts(
    weights: Tensor,  # [T, k] float32
    ids: Tensor,  # [T, k] int32
    first: int,
    count: int,
) -> tuple[Tensor, Tensor]:  # [T, k], [T, k]
    num_tokens, k = ids.shape
    own_weights, own_ids = torch.empty_like(weights), torch.empty_like(ids)
    _own_experts_kernel[(num_tokens,)](
        weights,
        ids,
        own_weights,
        own_ids,
        FIRST=first,
        COUNT=count,
        TOP_K=k,
        BLOCK_K=next_power_of_2(k),
        NUM_LOWEST=min(2 * k, count),
        num_warps=1,
        **launch_options(ids.device),
    )
    return own_weights, own_ids


@triton.jit
def _own_experts_kernel(
    p_weights,
    p_ids,
    p_own_weights,
    p_own_ids,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_LOWEST: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    slots = tl.arange(0, BLOCK_K)
    is_inside = slots < TOP_K
    at = tl.program_id(0).to(tl.int64) * TOP_K + slots
    wait_for_previous(PDL)
    local = tl.load(p_ids + at, mask=is_inside, other=0).to(tl.int32) - FIRST
    b_weights = tl.load(p_weights + at, mask=is_inside, other=0.0)
    is_own = is_inside & (local >= 0) & (local < COUNT)
    is_other = (is_inside & (is_own == 0)).to(tl.int32)
    place = tl.cumsum(is_other, 0) - 1
    result = tl.where(is_own, local, 0)
    num_spare = 0
    for expert in tl.static_range(NUM_LOWEST):
        is_used = tl.sum((is_own & (local == expert)).to(tl.int32), 0)
        takes = (is_other > 0) & (place == num_spare) & (is_used == 0)
        result = tl.where(takes, expert, result)
        num_spare += tl.where(is_used == 0, 1, 0)
    tl.store(p_own_weights + at, tl.where(is_own, b_weights, 0.0), mask=is_inside)
    tl.store(p_own_ids + at, result.to(p_own_ids.dtype.element_ty), mask=is_inside)
