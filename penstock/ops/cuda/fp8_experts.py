"""Grouped GEMMs of the chosen experts for many tokens, both operands in E4M3, on Hopper.

`fp8_experts.cu` explains the kernel. This file decides which GEMMs it supports, and launches it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops import float8
from penstock.ops.cuda.program import current_stream, is_available, num_processors, program
from penstock.ops.tiles import STEP, TiledRows

PAIRS, ROWS = 128, 256  # per piece of work
NUM_THREADS = 384
STAGES = 4  # 49 KiB of codes and scales each: as many as the shared memory of an SM holds
SHARED_BYTES = STAGES * ((PAIRS + ROWS) * STEP + 1024) + 1024  # 1,024 for alignment
SOURCE = Path(__file__).with_name("fp8_experts.cu")


class _Given(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("source", "source_scales", "order", "tiles")),
        *((name, c_void_p) for name in ("experts", "expert_scales", "shared", "shared_scales")),
        *((name, c_void_p) for name in ("result", "result_scales")),
        *((name, c_int) for name in ("source_count", "num_pairs", "num_tiles")),
    )


def can_multiply(parts: Sequence[TiledRows], x: Tensor) -> bool:
    """`parts`: gate and up, down, and the same of a shared expert, if there is one."""
    return (
        float8.is_hopper(x.device)
        and x.dtype in float8.DTYPES
        and all(part.block_scales is not None and not part.is_row_major for part in parts)
        and all(part.num_rows % ROWS == 0 and part.num_columns % STEP == 0 for part in parts)
        and all(part.shape[-2:] == own.shape[-2:] for part, own in zip(parts, parts[2:]))
        and is_available(x.device)
    )


def multiply(
    codes: Tensor,  # [T, K], or [pairs, K]
    scales: Tensor,  # [K / 128, T], or [K / 128, pairs]
    order: Tensor,
    tiles: Tensor,  # [n, 4]  each of up to PAIRS pairs
    rows: TiledRows,  # [E, N, K]
    shared: TiledRows | None,  # [N, K]
    result: Tensor,  # [pairs, N], or codes [pairs, N / 2] ordered by expert
    result_scales: Tensor,  # [N / 2 / 128, pairs]  of the codes
    slots: int,  # pairs per token
    *,
    is_down: bool,
) -> None:
    own = rows if shared is None else shared
    assert rows.block_scales is not None
    assert own.block_scales is not None
    num_experts, N, K = rows.shape
    constants = kernel_constants(
        N, K, num_experts, slots, result.dtype, is_down=is_down, has_shared=shared is not None
    )
    sources = (codes, scales, order, tiles, rows.codes, rows.block_scales)
    pointers = (*sources, own.codes, own.block_scales, result, result_scales)
    counts = (scales.shape[1], len(result), len(tiles))
    device = codes.device
    kernel = (SOURCE, "fp8_experts", tuple(constants.items()), device, SHARED_BYTES, True)
    program(*kernel).launch(
        num_processors(device),
        NUM_THREADS,
        current_stream(device),
        _Given(*(tensor.data_ptr() for tensor in pointers), *counts),
    )


def kernel_constants(
    N: int,
    K: int,
    num_experts: int,
    slots: int,
    dtype: torch.dtype,
    *,
    is_down: bool,
    has_shared: bool,
) -> dict[str, int]:
    return {
        "K": K,
        "N": N,
        "E": num_experts,
        "SLOTS": slots,
        "IS_DOWN": int(is_down),
        "HAS_SHARED": int(has_shared),
        "STAGES": STAGES,
        "IS_BFLOAT": int(dtype == torch.bfloat16),
    }
