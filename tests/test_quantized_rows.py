"""Rows that stay quantized in memory: codes, scales and GEMM results, in the stored bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.errors import CapacityError
from penstock.layers.linear import Linear
from penstock.ops import Weight, linear, norm_linear, swiglu_linear
from penstock.ops.cpu import library
from penstock.ops.cpu import quantized as kernels
from penstock.ops.cpu.memory import HUGE_PAGE, new_tensor
from penstock.ops.quantized import QuantizedRows, pack_codes
from penstock.ops.weight import bytes_of
from penstock.weights.codes import Codes, Scales
from penstock.weights.packing import can_pack, pack
from quantized_codes import BYTE, KINDS, WIDE_MOE, make_codes, numbers, write_quantized
from small_models import LLAMA, load_weights, logprobs_of, prompt, request, run

NEEDS_COMPILER = pytest.mark.skipif(library._compiler() is None, reason="no C++ compiler here")


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_are_the_codes_and_take_their_bytes(kind: str) -> None:
    codes = make_codes(kind, 130, 768)
    assert can_pack(codes)
    rows = pack(codes)
    assert torch.equal(rows.dequantize(), codes.dequantize())
    ideal = codes.values.numel() * codes.bits / 8
    assert ideal <= rows.num_bytes <= 1.7 * ideal, "scales are half of the smallest kind"
    order = torch.randperm(130, generator=torch.Generator().manual_seed(3))
    assert torch.equal(pack(codes, order).dequantize(), codes.dequantize()[order])
    ids = torch.tensor([[3, 129], [0, 3]])
    assert torch.equal(rows.rows(ids), codes.dequantize()[ids])
    assert torch.equal(rows.slice(5, 31).dequantize(), codes.dequantize()[5:31])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("K", [16, 100, 512, 700])
def test_planes_hold_any_number_of_columns(bits: int, K: int) -> None:
    values = numbers(0, 1 << bits, 3, K, dtype=BYTE)
    low, high = pack_codes(values, bits)
    rows = pack(Codes(values, bits, (1, 1 << 20), Scales(torch.ones(3, 1))))
    assert torch.equal(rows.low, low)
    assert (rows.high is None) == (high is None)
    assert torch.equal(rows.codes(), values.int())


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("N", "K"), [(37, 512), (130, 768)])
def test_products_are_those_of_the_expanded_rows(kind: str, N: int, K: int) -> None:
    codes = make_codes(kind, N, K)
    rows, exact = pack(codes), codes.dequantize()
    assert kernels.is_available(rows)
    x = torch.randn(100, K, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ exact.double().T
    few, many = kernels.LEAST_TILED - 1, kernels.LEAST_TILED
    for count, deterministic in ((few, False), (9, True), (100, False)):
        wide = torch.full((count, N + 8), torch.nan)
        seen = wide[:, 3 : 3 + N]
        kernels.multiply(x[:count], rows, seen, deterministic=deterministic)
        assert (seen - expected[:count]).abs().max() <= 1e-4 * expected.abs().max()
        assert wide[:, :3].isnan().all()
        assert wide[:, 3 + N :].isnan().all()
        # the same bits, whatever the other tokens are
        parts = ((2, 2 + many), (40, 97)) if count == 100 else ((0, 1), (3, count), (2, 4))
        for begin, end in parts:
            alone = torch.empty(end - begin, N)
            kernels.multiply(x[begin:end], rows, alone, deterministic=deterministic)
            assert torch.equal(alone, seen[begin:end])


@NEEDS_COMPILER
def test_coarse_scales_may_be_powers_of_two() -> None:
    """They would fit into fewer bytes, but kernels read a single type."""
    codes = make_codes("Q4_K", 20, 512)
    powers = Scales(codes.scales.fine, torch.full((20, 2), 2.0**-9).half(), codes.scales.repeat)
    codes = replace(codes, scales=powers)
    rows, exact = pack(codes), codes.dequantize()
    x, out = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)), torch.empty(3, 20)
    kernels.multiply(x, rows, out)
    assert_near(out, x @ exact.T)


@NEEDS_COMPILER
def test_levels_of_halves_may_have_offsets() -> None:
    """Kernels multiply with twice these levels, but add offsets as they are."""
    halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12]) / 2
    levels = torch.cat((halves, -halves))
    rows = replace(pack(make_codes("Q4_K", 20, 512)), levels=levels)
    assert rows.offsets is not None
    for count in (3, 13):
        x = torch.randn(count, 512, generator=torch.Generator().manual_seed(1))
        out = torch.empty(count, 20)
        kernels.multiply(x, rows, out)
        assert_near(out, x @ rows.dequantize().T)


@NEEDS_COMPILER
@pytest.mark.parametrize("K", [96, 1184])
def test_columns_need_not_fill_a_block(K: int) -> None:
    for kind in ("zeros", "levels", "int8", "fp8"):
        codes = make_codes(kind, 20, K)
        rows, exact = pack(codes), codes.dequantize()
        for count in (3, 13):
            x = torch.randn(count, K, generator=torch.Generator().manual_seed(1))
            out = torch.empty(count, 20)
            kernels.multiply(x, rows, out)
            expected = x.double() @ exact.double().T
            assert (out - expected).abs().max() <= 1e-4 * expected.abs().max(), kind


def assert_near(seen: Tensor, expected: Tensor) -> None:
    assert (seen - expected).abs().max() <= 1e-4 * expected.abs().max()


@NEEDS_COMPILER
@pytest.mark.parametrize("num_tokens", [4, kernels.LEAST_TILED + 5])
def test_what_is_fused_to_a_product_is_what_is_done_beside_it(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(num_tokens, 512, generator=generator)
    gate_up = torch.randn(num_tokens, 1024, generator=generator)
    norm, bias = torch.rand(512, generator=generator), torch.randn(80, generator=generator)
    residual = torch.randn(num_tokens, 80, generator=generator)
    codes = make_codes("Q4_K", 50, 512), make_codes("Q6_K", 30, 512)
    weight, exact = Weight(torch.empty(80, 512)), torch.cat([one.dequantize() for one in codes])
    weight.quantize(tuple(pack(one) for one in codes))
    assert kernels.can_fuse(x, weight.parts)
    gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])  # as far as e^x goes, and further
    gate_up[0, 512:515] /= 200  # otherwise quantizing inputs would round to their own steps
    gate, up = gate_up.chunk(2, dim=-1)
    normed = F.rms_norm(x, (512,), norm, 1e-5)

    def products(own: slice) -> list[Tensor]:
        return [
            linear(x[own], weight, bias, residual[own].clone()),
            norm_linear(x[own], norm, 1e-5, weight, bias),
            swiglu_linear(gate_up[own], weight, residual[own].clone()),
        ]

    seen = products(slice(None))
    assert_near(seen[0], x @ exact.T + bias + residual)
    assert_near(seen[1], normed @ exact.T + bias)
    assert_near(seen[2], (F.silu(gate) * up) @ exact.T + residual)
    # the same bits, whatever the other tokens are
    for begin, end in ((0, num_tokens - 3), (2, num_tokens)):
        for some, all in zip(products(slice(begin, end)), seen, strict=True):
            assert torch.equal(some, all[begin:end])


@pytest.mark.parametrize("has_compiler", [pytest.param(True, marks=NEEDS_COMPILER), False])
@pytest.mark.parametrize("num_tokens", [1, 8, 300])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_weight_may_be_rows_of_several_kinds(
    has_compiler: bool, num_tokens: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler:
        monkeypatch.setattr(kernels, "is_available", lambda rows: False)
    plain = torch.randn(20, 512, generator=torch.Generator().manual_seed(2)) / 20
    some, others = make_codes("Q4_K", 50, 512), make_codes("Q6_K", 30, 512)
    weight = Weight(torch.empty(100, 512))
    weight.quantize((pack(some), plain, pack(others)))
    exact = torch.cat([some.dequantize(), plain, others.dequantize()])
    assert torch.equal(weight.dequantize(), exact)
    x = torch.randn(num_tokens, 512, generator=torch.Generator().manual_seed(1))
    bias, residual = torch.randn(100), torch.randn(num_tokens, 100)
    given: dict[str, Any] = {"deterministic": deterministic}
    seen = linear(x, weight, bias, residual.clone(), **given)
    assert_near(seen, x @ exact.T + bias + residual)
    normed = norm_linear(x, torch.ones(512), 1e-6, weight, **given)
    expected = torch.nn.functional.rms_norm(x, (512,), eps=1e-6) @ exact.T
    assert_near(normed, expected)


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["int4", "fp8"])
@pytest.mark.parametrize("config", [LLAMA, WIDE_MOE], ids=["llama", "hybrid_moe"])
def test_an_engine_keeps_a_checkpoint_s_codes_and_says_what_its_values_say(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    quantized, plain, num_bytes = write_quantized(tmp_path, config, name)
    given: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 1024,
        "memory_gb": 0.1,
    }

    def say(folder: Path, **settings: Any) -> tuple[Any, list[float]]:
        engine = Engine.from_config(EngineConfig(model=str(folder), **given, **settings))
        said = logprobs_of(run(engine, request("one", prompt(40), max_tokens=6))["one"])
        return engine, [one.logprob for one in said]

    for settings in ({"deterministic": False}, {"deterministic": True}):
        engine, seen = say(quantized, **settings)
        assert seen == pytest.approx(say(plain, **settings)[1], abs=1e-3)
        model = engine.runner.model
        assert any(isinstance(module, Linear) and module.weight.parts for module in model.modules())
        assert engine.info.weight_bytes == bytes_of(model) <= 1.25 * num_bytes


@NEEDS_COMPILER
@pytest.mark.parametrize("most", [3, 40])
@pytest.mark.parametrize("kinds", [("Q4_K",), ("Q6_K",), ("fp8",), ("Q4_K", "Q6_K")])
def test_experts_multiply_their_own_tokens(kinds: tuple[str, ...], most: int) -> None:
    """A few experts of a stack, with different numbers of tokens, in any order."""
    stacks = tuple(pack(make_codes(kind, 6 * 37, 512)).unflatten(6) for kind in kinds)
    weight = Weight(torch.empty(6, 37 * len(kinds), 512))
    weight.quantize(stacks)
    experts, counts = (4, 0, 5, 1), (most, 1, most // 2 + 1, most)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(counts), 512, generator=generator)
    gate_up = torch.randn(sum(counts), 1024, generator=generator)
    activated = F.silu(gate_up[:, :512]) * gate_up[:, 512:]
    assert kernels.can_fuse(x, stacks, dim=3)
    assert not kernels.can_fuse(x, stacks)
    seen = kernels.multiply_experts(x, stacks, experts, counts)
    inner = kernels.multiply_experts(gate_up, stacks, experts, counts, is_swiglu=True)
    first = 0
    for expert, count in zip(experts, counts):
        own = slice(first, first := first + count)
        matrix = weight.dequantize()[expert]
        assert_near(seen[own], x[own] @ matrix.T)
        assert_near(inner[own], activated[own] @ matrix.T)


def test_experts_of_one_kind_are_one_stack() -> None:
    matrices = [make_codes("Q4_K", 24, 256), make_codes("Q4_K", 24, 256)]
    stack = QuantizedRows.stack([pack(codes) for codes in matrices])
    assert stack.shape == (2, 24, 256)
    for expert, codes in enumerate(matrices):
        assert torch.equal(stack.select(expert).dequantize(), codes.dequantize())


def test_rows_of_a_kind_that_follow_each_other_are_one_part(tmp_path: Path) -> None:
    quantized, _, _ = write_quantized(tmp_path, LLAMA, "int4")
    config = EngineConfig(model=str(quantized), device="cpu", max_model_len=1024, memory_gb=0.1)
    weights = [
        module
        for module in Engine.from_config(config).runner.model.modules()
        if isinstance(module, Weight)
    ]
    fused = [weight for weight in weights if weight.parts]
    assert len(fused) >= 8
    assert all(len(weight.parts) == 1 for weight in fused), "q, k and v, or gate and up, are one"
    some, others = pack(make_codes("Q4_K", 20, 512)), pack(make_codes("Q4_K", 7, 512))
    joined = QuantizedRows.join([some, others], 27)
    assert torch.equal(joined.dequantize(), torch.cat([some.dequantize(), others.dequantize()]))


def test_large_weights_lie_on_pages_of_their_own() -> None:
    """At a boundary of huge pages, returned to the system with the tensor."""
    made = new_tensor((3, 1 << 20), torch.float32, "cpu")
    assert made.data_ptr() % HUGE_PAGE == 0
    assert made.fill_(7.0).sum() == 21 << 20
    assert new_tensor((3, 5), torch.bfloat16, "cpu").shape == (3, 5)


def test_what_a_model_leaves_out_makes_it_no_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint has a quantized drafting head, which is not loaded: the trunk alone must fit."""
    config = {**WIDE_MOE, "mtp_num_hidden_layers": 1}
    quantized, _, _ = write_quantized(tmp_path, config, "int4")
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "memory_gb": 0.1}
    given["speculate"] = "off"
    needed = Engine.from_config(EngineConfig(model=str(quantized), **given)).info.weight_bytes
    for share, fits in ((1.1, True), (0.8, False)):
        memory = {"SC_PHYS_PAGES": int(share * needed), "SC_PAGE_SIZE": 1}
        monkeypatch.setattr("penstock.ops.cpu.memory.os.sysconf", memory.__getitem__)
        if fits:
            load_weights(quantized, with_drafting_head=False)
        else:
            with pytest.raises(CapacityError, match="does not fit"):
                load_weights(quantized, with_drafting_head=False)
