"""MoE on a GPU: picks the expert kernels by the number of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.ops.cuda import quantized
from penstock.ops.cuda.program import is_available
from penstock.ops.cuda.quantized_gemm import pair_tiles
from penstock.ops.float8 import rounded_experts
from penstock.ops.triton import moe_fp8_gemm, moe_gemv, moe_grouped_gemm, moe_route, moe_small_gemm
from penstock.ops.triton.matmul import linear, swiglu_linear
from penstock.ops.triton.moe_own import own_experts
from penstock.ops.triton.moe_permute import list_pairs
from penstock.ops.triton.moe_route import norm_route
from penstock.ops.tuning import Tile, bucket, choose
from penstock.ops.weight import Weight

__all__ = ["candidates", "norm_route", "own_experts", "sparse_mlp"]

GEMV, SMALL_GEMM, GROUPED_GEMM = 0, 1, 2  # the "form" field of a tile

# With more tokens, so many share experts that reading those once is faster.
GEMV_TOKENS = quantized.PAIR_TOKENS
MOST_PAIRS = 192  # per quantized expert, on average: with more, dequantizing it once is faster
SMALL_GEMM_PAIRS = 16  # per expert, on average: with more, tall tiles are full
MAX_TOKENS = 32768  # at a time: intermediate activations stay below two GB


def sparse_mlp(
    x: Tensor,  # [T, H]  normed
    weights: Tensor,  # [T, k] float32
    ids: Tensor,  # [T, k]  those of a token differ, unless their weight is 0
    gate_up: Weight,  # [E, 2I, H]
    down: Weight,  # [E, H, I]
    residual: Tensor,  # [T, H]
    shared_weight: Tensor | None = None,  # [T, 1] float32
    shared_gate_up: Weight | None = None,  # [2I', H]
    shared_down: Weight | None = None,  # [H, I']
    counters: Tensor | None = None,  # from `new_counters`; without them a kernel allocates its own
    *,
    slots: Tensor | None = None,  # [E]  index of each expert in the stacks; None: in order
    deterministic: bool = False,
) -> Tensor:  # [T, H]
    if len(x) > MAX_TOKENS:
        chunks = [slice(first, first + MAX_TOKENS) for first in range(0, len(x), MAX_TOKENS)]
        outs = [
            sparse_mlp(
                x[some],
                weights[some],
                ids[some],
                gate_up,
                down,
                residual[some],
                None if shared_weight is None else shared_weight[some],
                shared_gate_up,
                shared_down,
                counters,
                slots=slots,
                deterministic=deterministic,
            )
            for some in chunks
        ]
        return torch.cat(outs)
    assert x.is_contiguous()
    assert residual.is_contiguous()
    weights, ids = weights.contiguous(), ids.contiguous()
    # The number of slots selects no kernel: a larger expert cache gives the same tokens.
    num_experts = down.shape[0] if slots is None else len(slots)
    expert_ids, ids = ids, ids if slots is None else slots[ids.long()]
    out = torch.empty_like(residual)
    stored = (gate_up, down, shared_gate_up, shared_down)
    if any(weight is not None and weight.parts for weight in stored) and not deterministic:
        shared_parts = (shared_gate_up, shared_down)
        pairs_per_expert = ids.numel() / num_experts
        rounded = rounded_experts(x, pairs_per_expert, (gate_up, down), shared_parts)
        experts = None if rounded else _quantized_experts(x, ids, num_experts, *stored)
        if rounded or experts is not None:
            has_shared = len(rounded) == 4 or (experts is not None and experts.has_shared)
            if shared_weight is not None and not has_shared:  # stored in another format
                residual = _add_shared(x, residual, shared_weight, shared_gate_up, shared_down)
                shared_weight = None
            if experts is None:
                moe_fp8_gemm.run(out, x, weights, ids, rounded, residual, shared_weight, counters)
            else:
                pairs = (x, weights, ids, residual, shared_weight, counters)
                _run_quantized(out, experts, pairs_per_expert, *pairs)
            return out
    form = SMALL_GEMM if deterministic else _choose_form(x, ids, num_experts, down)
    plain = [_plain_values(weight, x.dtype) for weight in (shared_gate_up, shared_down)]
    shared = (shared_weight, plain[0], plain[1])
    if form == GROUPED_GEMM:  # which dequantizes experts itself, a few at a time
        is_gathered = slots is not None and gate_up.parts and down.parts  # others are read in place
        own_ids, own_slots = (expert_ids, slots) if is_gathered else (ids, None)
        given = (gate_up, down, residual, *shared, num_experts, counters)
        moe_grouped_gemm.run(out, x, weights, own_ids, own_slots, *given)
        return out
    values = [_plain_values(weight, x.dtype) for weight in (gate_up, down)]
    arguments = (out, x, weights, ids, values[0], values[1], residual, *shared)
    if form == GEMV:
        moe_gemv.run(*arguments, num_experts)
    else:
        moe_small_gemm.run(*arguments, num_experts, deterministic=deterministic)
    return out


def _add_shared(
    x: Tensor, residual: Tensor, weight: Tensor, gate_up: Weight | None, down: Weight | None
) -> Tensor:
    assert gate_up is not None
    assert down is not None
    shared = swiglu_linear(linear(x, gate_up), down)
    return (residual.float() + shared.float() * weight).to(residual.dtype)


def _plain_values(weight: Weight | None, dtype: torch.dtype) -> Any:
    if weight is None or not weight.parts:
        return None if weight is None else weight.values
    return quantized.expand_parts(weight.parts, dtype)


def _quantized_experts(
    x: Tensor,
    ids: Tensor,
    num_experts: int,
    gate_up: Weight,
    down: Weight,
    shared_gate_up: Weight | None,
    shared_down: Weight | None,
) -> quantized.Experts | None:
    """With the shared one, if it has the same format. None: they are dequantized, because there are
    many tokens or an expert's rows have several formats.
    """
    num_tokens, k = ids.shape
    if num_tokens * k > MOST_PAIRS * num_experts or x.dtype not in quantized.DTYPES:
        return None
    routed = [one.parts[0] for one in (gate_up, down) if len(one.parts) == 1]
    if len(routed) < 2 or not is_available(x.device):
        return None
    shared = [one.parts for one in (shared_gate_up, shared_down) if one is not None]
    together = [*routed, *(parts[0] for parts in shared if len(parts) == 1)]
    return quantized.Experts.of(together, k) or quantized.Experts.of(routed, k)


def _run_quantized(
    out: Tensor,
    experts: quantized.Experts,
    pairs_per_expert: float,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor,
    shared_weight: Tensor | None,
    counters: Tensor | None,
) -> None:
    if len(x) <= GEMV_TOKENS:
        experts.run_pairs(out, x, weights, ids, residual, shared_weight)
        return
    slots, num_stacked = experts.slots, experts.num_experts
    token_tiles = pair_tiles(pairs_per_expert)
    dtype = torch.float32 if token_tiles == 1 else x.dtype  # of a prompt's pairs: half the bytes
    outputs = torch.empty(len(x) * slots, experts.width, dtype=dtype, device=x.device)
    if experts.can_scan(ids):
        experts.run_scanned(x, ids, outputs)
    else:
        height = quantized.TOKENS * token_tiles
        order, tiles = list_pairs(ids, num_stacked, slots, height, counters)
        if token_tiles == 1:
            experts.run_listed(x, order, tiles, outputs)
        else:
            experts.run_many(x, order, tiles, outputs, token_tiles)
    moe_grouped_gemm.add_pairs(out, outputs, weights, shared_weight, residual)


def _choose_form(x: Tensor, ids: Tensor, num_experts: int, down: Weight) -> int:
    """For unquantized experts. Quantized ones with many tokens are never dequantized all at
    once.
    """
    (num_tokens, k), (_, width, inner_width) = ids.shape, down.shape
    rule = SMALL_GEMM if bucket(num_tokens) * k <= SMALL_GEMM_PAIRS * num_experts else GROUPED_GEMM
    if num_tokens <= GEMV_TOKENS:
        rule = GEMV
    elif down.parts:
        return GROUPED_GEMM
    shape = (num_experts, k, inner_width, width)
    return choose("sparse_mlp", shape, num_tokens, {"form": rule}, x.device)["form"]


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles that `penstock tune` tries: shape is (E, H) for the router, (E, k, I, H) for
    experts. None for the kernels of other files.
    """
    if kernel == "sparse_mlp":
        return [
            {"form": form}
            for form in ((GEMV, SMALL_GEMM) if num_tokens <= 64 else (SMALL_GEMM, GROUPED_GEMM))
        ]
    if kernel in ("route_gemv", "route_split"):
        return moe_route.candidates(kernel, shape, num_tokens)
    if kernel in ("moe_gate_up_gemv", "moe_down_gemv"):
        return moe_gemv.candidates(kernel, shape, num_tokens)
    if kernel in ("moe_gate_up_small_gemm", "moe_down_small_gemm"):
        return moe_small_gemm.candidates(kernel, shape, num_tokens)
    if kernel in ("moe_permute", "moe_gate_up_grouped_gemm", "moe_down_grouped_gemm"):
        return moe_grouped_gemm.candidates(kernel, shape, num_tokens)
    return []
