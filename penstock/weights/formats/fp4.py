"""FP4 E2M1 codes, two to a byte: NVFP4 (an E4M3 scale per 16, and one per tensor) and MXFP4 (E8M0
per 32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.weights.codes import Codes, Scales
from penstock.weights.formats.parts import BYTES, CODES, Grid, Parts, read_packed
from penstock.weights.stored import StoredTensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
E4M3 = (torch.uint8, torch.float8_e4m3fn)


def as_e8m0(stored: Tensor) -> Tensor:
    return stored.view(torch.float8_e8m0fnu)


def as_e4m3(stored: Tensor) -> Tensor:
    return stored.view(torch.float8_e4m3fn)


def open_nvfp4(
    parts: Parts, scale: str, coarse: str, divides: bool, group: int = 16
) -> StoredTensor:
    """`divides`: whether the scale of the tensor divides the others instead of multiplying them."""
    codes = parts.take(CODES, BYTES)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    grid = Grid.of(parts, scale, shape, (1, group), E4M3)
    whole = Grid.of(parts, coarse, shape, (shape[-2], shape[-1]))

    def read_codes(rows: slice | None, columns: slice | None = None) -> Codes:
        fine, block = grid.read(rows)
        per_tensor, _ = whole.read(rows if len(shape) > 2 else None)
        scales = Scales(as_e4m3(fine), per_tensor, divides=divides)
        values = read_packed(codes, 4, shape[-1], rows, columns)
        return Codes(values, 4, block, scales, levels=E2M1).with_columns(columns, shape[-1])

    return parts.make(shape, "nvfp4", read_codes)


def open_mxfp4(parts: Parts, scale: str, group: int = 32) -> StoredTensor:
    codes = parts.take(CODES, BYTES)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    grid = Grid.of(parts, scale, shape, (1, group), E8M0)

    def read_codes(rows: slice | None, columns: slice | None = None) -> Codes:
        fine, block = grid.read(rows)
        values = read_packed(codes, 4, shape[-1], rows, columns)
        found = Codes(values, 4, block, Scales(as_e8m0(fine)), levels=E2M1)
        return found.with_columns(columns, shape[-1])

    return parts.make(shape, "mxfp4", read_codes)
