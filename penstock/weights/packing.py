"""Turns the codes of a file into the rows that ops multiply: the same values in the kernels'
layout.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from penstock.models.placement import Placement
from penstock.ops.cpu.memory import new_tensor
from penstock.ops.quantized import NARROW_TYPES, PLANES, QuantizedRows, pack_codes
from penstock.ops.tiles import FLOAT8_LEVELS, can_tile, tile
from penstock.ops.weight import Part, Weight
from penstock.weights.codes import Codes, Scales
from penstock.weights.stored import StoredTensor

SMALLEST_GROUP = 16
PACKED_ELEMENTS = 2**22  # packed at a time
NUM_READERS = 8  # threads, each for one tensor
LAUNCH_BYTES = 8 << 20  # what a GPU reads in the time of one extra launch


def can_pack(codes: Codes) -> bool:
    """Whether kernels have a layout for these codes; others are dequantized at load."""
    types = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    has_layout = codes.bits in PLANES and codes.values.dtype in types
    return has_layout and codes.block[1] % SMALLEST_GROUP == 0


def pack(codes: Codes, rows: Tensor | None = None) -> QuantizedRows:
    """Lossless. `rows` gives the stored row for each of ours, if the order differs."""
    values, levels, bias = codes.values, codes.levels, 0
    if values.dtype == torch.float8_e4m3fn:
        levels = FLOAT8_LEVELS.to(values.device)
        values = values.view(torch.uint8)
    elif values.dtype == torch.int8:  # shifted to unsigned codes
        bias = 1 << (codes.bits - 1)
        values = values.view(torch.uint8) + bias  # modulo 256
    device = values.device
    order = torch.arange(values.shape[-2], device=device) if rows is None else rows.to(device)
    low, high = _planes(values, codes.bits, None if rows is None else order)
    by_row = None if rows is None and codes.block[0] == 1 else order // codes.block[0]
    offsets, are_zeros = None, codes.zeros is not None
    if codes.zeros is not None:
        zeros = codes.zeros.float() + bias if bias else codes.zeros
        offsets = Scales(_by_row(_narrow(zeros), by_row))
        bias = 0  # the levels include it
    elif codes.offsets is not None:
        offsets = _scales_by_row(codes.offsets, by_row)
    return QuantizedRows(
        num_columns=values.shape[-1],
        bits=codes.bits,
        group=codes.block[1],
        low=low,
        high=high,
        scales=_scales_by_row(codes.scales, by_row),
        offsets=offsets,
        are_zeros=are_zeros,
        levels=levels,
        bias=bias,
        columns=codes.columns,
    )


def _planes(values: Tensor, bits: int, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Processes a few rows at a time, since intermediate tensors take several times as much
    memory.
    """
    planes: tuple[Tensor | None, ...] | None = None
    num_all = values.shape[-2] if order is None else len(order)
    num_rows = _rows_at_once(values[..., 0, :].numel(), values.device)
    if order is None and num_all <= num_rows:
        return pack_codes(values, bits)
    for first in range(0, max(1, num_all), num_rows):
        own = slice(first, first + num_rows)
        packed = pack_codes(values[..., own if order is None else order[own], :], bits)
        if planes is None:
            planes = tuple(part if part is None else _new_plane(part, num_all) for part in packed)
        for plane, part in zip(planes, packed, strict=True):
            if plane is not None and part is not None:
                plane[..., own, :] = part
    assert planes is not None
    low, high = planes
    assert low is not None
    return low, high


