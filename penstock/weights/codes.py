"""Quantised values as every file format can be read: codes, scales, and what is added to them.

`dequantize` is the specification: float32, in the order of operations of the formats' own libraries, so
that its results equal theirs bit for bit. Formats differ in which fields they fill; kernels store the same
numbers in fewer bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scales:
    """One number for each block of a matrix: `fine`, or `fine * coarse` where a format has two levels."""

    fine: Tensor  # [..., N / block_n, K / block_k]  any dtype
    coarse: Tensor | None = None  # broadcasts to `fine` after `repeat` of its last dimension
    repeat: int = 1  # blocks of `fine` in a row for each number of `coarse`
    divides: bool = False  # `fine / coarse`, in the one format that stores the inverse

    def expand(self) -> Tensor:  # float32, the shape of `fine`
        fine = self.fine.float()
        if self.coarse is None:
            return fine
        coarse = self.coarse.float().repeat_interleave(self.repeat, -1)
        return fine / coarse if self.divides else coarse * fine


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [..., N, K]: `value * scale`, `(value - zero) * scale` or `value * scale + offset`.

    The value of a code is the code itself, or `levels[code]`.
    """

    values: Tensor  # [..., N, K]  one code an element: uint8, int8 or float8_e4m3fn
    bits: int  # that a code takes in the file
    block: tuple[int, int]  # rows and columns that share a scale
    scales: Scales
    zeros: Tensor | None = None  # of the shape of the scales
    offsets: Scales | None = None
    levels: Tensor | None = None  # [2 ** bits] float32
    columns: Tensor | None = None  # [K]  column j holds input columns[j]; None: they are in order

    def dequantize(self) -> Tensor:  # [..., N, K] float32
        values = self.values.float() if self.levels is None else self.levels[self.values.long()]
        if self.zeros is not None:
            values = values - self._spread(self.zeros.float())
        weight = values * self._spread(self.scales.expand())
        if self.offsets is not None:
            weight = weight + self._spread(self.offsets.expand())
        if self.columns is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[..., self.columns.long()] = weight
        return ordered

    def _spread(self, per_block: Tensor) -> Tensor:
        """A number a block as a number an element; the last blocks may be cut off by the matrix's end."""
        num_rows, num_columns = self.values.shape[-2:]
        rows, columns = self.block
        spread = per_block.repeat_interleave(columns, -1)[..., :num_columns]
        return spread if rows == 1 else spread.repeat_interleave(rows, -2)[..., :num_rows, :]
