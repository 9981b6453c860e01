"""Sparse feed-forward on a GPU: picks the kernels of the experts by the number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.triton import moe_gemv, moe_grouped_gemm, moe_route, moe_small_gemm
from penstock.ops.triton.launch import CompileCase
from penstock.ops.triton.moe_route import norm_route
from penstock.ops.triton.tuning import Tile, bucket, choose
from penstock.ops.weight import Weight

__all__ = ["candidates", "compile_cases", "norm_route", "sparse_mlp"]

GEMV, SMALL_GEMM, GROUPED_GEMM = 0, 1, 2  # the "form" of a tile

GEMV_TOKENS = 4  # of more, so many choose the same experts that reading those once is better
SMALL_GEMM_PAIRS = 16  # of an expert, on average: more fill tiles whose height is theirs
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
    form = SMALL_GEMM if deterministic else _choose_form(x, ids, down)
    if form == GEMV:
        moe_gemv.run(*arguments)
    elif form == SMALL_GEMM:
        moe_small_gemm.run(*arguments, deterministic=deterministic)
    else:
        moe_grouped_gemm.run(*arguments, counters)
    return out


def _choose_form(x: Tensor, ids: Tensor, down: Weight) -> int:
    num_experts, width, inner_width = down.shape
    num_tokens, k = ids.shape
    rule = SMALL_GEMM if bucket(num_tokens) * k <= SMALL_GEMM_PAIRS * num_experts else GROUPED_GEMM
    if num_tokens <= GEMV_TOKENS:
        rule = GEMV
    shape = (num_experts, k, inner_width, width)
    return choose("sparse_mlp", shape, num_tokens, {"form": rule}, x.device)["form"]


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """What `penstock tune` tries: shape is (E, H) for the router, (E, k, I, H) for experts. Nothing
    for the kernels of other files.
    """
    if kernel == "sparse_mlp":
        return [
            {"form": form}
            for form in ((GEMV, SMALL_GEMM) if num_tokens <= 64 else (SMALL_GEMM, GROUPED_GEMM))
        ]
    if kernel in ("route_gemv", "route_tile", "route_whole"):
        return moe_route.candidates(kernel, shape, num_tokens)
    if kernel in ("moe_gate_up_gemv", "moe_down_gemv"):
        return moe_gemv.candidates(kernel, shape, num_tokens)
    if kernel in ("moe_gate_up_small_gemm", "moe_down_small_gemm"):
        return moe_small_gemm.candidates(kernel, shape, num_tokens)
    if kernel in ("moe_permute", "moe_gate_up_grouped_gemm", "moe_down_grouped_gemm"):
        return moe_grouped_gemm.candidates(kernel, shape, num_tokens)
    return []


def compile_cases() -> list[CompileCase]:
    files = (moe_route, moe_gemv, moe_small_gemm, moe_grouped_gemm)
    return [case for file in files for case in file.compile_cases()]
