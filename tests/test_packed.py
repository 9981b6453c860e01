"""Weights repacked for a CPU: the same GEMM results, in no more memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from packed_checkpoints import FORMATS, pack_state, plain_state, write
from penstock import ops
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.layers.linear import Linear
from penstock.layers.mlp import SparseMLP
from penstock.layers.packing import pack_weights
from penstock.models.source import find_model
from penstock.ops.cpu import few_tokens, skinny_gemm
from penstock.ops.reference import packed
from penstock.ops.weight import bytes_of
from small_models import (
    FAMILIES,
    LLAMA,
    logprobs_of,
    make_engine,
    prompt,
    request,
    run,
    tokens_of,
)

CAN_PACK = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
NEEDS_PACKING = pytest.mark.skipif(
    not CAN_PACK, reason="this CPU, or this torch, multiplies no bf16 in oneDNN"
)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_gemm, "is_available", lambda: False)


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 65])
@pytest.mark.parametrize(("N", "M"), [(1100, 520), (520, 1100)])
def test_products_are_those_of_float64(N: int, M: int, num_tokens: int, dtype: torch.dtype) -> None:
    """Packed if that is faster, with a bias and a residual, and also in fixed tiles."""
    x, weight = some(num_tokens, M, dtype=dtype), some(N, M, dtype=dtype, seed=1)
    bias, residual = some(N, dtype=dtype, seed=2), some(num_tokens, N, dtype=dtype, seed=3)
    kept = ops.Weight(weight)
    kept.pack()
    assert kept.shape == weight.shape
    assert kept.values.is_mkldnn == (CAN_PACK and dtype == torch.bfloat16)
    exact = x.double() @ weight.double().T + bias.double() + residual.double()
    for deterministic in (False, True):
        seen = ops.linear(x, kept, bias, residual.clone(), deterministic=deterministic)
        error = (seen.double() - exact).abs().max() / exact.abs().max()
        assert error <= (1e-6 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_a_head_in_bf16_gives_unrounded_logits_part_by_part(num_tokens: int) -> None:
    x, weight = (
        some(num_tokens, 600, dtype=torch.bfloat16),
        some(5000, 600, dtype=torch.bfloat16, seed=1),
    )
    ones = torch.ones(600)
    assert weight.numel() > 2 * 2**20, "several parts"
    seen = ops.norm_linear(x, ones, 1e-6, ops.Weight(weight), out_dtype=torch.float32)
    exact = ops.rms_norm(x, ones, 1e-6).double() @ weight.double().T
    assert ((seen - exact).abs().max() / exact.abs().max()) <= 1e-6


def test_small_weights_and_other_dtypes_stay_as_they_are() -> None:
    for weight in (
        some(64, 64, dtype=torch.bfloat16),
        some(1100, 520, dtype=torch.float32),
        some(1100, 520, dtype=torch.float16),
    ):
        assert packed.pack(weight) is weight


@NEEDS_PACKING
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_says_the_same_and_a_deterministic_one_is_not_packed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LEAST_ELEMENTS", 1)

    def say(**settings: Any) -> tuple[bool, float, int]:
        engine = make_engine(FAMILIES[family], dtype="bfloat16", prefix_cache=False, **settings)
        model: nn.Module = engine.runner.model  # type: ignore[assignment]
        said = logprobs_of(run(engine, request("one", prompt(40), max_tokens=1))["one"])
        return (
            any(p.is_mkldnn for p in model.parameters()),
            said[0].logprob,
            engine.info.weight_bytes,
        )

    was_packed, logprob, num_bytes = say(deterministic=False)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.engine.device_part.pack_weights", lambda model, keep: None)
        assert say(deterministic=False) == (False, pytest.approx(logprob, abs=0.05), num_bytes)
    assert was_packed
    assert not say(deterministic=True)[0]


@NEEDS_PACKING
def test_every_named_weight_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST_ELEMENTS", 1)
    engine = make_engine(FAMILIES["hybrid_moe"], dtype="bfloat16", deterministic=True)
    model: nn.Module = engine.runner.model  # type: ignore[assignment]
    head = model.head.weight
    pack_weights(model, keep=head)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    sparse = [module for module in model.modules() if isinstance(module, SparseMLP)]
    assert len(linears) > 4
    assert all(linear.weight.values.is_mkldnn == (linear.weight is not head) for linear in linears)
    for layer in sparse:
        assert layer.shared_gate_up.values.is_mkldnn
        assert layer.shared_down.values.is_mkldnn
        assert not layer.gate_up.values.is_mkldnn


@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 40])
@pytest.mark.parametrize("K", [96, 100])
def test_what_is_exact_in_bf16_takes_half_the_memory_and_multiplies_the_same(
    K: int, num_tokens: int, has_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler:
        monkeypatch.setattr(few_tokens, "is_available", lambda: False)
    wide = some(200, K, dtype=torch.bfloat16, seed=1).float()
    x, norm = some(num_tokens, K, dtype=torch.float32), some(K, dtype=torch.float32, seed=2)
    bias, residual = some(200, dtype=torch.float32, seed=3), torch.ones(num_tokens, 200)
    weight, plain = ops.Weight(wide.clone()), ops.Weight(wide)
    weight.narrow()
    assert weight.num_bytes == plain.num_bytes // 2
    for deterministic in (False, True):
        given = {"deterministic": deterministic}
        torch.testing.assert_close(
            ops.linear(x, weight, bias, residual.clone(), **given),
            ops.linear(x, plain, bias, residual.clone(), **given),
        )
        torch.testing.assert_close(
            ops.norm_linear(x, norm, 1e-6, weight, **given),
            ops.norm_linear(x, norm, 1e-6, plain, **given),
        )
    ids = torch.tensor([3, 199, 3])
    assert torch.equal(weight.rows(ids), plain.rows(ids))
    assert torch.equal(weight.first_rows(7).dequantize(), wide[:7])


def test_what_bf16_would_round_stays_as_it_is() -> None:
    values = some(5000, 64, dtype=torch.bfloat16).float()
    values[4999, 63] = 1.0 + 2**-9
    weight = ops.Weight(values)
    weight.narrow()
    assert not weight.parts
    assert weight.values[4999, 63] == 1.0 + 2**-9


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_quantized_model_takes_hardly_more_memory_than_its_files(
    is_tied: bool, tmp_path: Path
) -> None:
    """Its embedding and head are in bf16 in the files, and make half of their size."""
    config = {**LLAMA, "vocab_size": 4096, "tie_word_embeddings": is_tied, "hidden_size": 128}
    stored, _ = pack_state(plain_state(config), FORMATS["int4"])
    stored = {
        name: part.bfloat16() if part.dtype == torch.float32 else part
        for name, part in stored.items()
    }
    config["quantization_config"] = FORMATS["int4"].quantization
    folder = write(tmp_path / "int4", stored, config)
    settings = EngineConfig(device="cpu", max_model_len=256, memory_gb=0.02)
    engine = Engine.from_source(find_model(str(folder)), settings)
    assert len(tokens_of(run(engine, request("x", prompt(40), max_tokens=4))["x"])) == 4
    model = engine.runner.model
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert bytes_of(model) <= 1.25 * size
    assert model.embedding.num_bytes == 2 * 4096 * 128
    assert (model.head.weight is model.embedding) == is_tied
