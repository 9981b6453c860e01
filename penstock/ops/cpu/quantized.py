"""GEMMs with quantized rows on a CPU (`quantized.cpp`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int32, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.ops.cpu import library
from penstock.ops.quantized import QuantizedRows, Scales

LEAST_TILED = 9  # tokens from which tiles of rows are faster than single rows
BLOCK = 128  # columns per step of the kernel
UNITS = (128, 64, 32, 16)  # compiled group sizes; actual groups are multiples
TYPES = {
    None: 0,
    torch.uint8: 1,
    torch.int8: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.float32: 5,
}
ARGUMENT_TYPES: list[Any] = [
    *(c_void_p, c_void_p),  # planes
    *(c_void_p, c_int, c_void_p, c_int, c_int),  # scales
    *(c_void_p, c_int, c_void_p, c_int, c_int, c_int),  # offsets, whether they are zero points
    *(c_long, c_long),  # group, K
    *(c_void_p, c_int, c_float),  # codes
    *(c_void_p, c_void_p, c_float, c_int),  # tokens, and what is done before
    *(c_void_p, c_void_p, c_void_p),  # what is done after
    *(c_void_p, c_void_p, c_long),  # groups
    *(c_long, c_long, c_int),  # N, stride, by_tile
]


@dataclass(frozen=True, slots=True)
class CodeValues:
    """The value of a code: `(byte - bias) * unit`; a table may give the byte of each code."""

    bytes: Tensor | None = None  # [16] uint8
    bias: int = 0
    unit: float = 1.0


def is_available(rows: QuantizedRows) -> bool:
    return rows.low.is_cpu and _call_of(rows) is not None


def _by_tile(num_tokens: int) -> bool:
    return num_tokens >= LEAST_TILED


def multiply(x: Tensor, rows: QuantizedRows, out: Tensor, *, deterministic: bool = False) -> None:
    """x [T, K] float32 times rows [N, K] into out [T, N] float32, which may be columns of a wider
    tensor. `deterministic`: in the same order for any number of tokens.

    Inputs are rounded to 16 bits, with one scale per 128 columns.
    """
    x = (x if rows.columns is None else x[:, rows.columns]).contiguous()
    by_tile = not deterministic and _by_tile(len(x))
    _multiply(x, (rows,), out, _groups((0,), (len(x),)), by_tile=by_tile)


def can_fuse(x: Tensor, parts: tuple[object, ...], dim: int = 2) -> bool:
    """Whether `multiply_fused` can take x [T, K] or [T, 2K], or, with `dim` 3, `multiply_experts`
    can.
    """
    return x.dtype == torch.float32 and all(
        isinstance(part, QuantizedRows)
        and part.columns is None
        and part.low.dim() == dim
        and is_available(part)
        for part in parts
    )


def multiply_fused(
    x: Tensor,  # [T, K], or [T, 2K] (gate, then up) with `is_swiglu`
    parts: Sequence[Any],  # QuantizedRows, checked by `can_fuse`
    *,
    norm: Tensor | None = None,  # [K]
    eps: float = 0.0,
    is_swiglu: bool = False,
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N]
) -> Tensor:  # [T, N]
    """GEMM with all parts of a weight, with norm or swiglu before and bias and residual after."""
    out = torch.empty(len(x), sum(part.num_rows for part in parts))
    residual = None if residual is None else residual.contiguous()
    before = (_pointer(norm), eps, is_swiglu)
    groups = _groups((0,), (len(x),))
    by_tile = _by_tile(len(x))
    _multiply(x.contiguous(), parts, out, groups, before, bias, residual, by_tile=by_tile)
    return out


def multiply_experts(
    x: Tensor,  # [P, K], or [P, 2K] with `is_swiglu`: the tokens of each expert, in their order
    parts: Sequence[Any],  # QuantizedRows [E, N, K], checked by `can_fuse`
    experts: Sequence[int],
    counts: Sequence[int],  # tokens of each
    *,
    is_swiglu: bool = False,
) -> Tensor:  # [P, N]
    """Each expert's product with its own tokens."""
    out = torch.empty(len(x), sum(part.num_rows for part in parts))
    groups = _groups(experts, counts)
    by_tile = _by_tile(len(x) // len(experts))
    _multiply(x.contiguous(), parts, out, groups, (None, 0.0, is_swiglu), by_tile=by_tile)
    return out


def _groups(matrices: Sequence[int], counts: Sequence[int]) -> tuple[Any, Any, int]:
    array = c_int32 * len(matrices)
    return array(*matrices), array(*counts), len(matrices)


def _multiply(
    x: Tensor,
    parts: Sequence[QuantizedRows],
    out: Tensor,
    groups: tuple[Any, Any, int],
    before: tuple[int | None, float, bool] = (None, 0.0, False),  # norm, eps, is_swiglu
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    by_tile: bool,
) -> None:
    first = 0
    for part in parts:
        call = _call_of(part)
        assert call is not None, "called only where it is available"
        after = (_pointer(bias, first), _pointer(residual, first), _pointer(out, first))
        call(x.data_ptr(), *before, *after, *groups, part.num_rows, out.stride(0), by_tile)
        first += part.num_rows


def _call_of(rows: QuantizedRows) -> Callable[..., None] | None:
    """The kernel with the rows' own arguments, cached."""
    if "cpu" not in rows.kept:
        kernel, values = _kernel(*_kind(rows)), _code_values(rows)
        call = None
        if kernel is not None and values is not None:
            own = (*_arguments(rows), _pointer(values.bytes), values.bias, values.unit)
            call = functools.partial(kernel, *own)
        rows.kept["cpu"] = call
    found: Callable[..., None] | None = rows.kept["cpu"]
    return found


def _kind(rows: QuantizedRows) -> tuple[int, int, bool, bool]:
    """What a library is compiled for: bits, columns that share a scale, a table, whether codes are
    floats.
    """
    unit = next(unit for unit in UNITS if _group(rows) % unit == 0)
    has_levels = rows.levels is not None
    return rows.bits, unit, has_levels and rows.bits < 8, has_levels and rows.bits == 8


def _code_values(rows: QuantizedRows) -> CodeValues | None:
    """None if bytes cannot represent the values of the codes."""
    if rows.levels is None:
        return CodeValues(bias=rows.bias)
    return CodeValues() if rows.bits == 8 else _levels_as_bytes(tuple(rows.levels.tolist()))


@functools.cache
def _levels_as_bytes(levels: tuple[float, ...]) -> CodeValues | None:
    for unit in (1.0, 0.5):
        whole = [level / unit for level in levels]
        bias = max(0, -int(min(whole)))
        if (
            all(value.is_integer() and 0 <= value + bias < 256 for value in whole)
            and len(whole) <= 16
        ):
            values = [int(value) + bias for value in whole] + [0] * (16 - len(whole))
            return CodeValues(torch.tensor(values, dtype=torch.uint8), bias, unit)
    return None


def _group(rows: QuantizedRows) -> int:
    """A group over all columns may be longer than the row."""
    return rows.group if rows.group < rows.num_columns else -(-rows.num_columns // BLOCK) * BLOCK


@functools.cache
def _kernel(bits: int, unit: int, has_table: bool, is_fp8: bool) -> Callable[..., None] | None:
    constants = {"BITS": bits, "UNIT": unit, "HAS_TABLE": int(has_table), "IS_FP8": int(is_fp8)}
    options = ("-ffp-contract=off", *(f"-D{name}={value}" for name, value in constants.items()))
    source = Path(__file__).with_suffix(".cpp")
    return library.load_function(source, "multiply_quantized", ARGUMENT_TYPES, *options)


def _arguments(rows: QuantizedRows) -> list[object]:
    given: list[object] = [rows.low.data_ptr(), _pointer(rows.high)]
    given += [*_scale_arguments(rows.scales), *_scale_arguments(rows.offsets), int(rows.are_zeros)]
    return [*given, _group(rows), rows.num_columns]


def _scale_arguments(scales: Scales | None) -> list[object]:
    if scales is None:
        return [None, TYPES[None], None, TYPES[None], 1]
    coarse_type = None if scales.coarse is None else scales.coarse.dtype
    return [
        scales.fine.data_ptr(),
        TYPES[scales.fine.dtype],
        _pointer(scales.coarse),
        TYPES[coarse_type],
        scales.repeat,
    ]


def _pointer(tensor: Tensor | None, first: int = 0) -> int | None:
    """The address of element `first` of a float32 tensor."""
    return None if tensor is None else tensor.data_ptr() + 4 * first
