"""The common form of quantized weights from every file format: codes, scales, zero points and
offsets.

`dequantize` is the specification: float32, in the order of operations of the formats' own
libraries, so that its results equal theirs bit for bit. Formats differ in which fields they fill;
kernels store the same values in fewer bytes.
"""

from __future__ import annotations

import math
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

    values: Tensor  # [..., N, K]  one code per element: uint8, int8 or float8_e4m3fn
    bits: int  # per code in the file
    block: tuple[int, int]  # rows and columns that share a scale
    scales: Scales
    zeros: Tensor | None = None  # same shape as the scales
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
            weight = self.values.to(torch.float32, copy=True)  # changed in place
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

    def cut(self, rows: slice, columns: slice) -> Codes:
        """Some rows and columns of each matrix, exactly. A group that is cut is split into smaller
        ones with the same scale. Where that is impossible, because columns are permuted, each
        column gets its own group, and `can_pack` refuses the result.
        """
        codes = self
        if rows != slice(None):
            codes = codes._cut_rows(*rows.indices(codes.values.shape[-2])[:2])
        if columns != slice(None):
            codes = codes._cut_columns(*columns.indices(codes.values.shape[-1])[:2])
        return codes

    def _cut_rows(self, first: int, end: int) -> Codes:
        height = self.block[0]
        if first % height == 0 or first // height == (end - 1) // height:
            blocks = torch.arange(first // height, -(-end // height))
        else:
            height, blocks = 1, torch.arange(first, end) // height

        def chosen(numbers: Tensor) -> Tensor:
            return numbers if numbers.shape[-2] == 1 else numbers[..., blocks, :]

        return replace(
            self,
            values=self.values[..., first:end, :].contiguous(),
            block=(height, self.block[1]),
            scales=self.scales.mapped(chosen),
            zeros=None if self.zeros is None else chosen(self.zeros),
            offsets=None if self.offsets is None else self.offsets.mapped(chosen),
        )

    def with_columns(self, columns: slice | None, num_columns: int) -> Codes:
        """For codes whose values were read for these columns only, while their scales are
        complete.
        """
        if columns is None:
            return self
        return self._cut_columns(*columns.indices(num_columns)[:2], is_read=True)

    def _cut_columns(self, first: int, end: int, *, is_read: bool = False) -> Codes:
        width = self.block[1]
        if self.columns is None:
            kept: slice | Tensor = slice(first, end)
            if first % width and first // width != (end - 1) // width:
                width = math.gcd(width, first)
            groups = torch.arange(first, end, width) // self.block[1]
            columns = None
        else:
            inside = (self.columns >= first) & (self.columns < end)
            kept = inside.nonzero().flatten()
            width = _widest_groups(kept // width, width)
            groups = kept[::width] // self.block[1]
            columns = self.columns[kept] - first
        return replace(
            self,
            values=self.values if is_read else self.values[..., kept].contiguous(),
            block=(self.block[0], width),
            scales=_choose_groups(self.scales, groups),
            zeros=None if self.zeros is None else self.zeros[..., groups],
            offsets=None if self.offsets is None else _choose_groups(self.offsets, groups),
            columns=columns,
        )

    def _each_block(
        self, change: Callable[[Tensor, Tensor], Tensor], weight: Tensor, per_block: Tensor
    ) -> Tensor:
        """Applies one number per block to a weight; the last blocks may extend beyond the
        matrix.
        """
        num_rows, num_columns = weight.shape[-2:]
        rows, columns = min(self.block[0], num_rows), min(self.block[1], num_columns)
        if weight.numel() and num_rows % rows == 0 and num_columns % columns == 0:
            blocks = weight.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
            change(blocks, per_block[..., :, None, :, None])
            return weight
        spread = per_block.repeat_interleave(columns, -1)[..., :num_columns]
        return change(weight, spread.repeat_interleave(rows, -2)[..., :num_rows, :])


def _choose_groups(scales: Scales, groups: Tensor) -> Scales:
    fine = scales.fine[..., groups]
    if scales.coarse is None or scales.coarse.shape[-1] == 1:
        return replace(scales, fine=fine)
    repeat = scales.repeat
    is_aligned = torch.equal(groups, torch.arange(len(groups)) + groups[0])
    repeat = math.gcd(repeat, int(groups[0])) if is_aligned else 1
    coarse = scales.coarse[..., groups[::repeat] // scales.repeat]
    return replace(scales, fine=fine, coarse=coarse, repeat=repeat)


def _widest_groups(group_of: Tensor, width: int) -> int:
    """The largest width, at most `width`, such that every aligned run of it is within one group."""
    while width > 1:
        padded = torch.nn.functional.pad(group_of, (0, -len(group_of) % width), value=-1)
        rows = padded.view(-1, width)
        if bool(((rows == rows[:, :1]) | (rows < 0)).all()):
            return width
        width = width // 2 if width % 2 == 0 else 1
    return 1
