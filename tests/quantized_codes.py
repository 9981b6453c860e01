"""Codes of every quantized format, and checkpoints with them, for tests of rows and kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packed_checkpoints import FORMATS, pack_state, plain_state, write
from penstock.weights.codes import Codes, Scales
from small_models import HYBRID_MOE

WIDE_MOE = HYBRID_MOE | dict.fromkeys(  # widths that are multiples of 128
    ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 128
)
BYTE, SIGNED = torch.uint8, torch.int8


def numbers(low: int, high: int, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reals(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1e-2


def two_levels(bits: int, group: int, N: int, K: int, offsets: bool) -> Codes:
    """As the K-quants of GGUF: scales of 6 bits times one for each 256 columns."""
    repeat, low = 256 // group, 0 if offsets else -(1 << (bits - 1))
    groups, dtype = K // group, BYTE if offsets else SIGNED

    def scales(seed: int) -> Scales:
        fine = numbers(0 if offsets else -32, 32, N, groups, dtype=dtype, seed=seed)
        return Scales(fine, reals(N, K // 256, seed=seed).half(), repeat)

    values = numbers(low, low + (1 << bits), N, K, dtype=dtype)
    return Codes(values, bits, (1, group), scales(1), offsets=scales(2) if offsets else None)


def make_codes(kind: str, N: int, K: int) -> Codes:
    groups = -(-K // 128)
    if kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        bits = int(kind[1])
        return two_levels(bits, 16 if bits in (2, 3, 6) else 32, N, K, offsets=bits in (2, 4, 5))
    if kind == "zeros":  # as GPTQ and AWQ
        zeros = numbers(0, 16, N, groups, dtype=BYTE, seed=1)
        values = numbers(0, 16, N, K, dtype=BYTE)
        return Codes(values, 4, (1, 128), Scales(reals(N, groups).half()), zeros=zeros)
    if kind == "order of activations":
        columns = torch.randperm(K, generator=torch.Generator().manual_seed(5))
        values = numbers(0, 16, N, K, dtype=BYTE)
        return Codes(values, 4, (1, 128), Scales(reals(N, groups).half()), columns=columns)
    if kind == "levels":
        values, levels = numbers(0, 16, N, K, dtype=BYTE), torch.arange(16).square() / 2 - 20
        return Codes(values, 4, (1, 32), Scales(reals(N, -(-K // 32)).bfloat16()), levels=levels)
    if kind == "int8":
        return Codes(numbers(-128, 128, N, K, dtype=SIGNED), 8, (1, K), Scales(reals(N, 1)))
    assert kind == "fp8"
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 100
    values = values.clamp(-240, 240).to(torch.float8_e4m3fn)  # so no low bits encode NaN
    return Codes(values, 8, (128, 128), Scales(reals(-(-N // 128), groups)))


KINDS = [
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "zeros",
    "order of activations",
    "levels",
    "int8",
    "fp8",
]


def write_quantized(folder: Path, config: dict[str, Any], name: str) -> tuple[Path, Path, int]:
    packed, expanded = pack_state(plain_state(config), FORMATS[name])
    num_bytes = sum(part.nbytes for part in packed.values())
    quantization = {FORMATS[name].key: FORMATS[name].quantization}
    quantized = write(folder / "packed", packed, {**config, **quantization})
    return quantized, write(folder / "plain", expanded, config), num_bytes
