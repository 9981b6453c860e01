"""Quantizes weights at load: round to nearest, without calibration.

FP8 has one scale per 128 x 128 block, INT8 one per row, INT4 one per 128 columns of a row; a head
or an embedding in INT4 uses INT8. `penstock quantize` writes checkpoints with less error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops import Weight
from penstock.ops.quantized import QuantizedRows
from penstock.ops.tiles import TiledRows
from penstock.ops.weight import Part
from penstock.weights.codes import Codes, Scales
from penstock.weights.packing import for_device, pack

SCHEMES = ("fp8", "int8", "int4")
BLOCK = 128
FLOAT8_MAX = 448.0
ROUNDED_ELEMENTS = 2**27  # quantized at a time


def quantize_weight(weight: Weight, scheme: str) -> None:
    """Replaces its values with codes, except for the rows that stay unquantized."""
    values = weight.values.data
    num_rows = values.shape[-2] - weight.num_plain_rows
    rows = _rows(values[..., :num_rows, :], scheme)
    parts: list[Part] = [for_device(rows, weight)]
    if weight.num_plain_rows:
        parts.append(values[..., num_rows:, :].clone())
    weight.quantize(tuple(parts))


def rounded_copy(weight: Weight, scheme: str) -> Weight:
    """The same matrix in other codes, in its own memory. The weight has one part at most."""
    codes = _stacked([round_to(some, scheme) for some in _pieces(weight)])
    copy = Weight(torch.empty_like(weight.values, device="meta"))
    copy.quantize((for_device(pack(codes), weight),))
    return copy


def _pieces(weight: Weight) -> Iterator[Tensor]:
    """Its rows, some at a time: dequantized, all of them would need much memory."""
    num_rows, num_columns = weight.shape
    step = max(1, ROUNDED_ELEMENTS // 8 // num_columns // BLOCK) * BLOCK
    (part,) = weight.parts or (weight.values.data,)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        if isinstance(part, Tensor):
            yield part[first:last]
        else:
            assert isinstance(part, TiledRows), "rows on a GPU are tiled"
            yield part.row_slice(first, last).dequantize()


def _rows(values: Tensor, scheme: str) -> QuantizedRows:
    if values.dim() == 2:
        codes = round_to(values, scheme)
    else:
        count = max(1, ROUNDED_ELEMENTS // values[0].numel())
        codes = _stacked([round_to(some, scheme) for some in values.split(count)])
    return pack(codes)


def _stacked(some: list[Codes]) -> Codes:
    first = some[0]
    scales = Scales(torch.cat([one.scales.fine for one in some]))
    values = torch.cat([one.values.view(torch.uint8) for one in some]).view(first.values.dtype)
    return Codes(values, first.bits, first.block, scales)


def round_to(values: Tensor, scheme: str) -> Codes:  # [..., N, K]
    num_rows, num_columns = values.shape[-2:]
    wide = values.float()
    if scheme == "fp8":
        padding = (0, -num_columns % BLOCK, 0, -num_rows % BLOCK)
        blocks = torch.nn.functional.pad(wide, padding)
        blocks = blocks.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
        scale = _not_zero(blocks.abs().amax(dim=(-3, -1), keepdim=True) / FLOAT8_MAX)
        codes = (blocks / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        codes = codes.flatten(-4, -3).flatten(-2)[..., :num_rows, :num_columns].contiguous()
        scales = Scales(scale[..., 0, :, 0])
        return Codes(codes.view(torch.float8_e4m3fn), 8, (BLOCK, BLOCK), scales)
    bits, group = (8, num_columns) if scheme == "int8" else (4, BLOCK)
    groups = torch.nn.functional.pad(wide, (0, -num_columns % group)).unflatten(-1, (-1, group))
    most = (1 << (bits - 1)) - 1
    scale = _not_zero(groups.abs().amax(-1, keepdim=True) / most).bfloat16().float()
    codes = (groups / scale).round_().clamp_(-most - 1, most).to(torch.int8)
    codes = codes.flatten(-2)[..., :num_columns]
    return Codes(codes, bits, (1, group), Scales(scale[..., 0].bfloat16()))


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))
