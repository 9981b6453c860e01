"""The CUDA C++ kernels on a CPU, thread by thread (`cuda_emulator.py`). Their tests on a GPU have
more shapes; these find a wrong index where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cuda_emulator import COMPILER, emulated
from kernel_checks import HAS_GPU
from penstock.ops.cuda import quantized, skinny_gemm
from penstock.ops.product import Product
from penstock.ops.tiles import TiledRows
from penstock.ops.triton import moe
from penstock.weights.packing import pack
from quantized_codes import (
    expected_experts,
    expert_inputs,
    experts_of,
    first_matrix,
    make_codes,
    tiled,
    weight_of,
)

pytestmark = pytest.mark.skipif(
    HAS_GPU or COMPILER is None, reason="kernels run compiled here, or there is no C++ compiler"
)
DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
KINDS = ["zeros", "Q4_K", "Q6_K", "int8", "fp8"]  # one of every layout


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with emulated():
        yield


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(seen: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (seen.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype], f"off by {error:.4f} of the largest"


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_dequantized(kind: str, dtype: torch.dtype) -> None:
    rows = tiled(pack(make_codes(kind, 40, 768)), "cpu")
    assert isinstance(rows, TiledRows)
    seen, exact = quantized.expand(rows, dtype), rows.dequantize()
    assert (seen.float() - exact).abs().max() <= exact.abs().max() * 2**-8
    ids = torch.tensor([39, 3, 3, 0])
    assert torch.equal(quantized.expand(rows, dtype, ids), seen[ids])


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_expanded_rows(
    kind: str, num_tokens: int, dtype: torch.dtype
) -> None:
    """With a norm inside for one token, a residual for more; unquantized rows follow."""
    N, K = 72, 512
    rows, plain = tiled(pack(make_codes(kind, N, K)), "cpu"), numbers(24, K, dtype=dtype) / 20
    weight = weight_of(rows, plain, dtype=dtype)
    x, norm = numbers(num_tokens, K, dtype=dtype, seed=1), numbers(K, seed=2)
    bias, residual = (numbers(n, N + 24, dtype=dtype, seed=n) for n in (3, num_tokens))
    is_alone = num_tokens == 1
    product = Product(
        x,
        weight.values,
        torch.float32 if is_alone else dtype,
        bias=bias[0],
        residual=None if is_alone else residual,
        norm_weight=norm if is_alone else None,
        eps=1e-6,
    )
    seen = quantized.multiply_parts(weight.parts, product)
    wide = x.double()
    if is_alone:
        wide = torch.nn.functional.rms_norm(wide, (K,), norm.double(), eps=1e-6)
    expected = wide @ weight.dequantize().double().T + bias[0].double()
    assert_near(seen, expected if is_alone else expected + residual.double(), dtype)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_that_stage_tokens_are_those_of_the_expanded_rows(
    kind: str, dtype: torch.dtype
) -> None:
    N, K, T = 160, 512, 40
    rows, plain = tiled(pack(make_codes(kind, N, K)), "cpu"), numbers(16, K, dtype=dtype) / 20
    assert isinstance(rows, TiledRows)
    x, residual = numbers(T, K, dtype=dtype), numbers(T, N + 16, dtype=dtype, seed=1)
    out = torch.empty(T, N + 16, dtype=dtype)
    quantized.multiply_gemm(x, rows, out, plain=plain, residual=residual)
    exact = torch.cat([rows.dequantize(), plain.float()]).double()
    assert_near(out, x.double() @ exact.T + residual.double(), dtype)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 7, 22])  # each expert apart, scanned, listed
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_those_of_the_expanded_rows(
    kind: str, num_tokens: int, dtype: torch.dtype
) -> None:
    E, k, I, H = 6, 2, 128, 256
    gate_up = experts_of(kind, E, 2 * I, H, dtype, "cpu")
    down = experts_of(kind, E, H, I, dtype, "cpu") if kind[0] != "Q" else None
    down = down or experts_of("zeros", E, H, I, dtype, "cpu")
    shared = [first_matrix(one, dtype) for one in (gate_up, down)]
    x, residual = expert_inputs(num_tokens, gate_up, dtype, "cpu")
    seeded = torch.Generator().manual_seed(num_tokens)
    ids = torch.stack([torch.randperm(E, generator=seeded)[:k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, k, generator=seeded)
    shared_weight = torch.rand(num_tokens, 1, generator=seeded)
    given = (x, weights, ids, gate_up, down, residual, shared_weight, *shared)
    seen = moe.sparse_mlp(*given[:2], ids.int(), *given[3:])
    assert_near(seen, expected_experts(*given), dtype)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_skinny_products_are_those_of_float64(has_norm: bool, dtype: torch.dtype) -> None:
    N, K = 40, 512
    x, weight = numbers(3, K, dtype=dtype), numbers(N, K, dtype=dtype, seed=1)
    norm, residual = numbers(K, seed=2), numbers(3, N, dtype=dtype, seed=3)
    product = Product(x, weight, dtype, residual=residual, norm_weight=norm if has_norm else None)
    tile = {"row_tiles": 2, "num_warps": 4, "held": 4, "blocks": 1}
    assert skinny_gemm.can_multiply(product)
    seen = skinny_gemm.multiply_skinny(product, tile)
    wide = x.double()
    if has_norm:
        wide = torch.nn.functional.rms_norm(wide, (K,), norm.double(), eps=0.0)
    assert_near(seen, wide @ weight.double().T + residual.double(), dtype)
