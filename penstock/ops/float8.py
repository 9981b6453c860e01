"""Activations in E4M3: which GEMMs quantize them, and how.

FP8 checkpoints ask for it, and tensor cores with two 8-bit operands are twice as fast. A token is
quantized by blocks of 128 columns: the largest element of a block maps to 448, E4M3's largest. Only
GEMMs of many tokens quantize them; for a few, reading the weight takes longer. Logits never do.
References and kernels use the same rules.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.ops.tiles import STEP, TiledRows
from penstock.ops.weight import Part, Weight

DTYPES = (torch.bfloat16, torch.float16)
FIRST_CAPABILITY = (8, 9)
HOPPER = (9, 0)  # the only one with wgmma, and on which cuBLAS supports block scales
LARGEST = 448.0
LEAST = 1e-12  # lower bound of a block's largest element
# Up to this many tokens stay unquantized (`ops/cuda/quantized.py`); fewer for large N, where the
# library is twice as fast from there on.
FEW_TOKENS, WIDE_FEW_TOKENS = 64, 32
WIDE_ROWS = 8192
# Pairs of a token and an expert, per expert; fewer where both are loaded asynchronously.
FEW_PAIRS, HOPPER_FEW_PAIRS = 8, 4


@dataclass(frozen=True, slots=True)
class RoundedTokens:
    """Quantized tokens, from a kernel that knows which GEMM alone reads its result."""

    codes: Tensor  # [T rounded up, K] float8_e4m3fn
    scales: Tensor  # [K / 128, T rounded up] float32
    num_tokens: int
    dtype: torch.dtype  # of the values that were quantized, and of what is computed from them

    @property
    def is_cuda(self) -> bool:
        return self.codes.is_cuda

    def __len__(self) -> int:
        return self.num_tokens

    def dequantize(self) -> Tensor:  # [T, K]
        blocks = self.codes.float().unflatten(-1, (-1, STEP)) * self.scales.t()[..., None]
        return blocks.flatten(-2)[: self.num_tokens].to(self.dtype)


def round_tokens(x: Tensor) -> Tensor:  # [..., K] -> float32
    """The values of quantized tokens."""
    blocks = x.float().unflatten(-1, (-1, STEP))
    most = blocks.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    largest = torch.full_like(most, LARGEST)  # torch divides by and into numbers less exactly
    codes = (blocks * (largest / most)).to(torch.float8_e4m3fn)
    return (codes.float() * (most / largest)).flatten(-2)


def can_take(part: Part) -> bool:
    """Rows with one scale per 128 x 128 block, or one per row."""
    if not isinstance(part, TiledRows) or not part.is_float8 or part.columns is not None:
        return False
    has_one_each = part.group >= part.num_columns and part.fields.coarse is None
    return part.num_columns % STEP == 0 and (part.block_scales is not None or has_one_each)


def can_use_library(rows: TiledRows, dtype: torch.dtype, device: torch.device) -> bool:
    """cuBLAS also needs block scales in multiples of 16 bytes."""
    is_whole = rows.num_rows % STEP == 0 and rows.num_columns % (4 * STEP) == 0
    return (
        rows.block_scales is not None and is_whole and dtype == torch.bfloat16 and is_hopper(device)
    )


def rounds_prompts(model: nn.Module) -> bool:
    """Whether a model has weights for which many tokens are quantized."""
    weights = (module for module in model.modules() if isinstance(module, Weight))
    return any(can_take(part) for weight in weights for part in weight.parts)


def rounds_tokens(parts: tuple[Part, ...], x: Tensor, num_tokens: int) -> bool:
    """Whether a GEMM with these rows, whose result is like x, quantizes tokens. Unquantized rows
    may be among them; they use the tokens as they are.
    """
    rows = [part for part in parts if isinstance(part, TiledRows)]
    are_known = all(isinstance(part, Tensor) or can_take(part) for part in parts)
    if not rows or not are_known or not _is_able(x) or not all(one.is_row_major for one in rows):
        return False
    is_wide = all(
        one.num_rows >= WIDE_ROWS and can_use_library(one, x.dtype, x.device) for one in rows
    )
    return num_tokens > (WIDE_FEW_TOKENS if is_wide else FEW_TOKENS)


def takes_rounded(reader: Weight | None, x: Tensor) -> bool:
    """Whether a GEMM of tokens with the dtype of x [T, ..] and this weight needs nothing but codes
    of them.
    """
    parts = () if reader is None else reader.parts
    return all(isinstance(part, TiledRows) for part in parts) and rounds_tokens(parts, x, len(x))


def rounded_experts(
    x: Tensor,
    pairs_per_expert: float,
    routed: tuple[Weight, Weight],
    shared: Sequence[Weight | None],
) -> tuple[TiledRows, ...]:
    """The rows of gate and up and of down, if GEMMs with so many pairs quantize tokens, and those
    of the shared expert, if they have the same format. Empty: they do not.
    """
    if not _is_able(x):
        return ()
    few = HOPPER_FEW_PAIRS if is_hopper(x.device) else FEW_PAIRS
    if pairs_per_expert <= few:
        return ()
    rows = [part for weight in routed for part in weight.parts]
    if len(rows) != 2 or not all(can_take(part) for part in rows):
        return ()
    gate_up, down = rows
    assert isinstance(gate_up, TiledRows)
    assert isinstance(down, TiledRows)
    are_whole = gate_up.num_rows % (2 * STEP) == 0 and down.num_rows % STEP == 0
    if not are_whole or gate_up.is_row_major or down.is_row_major:
        return ()
    more = [part for weight in shared if weight is not None for part in weight.parts]
    tiled = [part for part in more if isinstance(part, TiledRows)]
    are_alike = len(more) == len(tiled) == 2 and all(
        one.kind == own.kind and one.shape == own.shape[1:]
        for one, own in zip(tiled, (gate_up, down))
    )
    return gate_up, down, *(tiled if are_alike else ())


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device) == HOPPER


def _is_able(x: Tensor) -> bool:
    return x.is_cuda and _capability(x.device) >= FIRST_CAPABILITY and x.dtype in DTYPES


@functools.cache  # called by every GEMM of a step
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
