"""Kernels with quantized rows against GEMMs with dequantized rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import FULL_SIZE, ON_GPU, random
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.layers.linear import Linear
from penstock.ops import fuses_swiglu, linear, norm_linear, sparse_mlp, swiglu_linear
from penstock.ops.float8 import round_tokens, rounds_tokens
from penstock.ops.tiles import TiledRows
from penstock.ops.triton import matmul, moe
from penstock.ops.weight import bytes_of
from penstock.weights.packing import pack
from quantized_codes import (
    KINDS,
    TOLERANCE,
    WIDE_MOE,
    assert_near,
    check_experts,
    expert_inputs,
    experts_of,
    first_matrix,
    make_codes,
    tiled,
    weight_of,
    write_quantized,
)
from small_models import LLAMA, logprobs_of, prompt, request, run

DTYPES = [
    pytest.param(dtype, marks=ON_GPU, id=name)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
]
numbers = partial(random, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "levels"])
@pytest.mark.parametrize(("N", "K"), [(300, 768), (2048, 512), (9000, 256)])
def test_products_are_those_of_the_expanded_rows(
    dtype: torch.dtype, kind: str, N: int, K: int
) -> None:
    rows = tiled(pack(make_codes(kind, N, K)))
    assert isinstance(rows, TiledRows)
    plain = numbers(40, K, dtype=dtype) / 20
    weight = weight_of(rows, plain, dtype=dtype)
    exact = rows.dequantize().double()
    bias, norm = numbers(N + 40, dtype=dtype, seed=3), numbers(K, dtype=torch.float32, seed=4)
    for num_tokens in (1, 3, 8, 13, 40, 64, 200):
        x = numbers(num_tokens, K, dtype=dtype, seed=num_tokens)
        is_rounded = rounds_tokens(weight.parts, x, num_tokens)
        assert is_rounded == (kind == "fp8" and num_tokens > 64 and N % 128 == 0)
        check = partial(assert_near, dtype=dtype, is_rounded=is_rounded)

        def product(tokens: Tensor, is_rounded: bool = is_rounded) -> Tensor:
            taken = round_tokens(tokens.to(dtype)).double() if is_rounded else tokens
            return torch.cat([taken @ exact.T, tokens @ plain.double().T], dim=-1)

        residual = numbers(num_tokens, N + 40, dtype=dtype, seed=2)
        expected = product(x.double()) + bias.double() + residual.double()
        check(linear(x, weight, bias, residual.clone()), expected)
        normed = torch.nn.functional.rms_norm(x.double(), (K,), norm.double(), eps=1e-6)
        check(norm_linear(x, norm, 1e-6, weight), product(normed))
        logits = norm_linear(x, norm, 1e-6, weight, out_dtype=torch.float32)
        assert_near(logits, product(normed, False), dtype)
        gate_up = numbers(num_tokens, 2 * K, dtype=dtype, seed=5)
        gate, up = gate_up.double().chunk(2, dim=-1)
        check(swiglu_linear(gate_up, weight), product(torch.nn.functional.silu(gate) * up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "levels"])
@pytest.mark.parametrize(("F", "K"), [(176, 768), (9216, 2560), (1008, 4096)])
def test_gate_and_up_may_end_in_swiglu(dtype: torch.dtype, kind: str, F: int, K: int) -> None:
    rows = tiled(pack(make_codes(kind, 2 * F, K)))
    weight = weight_of(rows, dtype=dtype)
    if isinstance(rows, TiledRows) and rows.columns is not None:
        assert not fuses_swiglu(numbers(1, K, dtype=dtype), weight)
        return
    exact, norm = rows.dequantize().double(), numbers(K, dtype=torch.float32, seed=4)
    for num_tokens in (1, 2, 3, 8):
        x = numbers(num_tokens, K, dtype=dtype, seed=num_tokens)
        assert fuses_swiglu(x, weight)
        normed = torch.nn.functional.rms_norm(x.double(), (K,), norm.double(), eps=1e-6)
        gate, up = (normed @ exact.T).chunk(2, dim=-1)
        seen = norm_linear(x, norm, 1e-6, weight, ends_in_swiglu=True)
        assert_near(seen, torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("num_tokens", [50, 100, 200, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "Q6_K", "fp8"])
def test_logits_of_many_tokens_are_those_of_the_expanded_head(
    dtype: torch.dtype, kind: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 256 tokens use the codes, more use the head in pieces; tokens are never rounded."""
    monkeypatch.setattr(matmul, "PIECE_BYTES", 384 * 512 * 2)
    rows = tiled(pack(make_codes(kind, 1024 if kind == "fp8" else 1000, 512)))
    weight, norm = weight_of(rows, dtype=dtype), numbers(512, dtype=torch.float32, seed=4)
    x = numbers(num_tokens, 512, dtype=dtype, seed=num_tokens)
    normed = torch.nn.functional.rms_norm(x.double(), (512,), norm.double(), eps=1e-6)
    seen = norm_linear(x, norm, 1e-6, weight, out_dtype=torch.float32)
    assert_near(seen, normed @ weight.dequantize().double().T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_before_the_quantized_ones_and_several_kinds_are_one_weight(
    dtype: torch.dtype,
) -> None:
    parts = [tiled(pack(make_codes(kind, 48, 512))) for kind in ("Q4_K", "Q6_K", "fp8")]
    plain = numbers(16, 512, dtype=dtype) / 20
    weight = weight_of(plain, parts[0], parts[1], plain, parts[2], dtype=dtype)
    exact = weight.dequantize().double()
    for num_tokens in (1, 20):
        x = numbers(num_tokens, 512, dtype=dtype, seed=1)
        assert_near(linear(x, weight), x.double() @ exact.T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "fp8", "int8"])
