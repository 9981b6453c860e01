"""Codes of every quantized format, and checkpoints with them, for tests of rows and kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packed_checkpoints import FORMATS, pack_state, plain_state, write
from penstock.ops import Weight
from penstock.ops.float8 import round_tokens, rounded_experts
from penstock.ops.quantized import QuantizedRows
from penstock.ops.tiles import TiledRows, can_tile, tile
from penstock.ops.weight import Part
from penstock.weights.codes import Codes, Scales
from penstock.weights.packing import pack
from small_models import HYBRID_MOE

WIDE_MOE = HYBRID_MOE | dict.fromkeys(  # widths that are multiples of 128
    ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 128
)
BYTE, SIGNED = torch.uint8, torch.int8
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest value


def numbers(low: int, high: int, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reals(*shape: int, seed: int = 0, most: float = 1e-2) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * most


def two_levels(bits: int, group: int, N: int, K: int, offsets: bool, most: float) -> Codes:
    """Codes with two levels of scales, as in GGUF's K-quants: 6 bits, times one per 256 columns."""
    repeat, low = 256 // group, 0 if offsets else -(1 << (bits - 1))
    groups, dtype = K // group, BYTE if offsets else SIGNED

    def scales(seed: int) -> Scales:
        fine = numbers(0 if offsets else -32, 32, N, groups, dtype=dtype, seed=seed)
        return Scales(fine, reals(N, K // 256, seed=seed, most=most).half(), repeat)

    values = numbers(low, low + (1 << bits), N, K, dtype=dtype)
    return Codes(values, bits, (1, group), scales(1), offsets=scales(2) if offsets else None)


# Largest scales: values of every kind have a standard deviation near 0.4, so that experts of
# several kinds add up without one hiding another.
LARGEST_SCALE = {
    "Q2_K": 2.4e-2,
    "Q3_K": 1.6e-2,
    "Q4_K": 6e-3,
    "Q5_K": 3e-3,
    "Q6_K": 2e-3,
    "zeros": 1e-1,
    "order of activations": 1e-1,
    "levels": 2e-2,
    "int8": 1e-2,
    "fp8": 8e-3,
}
KINDS = list(LARGEST_SCALE)


def make_codes(kind: str, N: int, K: int) -> Codes:
    groups, most = -(-K // 128), LARGEST_SCALE[kind]
    if kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        bits = int(kind[1])
        group = 16 if bits in (2, 3, 6) else 32
        return two_levels(bits, group, N, K, offsets=bits in (2, 4, 5), most=most)
    if kind == "zeros":  # like GPTQ and AWQ
        zeros = numbers(0, 16, N, groups, dtype=BYTE, seed=1)
        values = numbers(0, 16, N, K, dtype=BYTE)
        return Codes(values, 4, (1, 128), Scales(reals(N, groups, most=most).half()), zeros=zeros)
    if kind == "order of activations":
        columns = torch.randperm(K, generator=torch.Generator().manual_seed(5))
        values = numbers(0, 16, N, K, dtype=BYTE)
        return Codes(
            values, 4, (1, 128), Scales(reals(N, groups, most=most).half()), columns=columns
        )
    if kind == "levels":
        values, levels = numbers(0, 16, N, K, dtype=BYTE), torch.arange(16).square() / 2 - 20
        return Codes(
            values, 4, (1, 32), Scales(reals(N, -(-K // 32), most=most).bfloat16()), levels=levels
        )
    if kind == "int8":
        return Codes(
            numbers(-128, 128, N, K, dtype=SIGNED), 8, (1, K), Scales(reals(N, 1, most=most))
        )
    assert kind == "fp8"
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 100
    values = values.clamp(-240, 240).to(torch.float8_e4m3fn)  # so no low bits encode NaN
    return Codes(values, 8, (128, 128), Scales(reals(-(-N // 128), groups, most=most)))


def write_quantized(folder: Path, config: dict[str, Any], name: str) -> tuple[Path, Path, int]:
    packed, expanded = pack_state(plain_state(config), FORMATS[name])
    num_bytes = sum(part.nbytes for part in packed.values())
    quantization = {FORMATS[name].key: FORMATS[name].quantization}
    quantized = write(folder / "packed", packed, {**config, **quantization})
    return quantized, write(folder / "plain", expanded, config), num_bytes


def assert_near(
    seen: Tensor, expected: Tensor, dtype: torch.dtype, *, is_rounded: bool = False
) -> None:
    """`is_rounded`: tokens were quantized too, so a few may have the neighbouring code."""
    error = (seen.double() - expected).abs().max() / expected.abs().max()
    most = 2e-2 if is_rounded else TOLERANCE[dtype]
    assert error <= most, f"off by {error:.4f} of the largest"


def tiled(rows: QuantizedRows, device: str = "cuda") -> Part:
    """Stores rows as a dense layer on a GPU or a stack of experts does."""
    moved = rows.mapped(lambda tensor: tensor.to(device))
    if not can_tile(moved):
        return moved.dequantize().bfloat16()
    return tile(moved, keeps_rows=moved.low.dim() == 2)


def weight_of(*parts: Part, dtype: torch.dtype) -> Weight:
    num_rows = sum(part.shape[-2] for part in parts)
    weight = Weight(torch.empty(*parts[0].shape[:-2], num_rows, parts[0].shape[-1], dtype=dtype))
    weight.quantize(parts)
    return weight


def experts_of(
    kind: str,
    num_experts: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    device: str = "cuda",
    first: int = 0,
) -> Weight:
    """Experts `first`, `first + 1`, ... of a kind: all have the same seed, but other low bits, and
    codes and scales in another order.
    """
    stack = QuantizedRows.stack([pack(make_codes(kind, N, K)) for _ in range(num_experts)])
    rows = tiled(stack, device)
    assert isinstance(rows, TiledRows)
    for i, (codes, records) in enumerate(zip(rows.codes, rows.records), start=first):
        codes.copy_(codes.roll(i, dims=0) ^ (i * 37 % 8))
        if rows.block_scales is None:  # these scale whole blocks of rows, in their order
            records.copy_(records.roll(2 * i, dims=0))
    return weight_of(rows, dtype=dtype)


def first_matrix(weight: Weight, dtype: torch.dtype) -> Weight:
    (rows,) = weight.parts
    assert isinstance(rows, TiledRows)
    scales = None if rows.block_scales is None else rows.block_scales[0]
    own = replace(rows, codes=rows.codes[0], records=rows.records[0], block_scales=scales)
    return weight_of(own, dtype=dtype)


def expert_inputs(
    num_tokens: int, gate_up: Weight, dtype: torch.dtype, device: str = "cuda"
) -> tuple[Tensor, Tensor]:
    """Tokens whose gates are near one, and a residual small enough not to hide any expert."""
    seeded = torch.Generator().manual_seed(num_tokens)
    x, residual = torch.randn(2, num_tokens, gate_up.shape[-1], generator=seeded).to(device)
    x /= (x @ gate_up.dequantize()[0].T).std()
    return x.to(dtype), (residual / 50).to(dtype)


def check_experts(
    sparse_mlp: Callable[..., Tensor],
    num_tokens: int,
    k: int,
    gate_up: Weight,
    down: Weight,
    shared: tuple[Weight, Weight] | None,
    dtype: torch.dtype,
    device: str = "cuda",
) -> int:
    """Compares experts of random tokens. Returns how many of the weights have quantized tokens."""
    x, residual = expert_inputs(num_tokens, gate_up, dtype, device)
    seeded, E = torch.Generator().manual_seed(num_tokens), gate_up.shape[0]
    ids = torch.stack([torch.randperm(E, generator=seeded)[:k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, k, generator=seeded).to(device)
    shared_weight = torch.rand(num_tokens, 1, generator=seeded).to(device) if shared else None
    stored = shared or (None, None)
    given = (x, weights, ids.to(device), gate_up, down, residual, shared_weight, *stored)
    seen = sparse_mlp(*given[:2], given[2].int(), *given[3:])
    num_rounded = len(rounded_experts(x, num_tokens * k / E, (gate_up, down), stored))
    expected = expected_experts(*given, num_rounded)
    assert_near(seen, expected, dtype, is_rounded=num_rounded > 0)
    return num_rounded


def expected_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,  # [T, k] int64
    gate_up: Weight,
    down: Weight,
    residual: Tensor,
    shared_weight: Tensor | None,
    shared_gate_up: Weight | None,
    shared_down: Weight | None,
    num_rounded: int = 0,
) -> Tensor:
    """`sparse_mlp` in double precision, with intermediate activations rounded once: to the dtype of
    x or, for the first `num_rounded` of the four weights, to E4M3, as their tokens.
    """

    def taken(tokens: Tensor, *, is_rounded: bool) -> Tensor:
        return round_tokens(tokens).double() if is_rounded else tokens.double()

    def activated(both: Tensor, *, is_rounded: bool) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        return inner if is_rounded else inner.to(x.dtype)

    gates_ups, downs = (weight.dequantize().double()[ids] for weight in (gate_up, down))
    is_rounded = num_rounded >= 2
    both = torch.einsum("th,tkih->tki", taken(x, is_rounded=is_rounded), gates_ups)
    inner = taken(activated(both, is_rounded=is_rounded), is_rounded=is_rounded)
    outputs = torch.einsum("tki,tkhi->tkh", inner, downs)
    expected = residual.double() + (outputs * weights.double()[..., None]).sum(1)
    if shared_weight is not None:
        assert shared_gate_up is not None
        assert shared_down is not None
        is_rounded = num_rounded == 4
        both = taken(x, is_rounded=is_rounded) @ shared_gate_up.dequantize().double().T
        inner = taken(activated(both, is_rounded=is_rounded), is_rounded=is_rounded)
        output = inner @ shared_down.dequantize().double().T
        expected += output * shared_weight.double()
    return expected
