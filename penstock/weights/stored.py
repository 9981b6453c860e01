"""A tensor of a checkpoint: its name and shape are known, its data is read on demand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.weights.codes import Codes


class ReadCodes(Protocol):
    def __call__(self, rows: slice | None, columns: slice | None = None) -> Codes:
        """Some rows, or all; for a matrix optionally only some columns."""


@dataclass(frozen=True, slots=True)
class RawRows:
    """Raw rows of a quantized tensor in its file. Any number of them, from several tensors of one
    format, are decoded at once and on any device.
    """

    kind: str
    row_bytes: int
    read: Callable[[slice | None, Tensor], None]  # some rows, or all, into [rows, bytes] uint8
    decode: Callable[[Tensor], Codes]  # [N, bytes] uint8 -> codes of [N, K]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[slice | None], Tensor]  # returns some rows, or all, as a new CPU tensor
    scheme: str = ""  # its storage scheme, such as "Q4_K" or "fp8 128x128"; "": unquantized
    stored_bytes: int | None = None  # in the file, if different from the dtype's
    read_codes: ReadCodes | None = None  # for a quantized tensor
    raw: RawRows | None = None  # for a quantized tensor whose rows contain their scales
    # Returns a part of the tensor and reads no more of the file than necessary.
    read_part: Callable[[tuple[slice, ...]], Tensor] | None = None

    def load(self, rows: slice | None = None) -> Tensor:
        """The tensor, or only these rows of it."""
        return self.read(rows)

    def load_part(self, source: tuple[slice, ...]) -> Tensor:
        """The part between these bounds; dimensions without bounds are whole."""
        if len(source) < 2:
            return self.read(source[0] if source else None)
        if self.read_part is not None:
            return self.read_part(source)
        return self.read(source[0])[(slice(None), *source[1:])].contiguous()

    def load_codes(self, source: tuple[slice, ...]) -> Codes:
        """The same for a quantized tensor, without dequantizing it."""
        assert self.read_codes is not None
        rows, *inner = source or (None,)
        if not inner:
            return self.read_codes(rows)
        if len(self.shape) == 2:
            return self.read_codes(rows, *inner)
        own_rows, columns = [*inner, slice(None)][:2]
        return self.read_codes(rows).cut(own_rows, columns)

    @property
    def num_bytes(self) -> int:
        if self.stored_bytes is not None:
            return self.stored_bytes
        return math.prod(self.shape) * self.dtype.itemsize
