"""Sparse feed-forward on a GPU: which form of the experts a number of tokens deserves."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.triton import experts_tensor, experts_vector, moe_route
from penstock.ops.triton.launch import CompileCase
from penstock.ops.triton.moe_route import norm_route
from penstock.ops.triton.tuning import Tile, choose

__all__ = ["candidates", "compile_cases", "norm_route", "sparse_mlp"]

VECTOR_TOKENS = 4  # of more, so many choose the same experts that reading those once is better
MAX_TOKENS = 8192  # at a time: what the pairs leave in between stays below a GB


def sparse_mlp(
    x: Tensor,  # [T, H]  normed
    weights: Tensor,  # [T, k] float32
    ids: Tensor,  # [T, k]
    gate_up: Tensor,  # [E, 2I, H]
    down: Tensor,  # [E, H, I]
    residual: Tensor,  # [T, H]
    shared_weight: Tensor | None = None,  # [T, 1] float32
    shared_gate_up: Tensor | None = None,  # [2I', H]
    shared_down: Tensor | None = None,  # [H, I']
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, H]
    assert x.is_contiguous()
    assert residual.is_contiguous()
    out = torch.empty_like(residual)
    num_experts, width, inner_width = down.shape
    shape = (num_experts, ids.shape[1], inner_width, width)
    form = choose("sparse_mlp", shape, len(x), {"is_vector": len(x) <= VECTOR_TOKENS}, x.device)
    experts = (gate_up, down)
    shared = (shared_gate_up, shared_down)
    if form["is_vector"] and not deterministic:
        experts_vector.run(out, x, weights, ids, *experts, residual, shared_weight, *shared)
        return out
    for first in range(0, len(x), MAX_TOKENS):
        some = slice(first, first + MAX_TOKENS)
        experts_tensor.run(
            out[some],
            x[some],
            weights[some],
            ids[some],
            *experts,
            residual[some],
            None if shared_weight is None else shared_weight[some],
            *shared,
            deterministic=deterministic,
        )
    return out


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """What `penstock tune` tries: shape is (E, H) for the router, (E, k, I, H) for experts. Nothing for the
    kernels of other files."""
    if kernel == "sparse_mlp":
        return [{"is_vector": 0}, {"is_vector": 1}]
    if kernel in ("route_vector", "route_tile"):
        return moe_route.candidates(kernel, shape, num_tokens)
    if kernel in ("expert_gate_up_vector", "expert_down_vector"):
        return experts_vector.candidates(kernel, shape, num_tokens)
    if kernel in ("expert_gate_up_tensor", "expert_down_tensor"):
        return experts_tensor.candidates(kernel, shape, num_tokens)
    return []


def compile_cases() -> list[CompileCase]:
    return moe_route.compile_cases() + experts_vector.compile_cases() + experts_tensor.compile_cases()
