# mypy: disable-error-code="no-untyped-def"
"""GEMMs of activations and a dense weight: picks the kernel by the number of tokens.

GEMV multiplies up to 4 tokens in registers. SKINNY, CUDA C++ that not every machine can compile
(`ops/cuda`), feeds tensor cores directly from memory for 3 or 4. SMALL_GEMM runs a batch on tensor
cores while it is bound by memory; CUBLAS takes over where arithmetic is the bound. GEMV fuses the
norm or activation before the GEMM, SKINNY the norm, because their activations are in registers
anyway. Otherwise it is a separate kernel: tensor cores would wait while each tile of activations
passes through registers, and every block would compute silu again.

Quantized weights have separate kernels (`ops/cuda/quantized.py`) for up to 64 tokens; for more they
are dequantized first, or multiplied with 8-bit tokens if tensor cores support it (`fp8.py`). Logits
of a batch with a head in FP8 have a kernel of their own (`fp8_logits.py`).
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.cuda import quantized
from penstock.ops.cuda.program import is_available
from penstock.ops.cuda.skinny_gemm import (
    can_multiply,
    multiply_skinny,
    skinny_candidates,
    skinny_rule,
)
from penstock.ops.float8 import RoundedTokens, rounds_tokens
from penstock.ops.product import Product
from penstock.ops.tiles import STEP
from penstock.ops.triton import fp8, fp8_logits
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    num_processors,
    wait_for_previous,
)
from penstock.ops.triton.matmul_gemv import (
    gemv_candidates,
    gemv_rule,
    multiply_gemv,
)
from penstock.ops.triton.matmul_product import load_activations
from penstock.ops.triton.matmul_small_gemm import (
    FIXED_TILE,
    multiply_small_gemm,
    small_gemm_candidates,
    small_gemm_rule,
)
from penstock.ops.triton.norm import rms_norm
from penstock.ops.tuning import Tile, bucket, choose
from penstock.ops.weight import Weight

GEMV, SMALL_GEMM, CUBLAS, SKINNY = 0, 1, 2, 3  # the "form" field of a tile

GEMV_TOKENS = 4
SKINNY_TOKENS = 4  # or three: for fewer, GEMV reaches memory bandwidth
# For an N as large as a head's, GEMV is no longer memory-bound from three tokens on.
LARGE_N = 1 << 16
SMALL_N = 1 << 12  # up to here K is split over programs
SMALL_GEMM_TOKENS = 64  # above, CUBLAS is faster, unless N is small or that of a head
SWIGLU_COLUMNS = 1024
PIECE_BYTES = 32 << 20  # of a head's rows, dequantized at a time


def linear(
    x: Tensor | RoundedTokens,  # [T, K]
    weight: Weight,  # [N, K]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N], consumed: the result may overwrite it
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    if isinstance(x, RoundedTokens):
        return fp8.multiply_rounded(x, weight.parts, bias, residual)
    product = Product(x, weight.values, x.dtype, bias=bias, residual=residual)
    return _multiply("linear", product, weight, deterministic)


def norm_linear(
    x: Tensor,  # [T, K]
    norm_weight: Tensor,  # [K] float32
    eps: float,
    weight: Weight,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    out_dtype: torch.dtype | None = None,
    ends_in_swiglu: bool = False,  # if `fuses_swiglu`
    deterministic: bool = False,
) -> Tensor:  # [T, N], or [T, N / 2]
    product = Product(
        x,
        weight.values,
        out_dtype or x.dtype,
        bias=bias,
        norm_weight=norm_weight,
        eps=eps,
        ends_in_swiglu=ends_in_swiglu,
    )
    if ends_in_swiglu:
        return _multiply_codes(product, weight)
    return _multiply("norm_linear", product, weight, deterministic)


def fuses_swiglu(x: Tensor, weight: Weight, *, deterministic: bool = False) -> bool:
    return not deterministic and quantized.can_end_in_swiglu(weight.parts, x)


def swiglu_linear(
    gate_up: Tensor,  # [T, 2F]  gate, then up; or [T, F], after `norm_linear` applied swiglu
    weight: Weight,  # [N, F]
    residual: Tensor | None = None,  # [T, N], consumed: the result may overwrite it
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    is_swiglu = gate_up.shape[1] > weight.shape[1]
    product = Product(gate_up, weight.values, gate_up.dtype, residual=residual, is_swiglu=is_swiglu)
    return _multiply("swiglu_linear", product, weight, deterministic)


def _multiply(kernel: str, product: Product, weight: Weight, deterministic: bool) -> Tensor:
    num_tokens, device = product.num_tokens, product.x.device
    if num_tokens == 0:
        return product.new_out()
    if weight.parts:
        is_rounded = not deterministic and product.out_dtype == product.x.dtype
        if is_rounded and rounds_tokens(weight.parts, product.x, num_tokens):
            return fp8.multiply_parts(weight.parts, product)
        if not deterministic and fp8_logits.can_multiply(weight.parts, product):
            return fp8_logits.multiply_parts(weight.parts, _prepare(product))
        if not deterministic and quantized.can_multiply_parts(weight.parts, product):
            return _multiply_codes(product, weight)
        if not deterministic and product.out_dtype != product.x.dtype:
            return _multiply_in_pieces(_prepare(product), weight)
        product = replace(product, weight=quantized.expand_parts(weight.parts, product.x.dtype))
    if deterministic:
        return multiply_small_gemm(_prepare(product), FIXED_TILE)
    rule = _rule(product.shape, bucket(num_tokens), device)
    tile = choose(kernel, product.shape, num_tokens, rule, device)
    if tile["form"] == SKINNY:
        alone = _prepare(product) if product.is_swiglu else product
        if can_multiply(alone):
            return multiply_skinny(alone, tile)
        tile = _triton_rule(product.shape, bucket(num_tokens), device)
    if tile["form"] == GEMV:
        return multiply_gemv(product, tile)
    if tile["form"] == CUBLAS:
        return _multiply_by_cublas(_prepare(product))
    return multiply_small_gemm(_prepare(product), tile)


def _multiply_codes(product: Product, weight: Weight) -> Tensor:
    if not quantized.can_stage(weight.parts, product):
        product = _prepare(product)
    return quantized.multiply_parts(weight.parts, product)


def _multiply_in_pieces(product: Product, weight: Weight) -> Tensor:
    """Logits: dequantized at once, a head would take a GB of temporary memory."""
    out, x = product.new_out(), product.x
    most = max(STEP, PIECE_BYTES // (x.element_size() * x.shape[1]) // STEP * STEP)
    for own, values in quantized.expand_in_pieces(weight.parts, x.dtype, most):
        multiply_unrounded(x, values, out[:, own])
    if product.bias is not None:
        out += product.bias
    return out


@functools.cache
def _rule(shape: tuple[int, int], num_tokens: int, device: torch.device) -> Tile:
    if num_tokens == SKINNY_TOKENS and is_available(device):
        skinny = skinny_rule(shape, num_processors(device))
        if skinny is not None:
            return {"form": SKINNY, **skinny}
    return _triton_rule(shape, num_tokens, device)


@functools.cache
def _triton_rule(shape: tuple[int, int], num_tokens: int, device: torch.device) -> Tile:
    if num_tokens <= (2 if shape[0] >= LARGE_N else GEMV_TOKENS):
        return {"form": GEMV, **gemv_rule(shape, num_tokens, device)}
    is_usual = SMALL_N < shape[0] < LARGE_N
    if num_tokens > (SMALL_GEMM_TOKENS if is_usual else 2 * SMALL_GEMM_TOKENS):
        return {"form": CUBLAS}
    return {"form": SMALL_GEMM, **small_gemm_rule(shape, num_tokens, device)}


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles that `penstock tune` measures for a kernel of this file."""
    tiles: list[Tile] = [{"form": GEMV, **tile} for tile in gemv_candidates(shape, num_tokens)]
    if num_tokens > 1:
        tiles += [{"form": SMALL_GEMM, **tile} for tile in small_gemm_candidates(shape, num_tokens)]
    tiles += [{"form": SKINNY, **tile} for tile in skinny_candidates(shape, num_tokens)]
    return [*tiles, {"form": CUBLAS}] if num_tokens > 16 else tiles