def _rows_at_once(row_elements: int, device: torch.device) -> int:
    at_once = PACKED_ELEMENTS if device.type == "cpu" else 16 * PACKED_ELEMENTS
    return max(1, at_once // max(1, row_elements))


def _new_plane(first: Tensor, num_rows: int) -> Tensor:
    return new_tensor((*first.shape[:-2], num_rows, first.shape[-1]), first.dtype, first.device)


def _scales_by_row(scales: Scales, rows: Tensor | None) -> Scales:
    if scales.coarse is None or scales.divides:
        return Scales(_by_row(_narrow(scales.expand() if scales.divides else scales.fine), rows))
    fine = _by_row(_narrow(scales.fine), rows)
    shape = (*scales.fine.shape[:-1], scales.coarse.shape[-1])
    given = scales.coarse if scales.coarse.dtype == torch.float16 else scales.coarse.float()
    coarse = _by_row(given.expand(shape), rows)  # kernels read these two types
    num_groups = fine.shape[-1]
    return Scales(fine, coarse, num_groups if coarse.shape[-1] == 1 else scales.repeat)


def _narrow(numbers: Tensor) -> Tensor:
    """Converts to a dtype that kernels read."""
    if numbers.dtype not in NARROW_TYPES:
        numbers = numbers.float()
    if numbers.dtype == torch.float32 and torch.equal(numbers.bfloat16().float(), numbers):
        numbers = numbers.bfloat16()  # exact for powers of two
    return numbers


def _by_row(numbers: Tensor, rows: Tensor | None) -> Tensor:
    """One row per row of the weight, in our order."""
    return (numbers if rows is None else numbers[..., rows, :]).contiguous()


Source = tuple[StoredTensor, Placement]


class WeightParts:
    """Collects the tensors of one weight: rows, or rows of each expert. They are read when all are
    known, many experts at once.
    """

    def __init__(self, weight: Weight, device: torch.device) -> None:
        self._weight = weight
        self._device = device
        self._found: dict[int, dict[int, Source]] = defaultdict(dict)  # by first row and expert
        self._is_stack = False
        self.cut_apart: list[str] = []  # dequantized because a rank's part splits groups

    def add(self, tensor: StoredTensor, placement: Placement) -> None:
        expert, first = 0, 0
        for place in placement.index:
            if isinstance(place, slice):
                first = place.start
            else:
                expert, self._is_stack = place, True
        self._found[first][expert] = tensor, placement

    def finish(self) -> None:
        parts = []
        for _, by_expert in sorted(self._found.items()):
            parts.append(self._read([source for _, source in sorted(by_expert.items())]))
        weight, parts = self._weight, _joined(parts)
        if weight.is_dense and self._device.type == "cuda":
            parts = join_widened(parts)
        weight.quantize(tuple(for_device(part, weight) for part in parts))

    def _read(self, sources: list[Source]) -> Part:
        if can_read_at_once(sources):
            rows = read_at_once(sources, self._device)
            return rows.unflatten(len(sources)) if self._is_stack else rows
        parts = [self._read_one(*source) for source in sources]
        return self._stacked(parts) if self._is_stack else parts[0]

    def _read_one(self, tensor: StoredTensor, placement: Placement) -> Part:
        if tensor.read_codes is None:
            return self._plain(placement.converted(tensor.load_part(placement.source)))
        codes = tensor.load_codes(placement.source).to(self._device)
        order = _row_order(placement)
        if can_pack(codes) and (placement.convert is None or order is not None):
            return pack(codes, order)
        if len(placement.source) > 1 and codes.block[1] < SMALLEST_GROUP:
            self.cut_apart.append(tensor.name)
        return self._plain(placement.converted(codes.dequantize()))

    def _stacked(self, own: list[Part]) -> Part:
        rows = [part for part in own if isinstance(part, QuantizedRows)]
        if len(rows) == len(own) and len({(part.kind, part.num_rows) for part in rows}) == 1:
            return QuantizedRows.stack(rows)
        values = [part if isinstance(part, Tensor) else part.dequantize() for part in own]
        return torch.stack([self._plain(value) for value in values])

    def _plain(self, values: Tensor) -> Tensor:
        return values.to(self._device, self._weight.values.dtype).contiguous()


def can_read_at_once(sources: list[Source]) -> bool:
    """Whether the rows of these tensors have one format and are read whole."""
    kinds = {(tensor.raw and tensor.raw.kind, tensor.shape) for tensor, _ in sources}
    are_whole = all(not (placement.convert or placement.source) for _, placement in sources)
    placement = sources[0][1]
    return (
        len(kinds) == 1
        and sources[0][0].raw is not None
        and (are_whole or len(sources) == 1)
        and len(placement.source) < 2  # no part of its columns
        and (placement.convert is None or _row_order(placement) is not None)
    )


def read_at_once(sources: list[Source], device: torch.device) -> QuantizedRows:
    """Their rows, one tensor after the other: bytes are copied to the device, and become codes
    there.
    """
    tensor, placement = sources[0]
    assert tensor.raw is not None
    wanted = placement.source[0] if placement.source else None
    num_rows = len(range(tensor.shape[0])[wanted or slice(None)])
    raw = torch.empty(
        (len(sources), num_rows, tensor.raw.row_bytes),
        dtype=torch.uint8,
        pin_memory=device.type == "cuda",
    )

    def read(source: Source, own: Tensor) -> None:
        assert source[0].raw is not None
        source[0].raw.read(wanted, own)

    with ThreadPoolExecutor(NUM_READERS) as pool:
        list(pool.map(read, sources, raw))
    raw = raw.to(device, non_blocking=True).flatten(0, 1)
    order = _row_order(placement)
    if order is not None:
        raw = raw[order.to(device)]
    decode, step = tensor.raw.decode, _rows_at_once(tensor.shape[-1], device)
    pieces = (pack(decode(piece)) for piece in raw.split(step))
    return QuantizedRows.join(pieces, len(raw))


def for_device(part: Part, weight: Weight) -> Part:
    """In the layout of its device: tiles on a GPU; formats without tiles are dequantized."""
    if not isinstance(part, QuantizedRows) or not part.low.is_cuda:
        return part
    if can_tile(part):
        return tile(part, keeps_rows=weight.is_dense)
    return part.dequantize().to(weight.values.dtype).contiguous()


def _joined(parts: list[Part]) -> list[Part]:
    """Joins adjacent parts of one format, so that one call multiplies all of them."""
    joined: list[Part] = []
    for _, group in itertools.groupby(parts, key=_kind_to_join):
        own = list(group)
        rows = [part for part in own if isinstance(part, QuantizedRows)]
        if len(rows) == len(own) > 1:
            joined.append(QuantizedRows.join(rows, sum(part.num_rows for part in rows)))
        else:
            joined += own
    return joined


def join_widened(parts: list[Part]) -> list[Part]:
    """Joins adjacent parts that differ only in bit width, as Q4_K and Q5_K do, by giving all of
    them 8 bits: tiles have 4 or 8 anyway. Only if saving a launch is faster than reading the extra
    bits. The values stay the same.
    """
    wide: list[Part] = []
    for _, group in itertools.groupby(parts, key=_kind_to_widen):
        own = list(group)
        rows = [part for part in own if isinstance(part, QuantizedRows)]
        added = sum(part.num_rows * part.num_columns // 2 for part in rows if part.bits <= 4)
        pays = len(own) > 1 and added <= LAUNCH_BYTES * (len(own) - 1)
        wide += (
            [replace(part, bits=8, low=_bytes(part), high=None) for part in rows] if pays else own
        )
    return _joined(wide)


def _bytes(part: QuantizedRows) -> Tensor:
    low, _ = _planes(part.codes(), 8, None)
    return low


def _kind_to_widen(part: Part) -> object:
    """The format without its bits, which come first."""
    if not isinstance(part, QuantizedRows) or part.columns is not None or part.levels is not None:
        return id(part)
    return part.kind[1:]


def _kind_to_join(part: Part) -> object:
    return part.kind if isinstance(part, QuantizedRows) and part.columns is None else id(part)


def _row_order(placement: Placement) -> Tensor | None:
    """The stored row for each of ours, if the conversion only reorders rows; else None."""
    if placement.convert is None or len(placement.shape) != 2:
        return None
    rows = placement.source[0] if placement.source else slice(None)
    numbers = torch.arange(len(range(placement.shape[0])[rows]))[:, None]
    order = placement.convert(numbers)
    is_order = order.shape[1:] == numbers.shape[1:] and not order.is_floating_point()
    return order.flatten() if is_order else None
