"""Reads safetensors files: the header at once, each tensor's bytes when it is loaded.

    [8 bytes: header length n | n bytes: JSON {name: dtype, shape, data_offsets} | data ......]

Bytes are read into memory of the tensor's own size rather than mapped: a mapping keeps every page
that was touched in the process, and on network disks it is read page by page. Knows files, not
models.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.weights.stored import StoredTensor
from penstock.weights.weight_file import WeightFile

MAX_HEADER_BYTES = 100_000_000
DISK_PAGE_BYTES = 4096

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
}


def open_safetensors(path: Path) -> list[StoredTensor]:
    """The tensors of a file, checked against its size: a truncated file fails here, not hours
    later.
    """
    file = WeightFile(path)
    header, data_start = _read_header(file)
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, start, end = _parse_entry(path, name, entry)
        if data_start + end > file.size:
            raise CheckpointError(
                f"{path.name} is truncated: {name} ends at byte {data_start + end:,}, the file at "
                f"{file.size:,}"
            )
        offset = data_start + start
        tensors.append(
            StoredTensor(
                name,
                shape,
                dtype,
                read=_reader(file, offset, dtype, shape),
                read_part=partial(read_part, file, offset, dtype, shape),
            )
        )
    return tensors


def _read_header(file: WeightFile) -> tuple[dict[str, Any], int]:
    path, length = file.path, bytearray(min(8, file.size))
    file.read_into(0, memoryview(length))
    header_bytes = int.from_bytes(length, "little")
    if file.size < 8 or header_bytes > min(MAX_HEADER_BYTES, file.size - 8):
        raise CheckpointError(
            f"{path.name} is truncated or not safetensors: "
            f"its header should have {header_bytes:,} bytes, the file has {file.size:,}"
        )
    raw = bytearray(header_bytes)
    file.read_into(8, memoryview(raw))
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} is not safetensors: its header is not JSON ({error})"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name} is not safetensors: its header is not a JSON object")
    return header, 8 + header_bytes


def _parse_entry(
    path: Path, name: str, entry: Any
) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    try:
        dtype_name, shape, (start, end) = (
            entry["dtype"],
            tuple(entry["shape"]),
            entry["data_offsets"],
        )
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} is damaged: its entry for {name} is {entry!r}"
        ) from error
    numbers = (*shape, start, end)
    if not isinstance(dtype_name, str) or not all(type(n) is int and n >= 0 for n in numbers):
        raise CheckpointError(f"{path.name} is damaged: its entry for {name} is {entry!r}")
    if dtype_name not in DTYPES:
        raise CheckpointError(
            f"{path.name} stores {name} as {dtype_name!r}, which is not a known dtype"
        )
    dtype = DTYPES[dtype_name]
    if end - start != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path.name} is damaged: {name} has {end - start:,} bytes for {dtype_name} "
            f"{list(shape)}"
        )
    return dtype, shape, start, end


def _reader(
    file: WeightFile, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Callable[[slice | None], Tensor]:
    def read(rows: slice | None) -> Tensor:
        first, own_shape = 0, shape
        if rows is not None:
            first, end, step = rows.indices(shape[0])
            assert step == 1, "rows are read contiguously"
            own_shape = (max(0, end - first), *shape[1:])
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        raw = torch.empty(math.prod(own_shape) * dtype.itemsize, dtype=torch.uint8)
        file.read_into(offset + first * row_bytes, raw.numpy().data)
        return raw.view(dtype).reshape(own_shape)

    return read


def read_part(
    file: WeightFile,
    offset: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    source: tuple[slice, ...],
) -> Tensor:
    """A part between bounds of each dimension: reads its runs of bytes, and the gaps between them
    only if they are so short that a disk reads them anyway.
    """
    whole = [slice(None)] * (len(shape) - len(source))
    wanted = [range(size)[one] for size, one in zip(shape, [*source, *whole])]
    read = list(wanted)
    strides = [math.prod(shape[place + 1 :]) * dtype.itemsize for place in range(len(shape))]
    inner = len(shape) - 1  # the outermost dimension of a run
    while inner and len(read[inner]) == shape[inner]:
        inner -= 1
    while inner and len(read[inner]) * strides[inner] < DISK_PAGE_BYTES:
        read[inner] = range(shape[inner])
        inner -= 1
    own_shape = [len(one) for one in read]
    run_bytes = len(read[inner]) * strides[inner]
    raw = torch.empty(math.prod(own_shape) * dtype.itemsize, dtype=torch.uint8)
    buffer = raw.numpy().data
    for number, places in enumerate(itertools.product(*read[:inner])):
        first = offset + read[inner].start * strides[inner]
        first += sum(place * stride for place, stride in zip(places, strides))
        file.read_into(first, buffer[number * run_bytes : (number + 1) * run_bytes])
    cut = [slice(own.start - had.start, own.stop - had.start) for own, had in zip(wanted, read)]
    return raw.view(dtype).reshape(own_shape)[tuple(cut)].contiguous()