def _prepare(product: Product) -> Product:
    """The same GEMM after its norm or activation was computed."""
    if product.norm_weight is not None:
        return replace(
            product, x=rms_norm(product.x, product.norm_weight, product.eps), norm_weight=None
        )
    return replace(product, x=_swiglu(product.x), is_swiglu=False) if product.is_swiglu else product


def _multiply_by_cublas(product: Product) -> Tensor:
    if product.residual is not None and product.bias is None:
        return product.residual.addmm_(
            product.x, product.weight.t()
        )  # anything else would be copied first
    if product.out_dtype == product.x.dtype:
        out = F.linear(product.x, product.weight, product.bias)
    else:
        out = product.new_out()
        multiply_unrounded(product.x, product.weight, out)
        if product.bias is not None:
            out += product.bias
    if product.residual is not None:
        out += product.residual
    return out


def multiply_unrounded(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """cuBLAS with float32 output: rounded to the inputs' dtype, close logits would tie."""
    if x.is_cuda and x.dtype == weight.dtype != out.dtype:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    else:
        out.copy_(F.linear(x.to(out.dtype), weight.to(out.dtype)))


def _swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2F] -> [T, F] : silu(gate) * up"""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    stride = gate_up.stride(0) if num_tokens > 1 else 2 * width
    grid = (num_tokens, cdiv(width, SWIGLU_COLUMNS))
    _swiglu_kernel[grid](
        gate_up,
        out,
        stride,
        K=width,
        BLOCK_K=SWIGLU_COLUMNS,
        num_warps=4,
        **launch_options(gate_up.device),
    )
    return out


@triton.jit
def _swiglu_kernel(p_x, p_out, x_stride, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    b_x = load_activations(
        p_x + i_token * x_stride + columns, columns < K, K, True, K % BLOCK_K == 0
    )
    tl.store(p_out + i_token * K + columns, b_x.to(p_out.dtype.element_ty), mask=columns < K)