def test_an_embedding_gives_the_rows_of_its_tokens(dtype: torch.dtype, kind: str) -> None:
    rows = tiled(pack(make_codes(kind, 1000, 512)))
    weight = weight_of(rows, dtype=dtype)
    ids = torch.tensor([[3, 999, 3], [0, 17, 512]], device="cuda")
    exact = weight.dequantize()[ids]
    seen = weight.rows(ids).float()
    assert (seen - exact).abs().max() <= exact.abs().max() * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "zeros", "fp8", "int8"])
@pytest.mark.parametrize("shared_kind", [None, "the same", "Q5_K"])
def test_experts_are_those_of_the_expanded_rows(
    dtype: torch.dtype, kind: str, shared_kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 40 pairs per expert use its codes, more use dequantized weights."""
    monkeypatch.setattr(moe, "MOST_PAIRS", 40)
    E, k, I, H = 12, 4, 256, 512
    gate_up, down = experts_of(kind, E, 2 * I, H, dtype), experts_of(kind, E, H, I, dtype)
    shared = None
    if shared_kind is not None:
        own = kind if shared_kind == "the same" else shared_kind
        shared = (
            first_matrix(experts_of(own, 1, 2 * I, H, dtype, first=E), dtype),
            first_matrix(experts_of(own, 1, H, I, dtype, first=E), dtype),
        )
    for num_tokens in (1, 3, 5, 8, 9, 30, 60, 150, 200):
        num_rounded = check_experts(sparse_mlp, num_tokens, k, gate_up, down, shared, dtype)
        assert (num_rounded > 0) == (kind == "fp8" and num_tokens > 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [3, 5, 8, 30])
def test_a_slot_of_zeros_may_be_chosen_any_number_of_times(
    dtype: torch.dtype, num_tokens: int
) -> None:
    """The slot of experts that the host computes: any number of choices, each with weight 0."""
    E, k, I, H = 12, 8, 256, 512
    gate_up, down = experts_of("int8", E, 2 * I, H, dtype), experts_of("int8", E, H, I, dtype)
    for weight in (gate_up, down):
        (rows,) = weight.parts
        assert isinstance(rows, TiledRows)
        rows.records[-1].zero_()
    x, residual = expert_inputs(num_tokens, gate_up, dtype)
    ids = torch.full((num_tokens, k), E - 1, dtype=torch.int32, device="cuda")
    weights = torch.zeros(num_tokens, k, device="cuda")
    ids[1:, 2], weights[1:, 2] = 4, 0.5
    seen = sparse_mlp(x, weights, ids, gate_up, down, residual)
    exact = [weight.dequantize().double()[4] for weight in (gate_up, down)]
    gate, up = (x.double() @ exact[0].T).chunk(2, dim=-1)
    inner = (torch.nn.functional.silu(gate) * up).to(dtype).double()
    expected = residual.double()
    expected[1:] += 0.5 * (inner @ exact[1].T)[1:]
    assert_near(seen, expected, dtype)


@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
@pytest.mark.parametrize("name", ["int4", "fp8 rows"])
@pytest.mark.parametrize("config", [LLAMA, WIDE_MOE], ids=["llama", "hybrid_moe"])
def test_an_engine_keeps_codes_on_a_gpu_and_says_what_their_values_say(
    tmp_path: Path, device: str, dtype: torch.dtype, name: str, config: dict[str, Any]
) -> None:
    quantized, plain, num_bytes = write_quantized(tmp_path, config, name)
    given: dict[str, Any] = {"device": device, "dtype": "bfloat16", "memory_gb": 0.1}

    def say(folder: Path, **settings: Any) -> tuple[Engine, list[float]]:
        engine = Engine.from_config(
            EngineConfig(model=str(folder), max_model_len=1024, **given, **settings)
        )
        said = logprobs_of(run(engine, request("one", prompt(40), max_tokens=6))["one"])
        return engine, [one.logprob for one in said]

    engine, seen = say(quantized)
    # With random weights, rounding to bf16 may change the choice of experts.
    assert seen == pytest.approx(say(plain)[1], abs=0.1 if config is LLAMA else 0.5)
    model = engine.runner.model
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert any(isinstance(part, TiledRows) for one in linears for part in one.weight.parts)
    # K is padded to a multiple of 128; the smallest models have 64.
    assert engine.info.weight_bytes == bytes_of(model) <= 2.5 * num_bytes
    rounded, _ = say(plain, quantization="int4")
    assert rounded.info.weight_bytes < 0.8 * say(plain)[0].info.weight_bytes
