# mypy: disable-error-code="no-untyped-def"
"""Products of activations and a dense weight, in the form that suits the number of tokens.

A few tokens take the vector form, or the direct one, which is CUDA C++ (`ops/cuda`) and not
everywhere; a batch takes the tensor form, and many tokens, where arithmetic sets the pace and not
the weight's bytes, the library's product. A norm or an activation before the product is part of the
forms for few tokens, where activations are in registers anyway. In the tensor form, tensor cores
would wait while each tile of them goes to registers and back: before it, and before the library's,
they are kernels of their own.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.cuda.few_rows import (
    can_multiply,
    few_rows_candidates,
    few_rows_rule,
    multiply_few_rows,
)
from penstock.ops.cuda.program import is_available
from penstock.ops.triton.launch import (
    CompileCase,
    cdiv,
    launch_options,
    let_next_start,
    wait_for_previous,
)
from penstock.ops.triton.matmul_product import Product, compile_case, load_activations
from penstock.ops.triton.matmul_tensor import (
    FIXED_TILE,
    multiply_tensors,
    tensor_candidates,
    tensor_compile_cases,
    tensor_rule,
)
from penstock.ops.triton.matmul_vector import (
    multiply_vectors,
    vector_candidates,
    vector_compile_cases,
    vector_rule,
)
from penstock.ops.triton.norm import rms_norm
from penstock.ops.triton.tuning import Tile, bucket, choose
from penstock.ops.weight import Weight

VECTOR, TENSOR, LIBRARY, DIRECT = 0, 1, 2, 3  # the "form" of a tile

VECTOR_TOKENS = 4
DIRECT_TOKENS = 4  # or three: fewer are multiplied in registers as quickly as the weight is read
MANY_ROWS = (
    1 << 16
)  # of a head: from three tokens on, multiplying in registers takes longer than reading
FEW_ROWS = 1 << 12  # the columns of so few are split
TENSOR_TOKENS = (
    64  # of more the library's product is quicker: not yet for few rows, nor for a head's
)
SWIGLU_COLUMNS = 1024


def linear(
    x: Tensor,  # [T, M]
    weight: Weight,  # [N, M]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N], given up: the result may take its place
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    product = Product(x, weight.values, x.dtype, bias=bias, residual=residual)
    return _multiply("linear", product, deterministic)


def norm_linear(
    x: Tensor,  # [T, M]
    norm_weight: Tensor,  # [M] float32
    eps: float,
    weight: Weight,  # [N, M]
    bias: Tensor | None = None,  # [N]
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    product = Product(
        x, weight.values, out_dtype or x.dtype, bias=bias, norm_weight=norm_weight, eps=eps
    )
    return _multiply("norm_linear", product, deterministic)


def swiglu_linear(
    gate_up: Tensor,  # [T, 2F]  gate, then up
    weight: Weight,  # [N, F]
    residual: Tensor | None = None,  # [T, N], given up: the result may take its place
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, N]
    product = Product(gate_up, weight.values, gate_up.dtype, residual=residual, is_swiglu=True)
    return _multiply("swiglu_linear", product, deterministic)


def _multiply(kernel: str, product: Product, deterministic: bool) -> Tensor:
    num_tokens, device = product.num_tokens, product.x.device
    if num_tokens == 0:
        return product.new_out()
    if deterministic:
        return multiply_tensors(_prepare(product), FIXED_TILE)
    rule = _rule(kernel, product.shape, bucket(num_tokens), device)
    tile = choose(kernel, product.shape, num_tokens, rule, device)
    if tile["form"] == DIRECT and not can_multiply(product):
        tile = _triton_rule(product.shape, bucket(num_tokens), device)
    if tile["form"] == DIRECT:
        return multiply_few_rows(product, tile)
    if tile["form"] == VECTOR:
        return multiply_vectors(product, tile)
    if tile["form"] == LIBRARY:
        return _multiply_by_library(_prepare(product))
    return multiply_tensors(_prepare(product), tile)


@functools.cache
def _rule(kernel: str, shape: tuple[int, int], num_tokens: int, device: torch.device) -> Tile:
    direct = (
        few_rows_rule(shape) if num_tokens == DIRECT_TOKENS and kernel != "swiglu_linear" else None
    )
    if direct is not None and is_available(device):
        return {"form": DIRECT, **direct}
    return _triton_rule(shape, num_tokens, device)


@functools.cache
def _triton_rule(shape: tuple[int, int], num_tokens: int, device: torch.device) -> Tile:
    if num_tokens <= (2 if shape[0] >= MANY_ROWS else VECTOR_TOKENS):
        return {"form": VECTOR, **vector_rule(shape, num_tokens, device)}
    is_usual = FEW_ROWS < shape[0] < MANY_ROWS
    if num_tokens > (TENSOR_TOKENS if is_usual else 2 * TENSOR_TOKENS):
        return {"form": LIBRARY}
    return {"form": TENSOR, **tensor_rule(shape, num_tokens, device)}


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """What is worth measuring for a kernel of this file."""
    tiles: list[Tile] = [{"form": VECTOR, **tile} for tile in vector_candidates(shape, num_tokens)]
    if num_tokens > 1:
        tiles += [{"form": TENSOR, **tile} for tile in tensor_candidates(shape, num_tokens)]
    if kernel != "swiglu_linear":
        tiles += [{"form": DIRECT, **tile} for tile in few_rows_candidates(shape, num_tokens)]
    return [*tiles, {"form": LIBRARY}] if num_tokens > 16 else tiles


def _prepare(product: Product) -> Product:
    """The same product with its norm or activation behind it."""
    if product.norm_weight is not None:
        return replace(
            product, x=rms_norm(product.x, product.norm_weight, product.eps), norm_weight=None
        )
    return replace(product, x=_swiglu(product.x), is_swiglu=False) if product.is_swiglu else product


def _multiply_by_library(product: Product) -> Tensor:
    if product.residual is not None and product.bias is None:
        return product.residual.addmm_(
            product.x, product.weight.t()
        )  # anywhere else it would be copied first
    if product.out_dtype == product.x.dtype:
        out = F.linear(product.x, product.weight, product.bias)
    else:
        out = _multiply_unrounded(product)
        if product.bias is not None:
            out += product.bias
    if product.residual is not None:
        out += product.residual
    return out


def _multiply_unrounded(product: Product) -> Tensor:
    """The library's sums as they are, in float32: rounded to the inputs' dtype first, near logits
    tie.
    """
    if product.x.is_cuda:
        return torch.mm(product.x, product.weight.t(), out_dtype=product.out_dtype)
    return F.linear(product.x.to(product.out_dtype), product.weight.to(product.out_dtype))


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
        M=width,
        BLOCK_M=SWIGLU_COLUMNS,
        num_warps=4,
        **launch_options(gate_up.device),
    )
    return out


@triton.jit
def _swiglu_kernel(p_x, p_out, x_stride, M: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_x = load_activations(
        p_x + i_token * x_stride + columns, columns < M, M, True, M % BLOCK_M == 0
    )
    tl.store(p_out + i_token * M + columns, b_x.to(p_out.dtype.element_ty), mask=columns < M)


def compile_cases() -> list[CompileCase]:
    """(kernel, signature, constexprs, options) of every form, as sizes of Qwen3.5 launch it."""
    swiglu = compile_case(_swiglu_kernel, {"M": 9216, "BLOCK_M": SWIGLU_COLUMNS}, num_warps=4)
    return [*vector_compile_cases(), *tensor_compile_cases(), swiglu]
