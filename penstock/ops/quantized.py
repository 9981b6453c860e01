"""Rows of a weight that stay quantized in memory: codes in bit planes, with a scale per group of
columns.

A plane holds 8, 4, 2 or 1 bits of each code, for blocks of 128 columns. Its 64 bytes have one field
for the even columns of a block and one for the odd ones: a byte of a 4-bit plane holds columns 2i
and 2i + 1. Planes of 2 and 1 bits hold two and four blocks, one after the other from the lowest
bits up; in an 8-bit plane, 64 bytes hold the even columns and the next 64 the odd ones. A code of
3, 5 or 6 bits has a low plane and a high one.

`dequantize` is the specification of the kernels. The layout is lossless: codes, scales and offsets
are those of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.ops.cpu.memory import new_tensor

BLOCK = 128  # columns
# bits of a code -> bits of its low and of its high plane
PLANES = {1: (1, 0), 2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
NARROW_TYPES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Scales:
    """One number per block of a matrix: `fine`, or `fine * coarse` in formats with two levels."""

    fine: Tensor  # [..., N / block_n, K / block_k]  any dtype; in QuantizedRows [..., N, groups]
    coarse: Tensor | None = None  # broadcasts to `fine` after `repeat` of its last dimension
    repeat: int = 1  # consecutive blocks of `fine` per number of `coarse`
    divides: bool = (
        False  # `fine / coarse`, in the one format that stores the inverse; not in QuantizedRows
    )

    @property
    def coarse_dtype(self) -> torch.dtype | None:
        return None if self.coarse is None else self.coarse.dtype

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Scales:
        fine = change(self.fine)  # first: `change` may depend on this order
        return replace(self, fine=fine, coarse=None if self.coarse is None else change(self.coarse))

    def to(self, device: torch.device) -> Scales:
        return self.mapped(lambda tensor: tensor.to(device))

    def expand(self) -> Tensor:  # float32, the shape of `fine`
        fine = self.fine.float()
        if self.coarse is None:
            return fine
        coarse = self.coarse.float().repeat_interleave(self.repeat, -1)[..., : fine.shape[-1]]
        return fine / coarse if self.divides else coarse * fine


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """[..., N, K]: `value * scale`, `(value - zero) * scale` or `value * scale + offset`."""

    num_columns: int
    bits: int
    group: int  # columns that share a scale: a multiple of 16
    low: Tensor  # [..., N, bytes] uint8
    high: Tensor | None  # the same, for the upper bits
    scales: Scales
    offsets: Scales | None  # or zeros
    are_zeros: bool  # `offsets` are zero points, subtracted before scaling
    levels: Tensor | None  # [2 ** bits] float32  the value of each code; None: code - bias
    bias: int
    columns: Tensor | None = None  # [K]  the input column of each of ours; None: in order
    kept: dict[str, Any] = field(
        init=False, default_factory=dict, compare=False
    )  # prepared once by kernels

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.low.shape[:-1], self.num_columns)

    @property
    def num_rows(self) -> int:
        return self.low.shape[-2]

    @property
    def kind(self) -> tuple[object, ...]:
        """What rows must have in common to be one part."""
        blocks = (self.scales, self.offsets)
        types = tuple(
            None if one is None else (one.fine.dtype, one.coarse_dtype, one.repeat)
            for one in blocks
        )
        levels = (
            None if self.levels is None else self.levels.cpu().numpy().tobytes()
        )  # so that NaN equals itself
        numbers = (self.bits, self.group, self.are_zeros, self.bias)
        return (
            *numbers,
            self.low.shape[:-2],
            self.num_columns,
            types,
            levels,
            self.columns is None,
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.own_tensors())

    @staticmethod
    def stack(matrices: list[QuantizedRows]) -> QuantizedRows:
        """Stacks the rows of experts, all of one format and size."""
        tensors = [iter(matrix.own_tensors()) for matrix in matrices]
        return matrices[0].mapped(lambda _: torch.stack([next(one) for one in tensors]))

    @staticmethod
    def join(parts: Iterable[QuantizedRows], num_rows: int) -> QuantizedRows:
        """Concatenates rows of one format with the same columns, part by part."""
        joined, end = None, 0
        for part in parts:
            if joined is None:
                joined = part.mapped(lambda own: _with_rows(own, num_rows), columns=False)
            rows = slice(end, end := end + part.num_rows)
            for own, theirs in zip(
                joined.own_tensors(columns=False), part.own_tensors(columns=False), strict=True
            ):
                own[..., rows, :] = theirs
        assert joined is not None
        assert end == num_rows
        return joined

    def unflatten(self, num_matrices: int) -> QuantizedRows:
        """Turns the rows of consecutive matrices into a stack."""
        assert self.columns is None
        return self.mapped(lambda tensor: tensor.unflatten(0, (num_matrices, -1)))

    def select(self, expert: int) -> QuantizedRows:
        """One matrix of a stack."""
        return self.mapped(lambda tensor: tensor[expert])

    def take(self, first: int, end: int) -> QuantizedRows:
        """Some matrices of a stack."""
        return self.mapped(lambda tensor: tensor[first:end])

    def slice(self, first: int, end: int) -> QuantizedRows:
        return self.mapped(lambda tensor: tensor[first:end], columns=False)

    def rows(self, ids: Tensor) -> Tensor:  # [...] -> [..., K] float32
        """The embedding rows of these tokens."""
        flat = ids.flatten()
        chosen = self.mapped(lambda tensor: tensor[flat], columns=False)
        return chosen.dequantize().view(*ids.shape, self.num_columns)

    def codes(self) -> Tensor:  # [..., N, K] uint8
        low_bits, high_bits = PLANES[self.bits]
        codes = _read_plane(self.low, low_bits, self.num_columns)
        if self.high is None:
            return codes
        return codes | _read_plane(self.high, high_bits, self.num_columns) << low_bits

    def dequantize(self) -> Tensor:  # [..., N, K] float32
        codes = self.codes()
        values = codes.float() - self.bias if self.levels is None else self.levels[codes.long()]
        scales = self._spread(self.scales.expand())
        if self.offsets is None:
            weight = values * scales
        elif self.are_zeros:
            weight = (values - self._spread(self.offsets.expand())) * scales
        else:
            weight = values * scales + self._spread(self.offsets.expand())
        return self.in_order(weight)

    def in_order(self, weight: Tensor) -> Tensor:  # [..., K] of our columns -> of the inputs'
        if self.columns is None:
            return weight
        ordered = torch.empty_like(weight)
        return ordered.scatter_(-1, self.columns.long().unsqueeze(-2).expand_as(weight), weight)

    def _spread(self, by_group: Tensor) -> Tensor:
        return by_group.repeat_interleave(self.group, -1)[..., : self.num_columns]

    def own_tensors(self, columns: bool = True) -> list[Tensor]:
        """The tensors with one entry per matrix of a stack; all matrices share `levels`."""
        blocks = [one for one in (self.scales, self.offsets) if one is not None]
        found = [
            self.low,
            self.high,
            *(tensor for one in blocks for tensor in (one.fine, one.coarse)),
        ]
        return [
            tensor for tensor in (*found, self.columns if columns else None) if tensor is not None
        ]

    def mapped(self, change: Callable[[Tensor], Tensor], *, columns: bool = True) -> QuantizedRows:
        """The same with its own tensors changed, in the order of `own_tensors`."""

        def changed(value: Tensor | None) -> Tensor | None:
            return None if value is None else change(value)

        return replace(
            self,
            low=change(self.low),
            high=changed(self.high),
            scales=self.scales.mapped(change),
            offsets=None if self.offsets is None else self.offsets.mapped(change),
            columns=changed(self.columns) if columns else self.columns,
        )


def _with_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """Uninitialized, with that many rows."""
    shape = (*tensor.shape[:-2], num_rows, tensor.shape[-1])
    return new_tensor(shape, tensor.dtype, tensor.device)


def write_plane(codes: Tensor, bits: int) -> Tensor:  # [..., K] uint8 -> [..., bytes] uint8
    """An incomplete last block is padded with zeros."""
    blocks_in_byte = max(1, 4 // bits)
    padding = -codes.shape[-1] % (BLOCK * blocks_in_byte)
    fields = torch.nn.functional.pad(codes, (0, padding)).unflatten(
        -1, (-1, blocks_in_byte, BLOCK // 2, 2)
    )
    if bits == 8:
        return fields.squeeze(-3).transpose(-1, -2).flatten(-3)
    plane = torch.zeros_like(fields[..., 0, :, 0])
    for block in range(blocks_in_byte):
        for odd in range(2):
            plane |= fields[..., block, :, odd] << (bits * (2 * block + odd))
    return plane.flatten(-2)


def _read_plane(
    plane: Tensor, bits: int, num_columns: int
) -> Tensor:  # [..., bytes] -> [..., K] uint8
    if bits == 8:
        halves = plane.unflatten(-1, (-1, 2, BLOCK // 2)).transpose(-1, -2)
        return halves.flatten(-3)[..., :num_columns]
    vectors = plane.unflatten(-1, (-1, 1, BLOCK // 2, 1))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device).view(-1, 1, 2)
    fields = (vectors >> shifts) & ((1 << bits) - 1)  # [..., vectors, blocks, 64, 2]
    return fields.flatten(-4)[..., :num_columns]


def pack_codes(
    codes: Tensor, bits: int
) -> tuple[Tensor, Tensor | None]:  # [..., K] uint8 -> planes
    low_bits, high_bits = PLANES[bits]
    low = write_plane(codes & ((1 << low_bits) - 1), low_bits)
    return low, write_plane(codes >> low_bits, high_bits) if high_bits else None
