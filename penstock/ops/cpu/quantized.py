"""Products of a few tokens with quantised rows on a CPU (`quantized.cpp`), and rows of them in float32."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_long, c_void_p
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.cpu import library
from penstock.ops.quantized import Blocks, QuantizedRows

MOST_TOKENS = 16  # for more, expanding the rows costs less than multiplying with codes
BLOCK = 128  # columns that a step of the kernel takes
UNITS = (128, 32, 16)  # columns that share a scale, as kernels are compiled; groups are multiples
TABLE_BITS = 5  # of codes that are looked up; wider ones are converted
TYPES = {None: 0, torch.uint8: 1, torch.int8: 2, torch.float16: 3, torch.bfloat16: 4, torch.float32: 5}
WEIGHT_TYPES: list[Any] = [
    *(c_void_p, c_void_p, c_void_p, c_int),  # planes, levels, bias
    *(c_void_p, c_int, c_void_p, c_int),  # scales
    *(c_void_p, c_int, c_void_p, c_int, c_int),  # offsets
    *(c_long, c_long),
]


def is_available(rows: QuantizedRows) -> bool:
    return rows.low.is_cpu and _library(*_kind(rows)) is not None


def multiply(x: Tensor, rows: QuantizedRows, out: Tensor) -> None:
    """x [T, K] float32 times rows [N, K] into out [T, N] float32, which may be columns of a wider tensor."""
    (T, K), N = x.shape, rows.num_rows
    x = F.pad(x if rows.columns is None else x[:, rows.columns], (0, -K % BLOCK)).contiguous()
    loaded = _library(*_kind(rows))
    assert loaded is not None, "asked only where it is available"
    given, kept = _arguments(rows)
    loaded.multiply_quantized(*given, x.data_ptr(), out.data_ptr(), T, N, x.shape[1], out.stride(0))
    del kept


def expand(rows: QuantizedRows, first: int, count: int) -> Tensor:  # [count, K] float32
    """As `dequantize` gives them."""
    out = torch.empty(count, rows.num_columns)
    loaded = _library(*_kind(rows))
    assert loaded is not None, "asked only where it is available"
    given, kept = _arguments(rows)
    loaded.expand_quantized(*given, out.data_ptr(), first, count)
    del kept
    if rows.columns is None:
        return out
    ordered = torch.empty_like(out)
    ordered[:, rows.columns] = out
    return ordered


def _kind(rows: QuantizedRows) -> tuple[int, int, bool]:
    """What a library is compiled for: bits, columns that share a scale, whether codes are floats."""
    unit = next(unit for unit in UNITS if _group(rows) % unit == 0)
    return rows.bits, unit, rows.bits == 8 and rows.levels is not None


def _group(rows: QuantizedRows) -> int:
    """One group of all columns may be longer than they are."""
    return rows.group if rows.group < rows.num_columns else -(-rows.num_columns // BLOCK) * BLOCK


@functools.cache
def _library(bits: int, unit: int, is_fp8: bool) -> ctypes.CDLL | None:
    constants = {"BITS": bits, "UNIT": unit, "IS_FP8": int(is_fp8)}
    options = ("-ffp-contract=off", *(f"-D{name}={value}" for name, value in constants.items()))
    loaded = library.load(Path(__file__).with_suffix(".cpp"), *options)
    if loaded is None:
        return None
    loaded.multiply_quantized.argtypes = [*WEIGHT_TYPES, c_void_p, c_void_p, *[c_long] * 4]
    loaded.expand_quantized.argtypes = [*WEIGHT_TYPES, c_void_p, c_long, c_long]
    for function in (loaded.multiply_quantized, loaded.expand_quantized):
        function.restype = None
    return loaded


def _arguments(rows: QuantizedRows) -> tuple[list[object], list[Tensor]]:
    """For C, and the tensors that must live until it is done."""
    levels = _levels(rows) if rows.bits <= TABLE_BITS else None
    kept = [tensor for tensor in (levels,) if tensor is not None]
    given: list[object] = [rows.low.data_ptr(), _pointer(rows.high), _pointer(levels), rows.bias]
    given += [*_block_arguments(rows.scales), *_block_arguments(rows.offsets), int(rows.are_zeros)]
    return [*given, _group(rows), rows.num_columns], kept


def _levels(rows: QuantizedRows) -> Tensor:
    """As many as registers hold."""
    levels = torch.arange(1 << rows.bits) - float(rows.bias) if rows.levels is None else rows.levels.float()
    return F.pad(levels, (0, (32 if rows.bits == TABLE_BITS else 16) - len(levels))).contiguous()


def _block_arguments(blocks: Blocks | None) -> list[object]:
    if blocks is None:
        return [None, TYPES[None], None, 1]
    return [blocks.fine.data_ptr(), TYPES[blocks.fine.dtype], _pointer(blocks.coarse), blocks.repeat]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
