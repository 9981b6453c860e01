"""Quantized rows in the layout of a GPU's tensor cores.

A tile is 16 rows x 128 columns, what a warp multiplies in a step. Its codes are in the order in
which the warp's threads load them, 16 bytes each (`ops/cuda/quantized_rows.cu`); beside them is a
record per row, with the scales of its groups of columns. Codes have 4 or 8 bits: 2 and 3 bits are
widened to 4, 5 and 6 bits and codes with a table of values to 8. E4M3 codes of a dense layer may
stay row-major, the layout of the library that multiplies many tokens (`ops/triton/fp8.py`); a warp
reads tiles faster. All of this is lossless: `dequantize`, the specification of the kernels, gives
the values of the file.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.ops.quantized import QuantizedRows, Scales

TILE_ROWS, STEP = 16, 128  # tile size
NARROW_GROUP = 16
ROW_MAJOR_GROUP = 64  # smallest E4M3 group: an instruction reads parts of each 64 columns
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3, torch.int8: 4}
NO_TYPE = 5
FLOAT8_LEVELS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
TILED_ELEMENTS = 2**26  # tiled at a time


@dataclass(frozen=True, slots=True)
class Fields:
    """The content of a record, in this order: two coarse numbers, scales and offsets of each
    group.
    """

    coarse: torch.dtype | None
    coarse_offset: torch.dtype | None
    scale: torch.dtype
    offset: torch.dtype | None
    are_zeros: bool  # offsets are zero points, subtracted before scaling

    @property
    def types(self) -> tuple[torch.dtype | None, ...]:
        return self.coarse, self.coarse_offset, self.scale, self.offset


@dataclass(frozen=True, slots=True)
class TiledRows:
    """[..., N, K]: `(code - zero) * scale`, `(code - zero point) * scale`, `... + offset`."""

    num_rows: int
    num_columns: int
    bits: int  # 4 or 8
    is_float8: bool  # codes are E4M3
    zero: int  # the code of zero, if there are no zero points
    group: int
    fields: Fields
    codes: Tensor  # [..., tiles, steps, bytes] uint8; row-major: [..., tiles, 16, columns]
    records: Tensor  # [..., tiles, steps, 16, bytes] uint8
    columns: Tensor | None = None  # [..., K]  the input column of each of ours; None: in order
    is_row_major: bool = False
    # [..., N / 128, K / 128] float32, for E4M3 with one scale per 128 x 128 block
    block_scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-3], self.num_rows, self.num_columns)

    @property
    def num_bytes(self) -> int:
        shared = 0 if self.block_scales is None else self.block_scales.nbytes
        return self.codes.nbytes + self.records.nbytes + shared

    @property
    def kind(self) -> tuple[object, ...]:
        """What a kernel is compiled for, besides its sizes."""
        layout = (self.columns is None, self.is_row_major, self.block_scales is None)
        return self.bits, self.is_float8, self.zero, self.group, self.fields, layout

    def dequantize(self) -> Tensor:  # [..., N, K] float32
        if self.is_row_major:
            codes = self.codes.flatten(-3, -2)[..., : self.num_rows, : self.num_columns]
        else:
            codes = self._untiled(_ungather(self.codes, self.bits, self.is_float8, self.is_narrow))
        if self.is_float8:
            values = _float8_levels(codes.device)[codes.long()]
        else:
            values = codes.float() - (0 if self.fields.are_zeros else self.zero)
        scales, offsets = self._read_records()
        if offsets is None:
            weight = values * scales
        elif self.fields.are_zeros:
            weight = (values - offsets) * scales
        else:
            weight = values * scales + offsets
        if self.columns is None:
            return weight
        order = self.columns.long().unsqueeze(-2).expand_as(weight)
        return torch.empty_like(weight).scatter_(-1, order, weight)

    def rows(self, ids: Tensor) -> Tensor:  # [...] -> [..., K] float32
        """The embedding rows of these tokens."""
        flat = ids.flatten().long()
        codes, records = (own[flat // TILE_ROWS, None] for own in (self.codes, self.records))
        chosen = replace(self, num_rows=TILE_ROWS, codes=codes, records=records).dequantize()
        own_rows = chosen[torch.arange(len(flat), device=flat.device), flat % TILE_ROWS]
        return own_rows.view(*ids.shape, self.num_columns)

    def row_slice(self, first: int, last: int) -> TiledRows:
        """A matrix of some of the rows, without a copy. `first` is a multiple of 128."""
        tiles = slice(first // TILE_ROWS, -(-last // TILE_ROWS))
        blocks = slice(first // STEP, -(-last // STEP))
        return replace(
            self,
            num_rows=last - first,
            codes=self.codes[tiles],
            records=self.records[tiles],
            block_scales=None if self.block_scales is None else self.block_scales[blocks],
        )

    @property
    def is_narrow(self) -> bool:
        return self.group == NARROW_GROUP

    @property
    def num_groups(self) -> int:
        """Groups per step, each with its own scale."""
        return max(1, STEP // self.group)

    def _untiled(self, blocks: Tensor) -> Tensor:  # [..., tiles, steps, 16, 128] -> [..., N, K]
        matrix = blocks.transpose(-3, -2).flatten(-2).flatten(-3, -2)
        return matrix[..., : self.num_rows, : self.num_columns]

    def _read_records(self) -> tuple[Tensor, Tensor | None]:
        """Scale and offset of every weight."""
        first, found = 0, list[Tensor | None]()
        for type, count in zip(self.fields.types, (1, 1, self.num_groups, self.num_groups)):
            if type is None:
                found.append(None)
                continue
            size = type.itemsize * count
            numbers = self.records[..., first : first + size].contiguous().view(type).float()
            found.append(numbers.repeat_interleave(STEP // count, -1))
            first += size
        coarse, coarse_offset, scale, offset = found
        assert scale is not None
        scales = scale if coarse is None else coarse * scale
        if offset is None:
            return self._untiled(scales), None
        offsets = offset if coarse_offset is None else coarse_offset * offset
        return self._untiled(scales), self._untiled(offsets)


def can_tile(rows: QuantizedRows) -> bool:
    group, levels = rows.group, rows.levels
    has_groups = STEP % group == 0 or group % STEP == 0 or group >= rows.num_columns
    return has_groups and (levels is None or _is_float8(rows) or _level_factor(levels) is not None)


def tile(rows: QuantizedRows, *, keeps_rows: bool = False) -> TiledRows:
    """Lossless. A stack of matrices is processed a few at a time: intermediates are larger.
    `keeps_rows`: E4M3 codes should stay row-major, if groups are large enough.
    """
    count = max(1, TILED_ELEMENTS // (rows.num_rows * rows.num_columns))
    if rows.low.dim() == 2 or count >= len(rows.low):
        return _tile(rows, keeps_rows)
    starts = range(0, len(rows.low), count)
    tiled = [_tile(rows.take(first, first + count), keeps_rows) for first in starts]
    if len({one.kind for one in tiled}) > 1:  # some have narrower scale dtypes than others
        return _tile(rows, keeps_rows)
    names = ["codes", "records", *(["block_scales"] if tiled[0].block_scales is not None else [])]
    joined = {name: torch.cat([getattr(one, name) for one in tiled]) for name in names}
    return replace(tiled[0], **joined)  # type: ignore[arg-type]


def _tile(rows: QuantizedRows, keeps_rows: bool) -> TiledRows:
    codes, zero, is_float8, scales = rows.codes(), rows.bias, False, rows.scales
    bits = 4 if rows.bits <= 4 else 8
    if _is_float8(rows):
        is_float8, zero = True, 0
    elif rows.levels is not None:
        factor = _level_factor(rows.levels)
        assert factor is not None, "called only for rows that can be tiled"
        signed = (rows.levels * factor).to(torch.int16)
        codes, zero, bits = (signed + 128).to(torch.uint8)[codes.long()], 128, 8
        scales = _divided(scales, factor)
    steps = -(-rows.num_columns // STEP)
    group = rows.group if rows.group < rows.num_columns else max(STEP, rows.group // STEP * STEP)
    fields, records = _records(scales, rows.offsets, rows.are_zeros, group, steps)
    padding = (0, steps * STEP - rows.num_columns, 0, -rows.num_rows % TILE_ROWS)
    padded = torch.nn.functional.pad(codes, padding).unflatten(-2, (-1, TILE_ROWS))
    is_row_major = keeps_rows and is_float8 and group >= ROW_MAJOR_GROUP
    if not is_row_major:
        blocks = padded.unflatten(-1, (steps, STEP)).transpose(-3, -2)
        padded = _gather(blocks, bits, is_float8, group == NARROW_GROUP)
    records = torch.nn.functional.pad(records, (0, 0, 0, 0, 0, -rows.num_rows % TILE_ROWS))
    records = records.unflatten(-3, (-1, TILE_ROWS)).transpose(-3, -2).contiguous()
    columns, codes = rows.columns, padded.contiguous()
    is_movable = not is_row_major and (group <= STEP or group >= rows.num_columns)
    order = _step_order(columns) if columns is not None and is_movable else None
    if order is not None:  # no kernel has to gather the input
        columns, codes, records = None, codes[..., order, :], records[..., order, :, :]
    return TiledRows(
        num_rows=rows.num_rows,
        num_columns=rows.num_columns,
        bits=bits,
        is_float8=is_float8,
        zero=zero,
        group=group,
        fields=fields,
        codes=codes,
        records=records,
        columns=columns,
        is_row_major=is_row_major,
        block_scales=_block_scales(scales, group) if is_float8 else None,
    )


def _step_order(columns: Tensor) -> Tensor | None:
    """The steps in the order of the input, if columns are permuted by whole steps, as heads are."""
    if columns.dim() > 1 or len(columns) % STEP:
        return None
    steps = columns.long().view(-1, STEP)
    are_whole = steps[:, 0] % STEP == 0
    in_step = torch.arange(STEP, device=columns.device)
    if not are_whole.all() or not torch.equal(steps, steps[:, :1] + in_step):
        return None
    return steps[:, 0].argsort()


def _block_scales(scales: Scales, group: int) -> Tensor | None:
    """One per STEP rows, if all of these have the same."""
    own = scales.expand()  # [..., N, groups]
    if group != STEP or own.shape[-2] % STEP:
        return None
    blocks = own.unflatten(-2, (-1, STEP))
    first = blocks[..., 0, :]
    return (
        first.contiguous() if torch.equal(blocks, first.unsqueeze(-2).expand_as(blocks)) else None
    )


def _is_float8(rows: QuantizedRows) -> bool:
    levels = rows.levels
    return levels is not None and torch.equal(levels.cpu().nan_to_num(), FLOAT8_LEVELS.nan_to_num())


def _level_factor(levels: Tensor) -> int | None:
    """The factor that turns the levels into 8-bit integers."""
    for factor in (1, 2):
        scaled = levels * factor
        if torch.equal(scaled, scaled.round()) and scaled.min() >= -128 and scaled.max() <= 127:
            return factor
    return None


def _divided(scales: Scales, factor: int) -> Scales:
    if factor == 1:
        return scales
    if scales.coarse is not None:
        return replace(scales, coarse=scales.coarse.float() / factor)
    return replace(scales, fine=scales.fine.float() / factor)


def _records(
    scales: Scales, offsets: Scales | None, are_zeros: bool, group: int, steps: int
) -> tuple[Fields, Tensor]:  # [..., N, steps, bytes]
    own = [scales, *([] if offsets is None else [offsets])]
    own = [one if _is_step_wise(one, group) else Scales(one.expand()) for one in own]
    own = [one.mapped(_narrowed) for one in own]
    if any(one.fine.dtype == torch.float32 for one in own):
        own = [one.mapped(torch.Tensor.float) for one in own]  # so that no number spans two words
    coarse = [None if one.coarse is None else _coarse(one, group, steps) for one in own]
    fine = [_fine(one.fine, group, steps) for one in own]
    if offsets is None:
        coarse.append(None)
        fine.append(None)  # type: ignore[arg-type]
    parts = [part for part in (*coarse, *fine) if part is not None]
    record = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
    if record.shape[-1] != 2:
        record = torch.nn.functional.pad(record, (0, -record.shape[-1] % 4))
    types = [None if part is None else part.dtype for part in (*coarse, *fine)]
    assert types[2] is not None
    return Fields(types[0], types[1], types[2], types[3], are_zeros), record


def _narrowed(numbers: Tensor) -> Tensor:
    """In half the bytes, if that is exact."""
    if numbers.dtype == torch.float32:
        for dtype in (torch.float16, torch.bfloat16):
            if torch.equal(numbers.to(dtype).float(), numbers):
                return numbers.to(dtype)
    return numbers


def _is_step_wise(scales: Scales, group: int) -> bool:
    """Whether a coarse number applies to whole steps."""
    if scales.coarse is None:
        return True
    span = group * scales.repeat
    return span % STEP == 0 or scales.repeat >= scales.fine.shape[-1]


def _fine(numbers: Tensor, group: int, steps: int) -> Tensor:  # [..., N, groups] -> [.., steps, G]
    if group >= STEP:
        places = torch.arange(steps, device=numbers.device) * STEP // group
        return numbers[..., places.clamp(max=numbers.shape[-1] - 1)].unsqueeze(-1)
    count = STEP // group
    padded = torch.nn.functional.pad(numbers, (0, steps * count - numbers.shape[-1]))
    return padded.unflatten(-1, (steps, count))


def _coarse(scales: Scales, group: int, steps: int) -> Tensor:  # -> [..., N, steps, 1]
    assert scales.coarse is not None
    places = torch.arange(steps, device=scales.coarse.device) * STEP // group // scales.repeat
    return scales.coarse[..., places.clamp(max=scales.coarse.shape[-1] - 1)].unsqueeze(-1)


@functools.cache  # a graph that dequantizes cannot copy to a GPU
def _float8_levels(device: torch.device) -> Tensor:  # [256] float32
    return FLOAT8_LEVELS.to(device)


@functools.cache
def _order(bits: int, is_float8: bool, is_narrow: bool, device: torch.device) -> Tensor:  # [2048]
    """The position in a block of 16 x 128 codes, row by row, of each code of a tile."""
    instruction, quarter, element = torch.meshgrid(
        torch.arange(8), torch.arange(4), torch.arange(4), indexing="ij"
    )
    if is_narrow:
        columns = 16 * instruction + 4 * quarter + element
    else:
        columns = instruction // 2 * 32 + 8 * quarter + instruction % 2 * 4 + element
    if bits == 4:  # [4 words, 4 quarters, 8 nibbles]: a pair is 16 bits apart
        nibbles = columns.view(4, 2, 4, 2, 2).permute(0, 2, 4, 1, 3)
        by_lane = nibbles.reshape(1, 4, 4, 8)  # chunk, word, quarter, code
    else:
        order = [2, 0, 3, 1] if is_float8 else [0, 1, 2, 3]
        by_lane = columns.view(2, 4, 4, 4)[..., order]
    rows = torch.arange(16).view(1, 2, 8, 1, 1, 1) * STEP  # half, lane's row
    places = rows + by_lane.transpose(1, 2)[:, None, None]  # chunk, half, row, quarter, word, code
    return places.flatten().to(device)


def _gather(blocks: Tensor, bits: int, is_float8: bool, is_narrow: bool) -> Tensor:
    """[..., 16, 128] -> [..., bytes]"""
    order = _order(bits, is_float8, is_narrow, blocks.device)
    codes = blocks.flatten(-2)[..., order]
    if bits == 8:
        return codes.contiguous()
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def _ungather(codes: Tensor, bits: int, is_float8: bool, is_narrow: bool) -> Tensor:
    """[..., bytes] -> [..., 16, 128]"""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    order = _order(bits, is_float8, is_narrow, codes.device)
    return torch.empty_like(codes).index_copy_(-1, order, codes).unflatten(-1, (TILE_ROWS, STEP))
