"""Quantised values as every file format can be read: codes, scales, and what is added to them.

`dequantize` is the specification: float32, in the order of operations of the formats' own
libraries, so that its results equal theirs bit for bit. Formats differ in which fields they fill;
kernels store the same numbers in fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.ops.quantized import Scales

__all__ = ["Codes", "Scales"]


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

    def to(self, device: torch.device) -> Codes:
        """The same codes on a device, where `dequantize` gives the same bits."""
        moved = {
            name: part.to(device)
            for name in ("values", "scales", "zeros", "offsets", "levels", "columns")
            if (part := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def dequantize(self) -> Tensor:  # [..., N, K] float32
        if self.levels is None:
            weight = self.values.to(torch.float32, copy=True)  # it is changed in place
        else:
            weight = self.levels[self.values.long()]
        if self.zeros is not None:
            weight = self._each_block(torch.Tensor.sub_, weight, self.zeros.float())
        weight = self._each_block(torch.Tensor.mul_, weight, self.scales.expand())
        if self.offsets is not None:
            weight = self._each_block(torch.Tensor.add_, weight, self.offsets.expand())
        if self.columns is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[..., self.columns.long()] = weight
        return ordered

    def _each_block(
        self, change: Callable[[Tensor, Tensor], Tensor], weight: Tensor, per_block: Tensor
    ) -> Tensor:
        """Changes a weight by a number for each block; the last blocks may be cut off by the
        matrix's end.
        """
        num_rows, num_columns = weight.shape[-2:]
        rows, columns = min(self.block[0], num_rows), min(self.block[1], num_columns)
        if weight.numel() and num_rows % rows == 0 and num_columns % columns == 0:
            blocks = weight.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
            change(blocks, per_block[..., :, None, :, None])
            return weight
        spread = per_block.repeat_interleave(columns, -1)[..., :num_columns]
        return change(weight, spread.repeat_interleave(rows, -2)[..., :num_rows, :])
