"""GEMMs with fused operations: norm or activation before, residual after.

With `deterministic` the result of a token does not depend on the other tokens of the step: rows are
multiplied in tiles of one fixed height, because a BLAS picks its summation order by shape, and some
by the position within it. Without `out_dtype`, results have the dtype of the inputs.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.cpu import decode, few_tokens, skinny_gemm
from penstock.ops.cpu import quantized as cpu_quantized
from penstock.ops.float8 import RoundedTokens, round_tokens, rounds_tokens
from penstock.ops.reference import packed
from penstock.ops.reference.activation import silu
from penstock.ops.reference.norm import norm_tokens
from penstock.ops.tiles import TiledRows
from penstock.ops.weight import Part, Weight

TILE = 16
WIDENED_ELEMENTS = 2**20  # of a weight, widened at a time: 4 MB fit a cache


def linear(
    x: Tensor | RoundedTokens,  # [T, K]
    weight: Weight,  # [N, K]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N], consumed: the result may overwrite it
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    if isinstance(x, RoundedTokens):
        x = x.dequantize()
    if few_tokens.are_few(x, deterministic) and (short := _short_of(weight)) is not None:
        return few_tokens.linear(x, short, bias, residual)
    if weight.parts:
        if _can_fuse(x, weight, deterministic):
            return cpu_quantized.multiply_fused(x, weight.parts, bias=bias, residual=residual)
        rounds = not deterministic and rounds_tokens(weight.parts, x, len(x))
        out = multiply_parts(x, weight.parts, bias, deterministic=deterministic, rounds=rounds)
        return (out if residual is None else out.add_(residual)).to(x.dtype)
    return multiply(x, weight.values, bias, residual, deterministic=deterministic)


def _short_of(weight: Weight) -> Tensor | None:
    """The values in bf16, if a kernel for a few tokens can read them."""
    if len(weight.parts) == 1 and isinstance(weight.parts[0], Tensor):
        return weight.parts[0] if few_tokens.can_multiply_narrow(weight.parts[0]) else None
    return weight.short


def _can_fuse(x: Tensor, weight: Weight, deterministic: bool) -> bool:
    return bool(weight.parts) and not deterministic and cpu_quantized.can_fuse(x, weight.parts)


def multiply_parts(
    x: Tensor,
    parts: tuple[Part, ...],
    bias: Tensor | None = None,
    *,
    deterministic: bool = False,
    rounds: bool = False,  # quantize the tokens too (`float8.py`)
) -> Tensor:  # [T, K] -> [T, N] float32
    """GEMM with rows in different formats. On a CPU with a compiler, quantized rows are multiplied
    directly; elsewhere, a few at a time are dequantized and stay in the cache.
    """
    sizes = [part.shape[0] for part in parts]
    wide, first = round_tokens(x) if rounds else x.float(), 0
    out = torch.empty(len(x), sum(sizes), device=x.device)
    for part, size in zip(parts, sizes):
        own = out if len(parts) == 1 else out[:, first : first + size]
        first += size
        if isinstance(part, Tensor) and part.dtype != x.dtype:
            own.copy_(_widened_linear(x, part, None, torch.float32, deterministic))
        elif isinstance(part, Tensor):
            own.copy_(multiply(x, part, deterministic=deterministic))
        elif isinstance(part, TiledRows):
            own.copy_(multiply(wide, part.dequantize(), deterministic=deterministic))
        elif cpu_quantized.is_available(part):
            cpu_quantized.multiply(wide, part, own, deterministic=deterministic)
        else:
            rows_at_once = max(1, WIDENED_ELEMENTS // part.num_columns)
            for begin in range(0, size, rows_at_once):
                some = part.slice(begin, min(begin + rows_at_once, size)).dequantize()
                own[:, begin : begin + rows_at_once] = multiply(
                    wide, some, deterministic=deterministic
                )
    return out if bias is None else out.add_(bias)


def multiply(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N], consumed
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    """`linear` with an unquantized matrix."""
    if deterministic:
        out = _tiled_linear(x, weight, bias)
    elif few_tokens.are_few(x, deterministic) and few_tokens.can_multiply(weight):
        return few_tokens.linear(x, weight, bias, residual)
    elif skinny_gemm.is_better(x, weight):
        return skinny_gemm.multiply(x, weight, bias, residual)
    elif packed.is_better(x, weight):
        out = packed.multiply(x, weight, bias)
    elif residual is not None and bias is None and decode.is_alone(x, deterministic):
        return decode.add_linear(residual, x, weight)
    else:
        out = F.linear(x, weight, bias)
    return out if residual is None else residual + out


def norm_linear(
    x: Tensor,  # [T, K]
    norm_weight: Tensor,  # [K] float32
    eps: float,
    weight: Weight,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    out_dtype: torch.dtype | None = None,  # without rounding to the input dtype first
    ends_in_swiglu: bool = False,  # rows are gate, then up, and the result silu(gate) * up
    deterministic: bool = False,
) -> Tensor:  # [T, N], or [T, N / 2]
    if ends_in_swiglu:
        gate_up = norm_linear(x, norm_weight, eps, weight, bias, deterministic=deterministic)
        return swiglu(gate_up, deterministic)
    if out_dtype in (None, torch.float32) and _can_fuse(x, weight, deterministic):
        return cpu_quantized.multiply_fused(x, weight.parts, norm=norm_weight, eps=eps, bias=bias)
    if out_dtype in (None, torch.float32) and few_tokens.are_few(x, deterministic):
        stored = _short_of(weight)
        if stored is None and not weight.parts and few_tokens.can_multiply(weight.values):
            stored = weight.values
        if stored is not None:
            return few_tokens.linear(x, stored, bias, norm=norm_weight, eps=eps)
    normed = norm_tokens(x, norm_weight, eps, deterministic)
    if out_dtype is None or out_dtype == x.dtype:
        return linear(normed, weight, bias, deterministic=deterministic)
    if weight.parts:
        return multiply_parts(normed, weight.parts, bias, deterministic=deterministic).to(out_dtype)
    if (
        out_dtype == torch.float32
        and not deterministic
        and skinny_gemm.is_better(normed, weight.values)
    ):
        return skinny_gemm.multiply(normed, weight.values, bias, out_dtype=out_dtype)
    return _widened_linear(normed, weight.values, bias, out_dtype, deterministic)


def fuses_swiglu(x: Tensor, weight: Weight, *, deterministic: bool = False) -> bool:
    """Whether `norm_linear` should apply swiglu to its own result: if not, the next GEMM does."""
    return False


def swiglu_linear(
    gate_up: Tensor,  # [T, 2F]  gate, then up; or [T, F], after `norm_linear` applied swiglu
    weight: Weight,  # [N, F]
    residual: Tensor | None = None,  # [T, N], consumed: the result may overwrite it
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    if gate_up.shape[1] == weight.shape[1]:
        return linear(gate_up, weight, residual=residual, deterministic=deterministic)
    if _can_fuse(gate_up, weight, deterministic):
        return cpu_quantized.multiply_fused(
            gate_up, weight.parts, is_swiglu=True, residual=residual
        )
    return linear(
        swiglu(gate_up, deterministic), weight, residual=residual, deterministic=deterministic
    )


def swiglu(gate_up: Tensor, deterministic: bool) -> Tensor:
    """[.., 2F] -> [.., F] : silu(gate) * up, float32 inside."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate, deterministic) * up.float()).to(gate_up.dtype)


