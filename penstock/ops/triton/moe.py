"""Sparse feed-forward on a GPU: which form of the experts a number of tokens deserves."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.triton import experts_grouped, experts_tensor, experts_vector, moe_route
from penstock.ops.triton.launch import CompileCase
from penstock.ops.triton.moe_route import norm_route
from penstock.ops.triton.tuning import Tile, bucket, choose
from penstock.ops.weight import Weight

__all__ = ["candidates", "compile_cases", "norm_route", "sparse_mlp"]

VECTOR, TENSOR, GROUPED = 0, 1, 2  # the "form" of a tile

VECTOR_TOKENS = 4  # of more, so many choose the same experts that reading those once is better
TENSOR_PAIRS = 16  # of an expert, on average: more fill tiles whose height is theirs
MAX_TOKENS = 32768  # at a time: what the pairs leave in between stays below two GB


def sparse_mlp(
    x: Tensor,  # [T, H]  normed
    weights: Tensor,  # [T, k] float32
    ids: Tensor,  # [T, k]  those of a token differ
    gate_up: Weight,  # [E, 2I, H]
    down: Weight,  # [E, H, I]
    residual: Tensor,  # [T, H]
    shared_weight: Tensor | None = None,  # [T, 1] float32
    shared_gate_up: Weight | None = None,  # [2I', H]
    shared_down: Weight | None = None,  # [H, I']
    counters: Tensor | None = None,  # of `new_counters`; without them a kernel makes its own
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, H]
    if len(x) > MAX_TOKENS:
        parts = [slice(first, first + MAX_TOKENS) for first in range(0, len(x), MAX_TOKENS)]
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
                deterministic=deterministic,
            )
            for some in parts
        ]
        return torch.cat(outs)
    assert x.is_contiguous()
    assert residual.is_contiguous()
    weights, ids = weights.contiguous(), ids.contiguous()
    out = torch.empty_like(residual)
    shared = (
        shared_weight,
        None if shared_gate_up is None else shared_gate_up.values,
        None if shared_down is None else shared_down.values,
    )
    arguments = (out, x, weights, ids, gate_up.values, down.values, residual, *shared)
    form = TENSOR if deterministic else _choose_form(x, ids, down)
    if form == VECTOR:
        experts_vector.run(*arguments)
    elif form == TENSOR:
        experts_tensor.run(*arguments, deterministic=deterministic)
    else:
        experts_grouped.run(*arguments, counters)
    return out


def _choose_form(x: Tensor, ids: Tensor, down: Weight) -> int:
    num_experts, width, inner_width = down.shape
    num_tokens, k = ids.shape
    rule = TENSOR if bucket(num_tokens) * k <= TENSOR_PAIRS * num_experts else GROUPED
    if num_tokens <= VECTOR_TOKENS:
        rule = VECTOR
    shape = (num_experts, k, inner_width, width)
    return choose("sparse_mlp", shape, num_tokens, {"form": rule}, x.device)["form"]


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """What `penstock tune` tries: shape is (E, H) for the router, (E, k, I, H) for experts. Nothing
    for the kernels of other files.
    """
    if kernel == "sparse_mlp":
        return [
            {"form": form} for form in ((VECTOR, TENSOR) if num_tokens <= 64 else (TENSOR, GROUPED))
        ]
    if kernel in ("route_vector", "route_tile", "route_whole"):
        return moe_route.candidates(kernel, shape, num_tokens)
    if kernel in ("expert_gate_up_vector", "expert_down_vector"):
        return experts_vector.candidates(kernel, shape, num_tokens)
    if kernel in ("expert_gate_up_tensor", "expert_down_tensor"):
        return experts_tensor.candidates(kernel, shape, num_tokens)
    if kernel in ("expert_list_grouped", "expert_gate_up_grouped", "expert_down_grouped"):
        return experts_grouped.candidates(kernel, shape, num_tokens)
    return []


def compile_cases() -> list[CompileCase]:
    files = (moe_route, experts_vector, experts_tensor, experts_grouped)
    return [case for file in files for case in file.compile_cases()]
