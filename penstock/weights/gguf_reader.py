"""Reads the weights of GGUF files: tensors with the names and row order of the original checkpoint.

gguf_layout.py knows how converters rename, reorder and change tensors; reading a tensor undoes it.
Quantized types are read as `Codes`, or dequantized to float32.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy
import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.gguf.folder import read_model
from penstock.gguf.header import MAX_SHOWN, BlockType, TensorInfo, damaged
from penstock.weights.codes import Codes
from penstock.weights.gguf_blocks import READERS
from penstock.weights.gguf_layout import Part, parts_of
from penstock.weights.safetensors_reader import read_part
from penstock.weights.stored import RawRows, StoredTensor
from penstock.weights.weight_file import WeightFile

logger = logging.getLogger(__name__)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}
PIECE_ELEMENTS = 2**24  # dequantized at a time: intermediates take several times as much


def open_gguf(path: Path) -> list[StoredTensor]:
    """Every tensor of the model, checked against the sizes of the files; reads no data yet."""
    model = read_model(path)
    _require_readable(path, model.tensors.values())
    files = {one: WeightFile(one) for one in {info.path for info in model.tensors.values()}}
    return [_stored(part, files[part.info.path]) for part in parts_of(model)]


def _stored(part: Part, file: WeightFile) -> StoredTensor:
    kind = part.info.type.name
    num_bytes = part.num_rows * part.row_bytes
    if kind in DTYPES:
        return StoredTensor(
            part.name, part.shape, DTYPES[kind], partial(_read, part, file), "", num_bytes
        )
    stored = StoredTensor(
        part.name, part.shape, torch.float32, partial(_read, part, file), kind, num_bytes
    )
    if kind not in READERS or part.convert is not None:
        return stored
    raw = RawRows(kind, part.row_bytes, partial(_read_raw, part, file), partial(_decode, part))
    return replace(stored, read_codes=partial(_read_codes, part, file), raw=raw)


def _read(part: Part, file: WeightFile, rows: slice | None) -> Tensor:
    kind = part.info.type.name
    chosen = part.rows_of(rows)
    if kind in DTYPES:
        weight = _ordered(_read_bytes(part, file, chosen).view(DTYPES[kind]), part.columns)
    else:
        weight = torch.empty(len(chosen), part.width)
        step = max(1, PIECE_ELEMENTS // part.width)
        expand = _expand_codes if kind in READERS else _expand_by_package
        for start in range(0, len(chosen), step):
            piece = chosen[start : start + step]
            weight[start : start + step] = expand(part, file, piece)
    if part.convert is not None:
        weight = part.convert(weight)
    return weight.reshape(-1, *part.shape[1:])


def _read_codes(
    part: Part, file: WeightFile, rows: slice | None, columns: slice | None = None
) -> Codes:
    own_rows = part.rows_of(rows)
    if columns is None:
        return _codes_of(part, file, own_rows)
    if part.columns is not None or not isinstance(own_rows, range):
        return _codes_of(part, file, own_rows).cut(slice(None), columns)
    block = part.info.type
    first, end, _ = columns.indices(part.width)
    blocks = slice(first // block.block_size, -(-end // block.block_size))
    in_bytes = slice(blocks.start * block.block_bytes, blocks.stop * block.block_bytes)
    whole = (own_rows.stop, part.row_bytes)
    source = (slice(own_rows.start, own_rows.stop), in_bytes)
    raw = read_part(file, part.info.offset, torch.uint8, whole, source)
    codes = READERS[block.name](raw.unflatten(-1, (-1, block.block_bytes)))
    before = blocks.start * block.block_size
    return codes.cut(slice(None), slice(first - before, end - before))


def _read_raw(part: Part, file: WeightFile, rows: slice | None, out: Tensor) -> None:
    _read_bytes(part, file, part.rows_of(rows), out)


def _codes_of(part: Part, file: WeightFile, rows: range | Tensor) -> Codes:
    return _decode(part, _read_bytes(part, file, rows))


def _decode(part: Part, raw: Tensor) -> Codes:
    codes = READERS[part.info.type.name](raw.unflatten(-1, (-1, part.info.type.block_bytes)))
    columns = part.columns
    return replace(codes, columns=columns if columns is None else columns.to(raw.device))


def _expand_codes(part: Part, file: WeightFile, rows: range | Tensor) -> Tensor:
    return _codes_of(part, file, rows).dequantize()


def _expand_by_package(part: Part, file: WeightFile, rows: range | Tensor) -> Tensor:
    import gguf

    kind = gguf.GGMLQuantizationType[part.info.type.name]
    weight = torch.from_numpy(gguf.quants.dequantize(_read_bytes(part, file, rows).numpy(), kind))
    return _ordered(weight, part.columns)


def _ordered(weight: Tensor, columns: Tensor | None) -> Tensor:
    if columns is None:
        return weight
    ordered = torch.empty_like(weight)
    ordered[:, columns] = weight
    return ordered


def _read_bytes(
    part: Part, file: WeightFile, rows: range | Tensor, out: Tensor | None = None
) -> Tensor:
    """Fills and returns [rows, bytes of a row] uint8."""
    if out is None:
        out = torch.empty(len(rows), part.row_bytes, dtype=torch.uint8)
    if len(rows) == 0:
        return out
    if isinstance(rows, range):
        offset = part.info.offset + rows[0] * part.row_bytes
        file.read_into(offset, out.view(-1).numpy().data)
        return out
    first, last = int(rows.min()), int(rows.max())
    return torch.index_select(
        _read_bytes(part, file, range(first, last + 1)), 0, rows - first, out=out
    )


def _require_readable(path: Path, infos: Iterable[TensorInfo]) -> None:
    """Logs which tensors the gguf package dequantizes and the cost; refuses types that nothing can
    read.
    """
    by_type: dict[BlockType, list[TensorInfo]] = defaultdict(list)
    for info in infos:
        if len(info.shape) == 1 and info.type.block_size > 1:
            raise damaged(
                path, f"{info.name[:MAX_SHOWN]} is a vector, but quantized as {info.type.name}"
            )
        if info.type.name not in READERS and info.type.name not in DTYPES:
            by_type[info.type].append(info)
    for block_type, tensors in by_type.items():
        if not _package_expands(block_type):
            raise CheckpointError(
                f"{path.name} has {tensors[0].name[:MAX_SHOWN]} as {block_type.name}, which cannot "
                "be read",
                f"Supported are {', '.join([*READERS, 'F32', 'F16', 'BF16'])}; the gguf "
                "package, if installed, dequantizes some others.",
                "Install it (pip install 'penstock[gguf]'), or use a file with one of these types.",
            )
        logger.warning(
            "%s: the gguf package dequantizes %d tensors of type %s at load; "
            "they take %.2f GB in the file and %.2f GB as bfloat16",
            path.name,
            len(tensors),
            block_type.name,
            sum(info.num_bytes for info in tensors) / 1e9,
            sum(2 * info.num_elements for info in tensors) / 1e9,
        )


def _package_expands(block_type: BlockType) -> bool:
    try:
        import gguf

        kind = gguf.GGMLQuantizationType[block_type.name]
        gguf.quants.dequantize(numpy.zeros((1, block_type.block_bytes), numpy.uint8), kind)
    except (ImportError, KeyError, NotImplementedError):  # absent, or older than the type
        return False
    return True