def _widened_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, deterministic: bool
) -> Tensor:
    """Widens a part of the weight at a time into the same buffer, so that it stays in the cache."""
    wide_x = x.to(dtype)
    rows_at_once = max(1, min(len(weight), WIDENED_ELEMENTS // weight.shape[1]))
    wide = torch.empty(rows_at_once, weight.shape[1], dtype=dtype, device=weight.device)
    out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    for first in range(0, len(weight), rows_at_once):
        rows = weight[first : first + rows_at_once]
        own = out[:, first : first + rows_at_once]
        own.copy_(multiply(wide_x, wide[: len(rows)].copy_(rows), deterministic=deterministic))
    return out if bias is None else out.add_(bias.to(dtype))


def _tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.is_mkldnn:  # a check in an engine that is not deterministic
        weight = weight.to_dense()
    num_tokens = x.shape[0]
    height = TILE if x.is_cuda else _tile_height(*weight.shape, weight.dtype)
    padded = F.pad(x, (0, 0, 0, -num_tokens % height))
    if num_tokens <= height:
        return F.linear(padded, weight, bias)[:num_tokens]
    return torch.cat([F.linear(tile, weight, bias) for tile in padded.split(height)])[:num_tokens]


@functools.cache
def _tile_height(num_rows: int, num_columns: int, dtype: torch.dtype) -> int:
    """TILE, or 1 if this CPU's BLAS rounds a token by its position in a tile; tested with equal
    tokens.
    """
    num_rows = min(num_rows, max(1, WIDENED_ELEMENTS // num_columns))
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(num_rows, num_columns, generator=random).to(dtype)
    token = torch.randn(1, num_columns, generator=random).to(dtype)
    results = F.linear(token.repeat(TILE, 1), weight)
    return TILE if torch.equal(results, results[:1].expand_as(results)) else 1
