"""A converted checkpoint: its index, and the record files it names.

    OUT/experts.json          describes everything; written last, so a folder with it is complete
    OUT/dense.safetensors     what every token needs, under the names of our modules
    OUT/experts/layer-000.bin [ record of expert 0 | record of expert 1 | ... )

Records are aligned, so that one read of any kind fetches an expert. Opens and checks files; knows
neither models nor devices.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import CheckpointError
from penstock.models.source import CONVERTED, read_json_object
from penstock.offload.layout import ExpertLayout, StoredMatrix
from penstock.weights.weight_file import fill

DENSE = "dense.safetensors"
FOLDER = "experts"
VERSION = 1
CONVERT_AGAIN = "Convert the model again: penstock convert MODEL -o OUT."


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """The experts of one layer."""

    module: str  # name of its SparseMLP
    file: str  # in the folder of the index
    num_experts: int
    layout: int  # index of its layout
    checksums: tuple[int, ...]  # CRC-32 of each record


@dataclass(frozen=True, slots=True)
class Index:
    folder: Path
    made_for: str  # "cpu" or "cuda": the layout of records
    layouts: tuple[ExpertLayout, ...]
    layers: tuple[LayerRecords, ...]
    dense: Mapping[str, StoredMatrix]  # weights that every token needs, by name
    storage: tuple[Mapping[str, Any], ...]  # storage formats of the original files

    @property
    def num_bytes(self) -> int:
        """Of all experts together."""
        return sum(
            layer.num_experts * self.layouts[layer.layout].record_bytes for layer in self.layers
        )

    @property
    def dense_bytes(self) -> int:
        return (self.folder / DENSE).stat().st_size

    def quantized_bytes(self, dtype: torch.dtype) -> dict[str, int]:
        """The memory of each weight that is stored quantized, by name."""
        matrices = {name: (1, matrix) for name, matrix in self.dense.items()}
        for layer in self.layers:
            layout, count = self.layouts[layer.layout], layer.num_experts
            matrices[f"{layer.module}.gate_up"] = count, layout.gate_up
            matrices[f"{layer.module}.down"] = count, layout.down
        return {
            name: count * matrix.num_bytes(dtype)
            for name, (count, matrix) in matrices.items()
            if matrix.is_quantized
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "made_for": self.made_for,
            "layers": [asdict(layer) for layer in self.layers],
            "layouts": [layout.to_json() for layout in self.layouts],
            "dense": {name: matrix.to_json() for name, matrix in self.dense.items()},
            "storage": list(self.storage),
        }


def read_index(folder: Path) -> Index:
    path = folder / CONVERTED
    given = read_json_object(path)
    if given.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {given.get('version')!r}",
            f"This Penstock reads version {VERSION}.",
            CONVERT_AGAIN,
        )
    try:
        layers = [
            LayerRecords(**{**layer, "checksums": tuple(layer["checksums"])})
            for layer in given["layers"]
        ]
        layouts = [ExpertLayout.from_json(layout) for layout in given["layouts"]]
        dense = {name: StoredMatrix.from_json(one) for name, one in given["dense"].items()}
        index = Index(
            folder,
            given["made_for"],
            tuple(layouts),
            tuple(layers),
            dense,
            tuple(given["storage"]),
        )
        for layer in layers:
            assert len(layer.checksums) == layer.num_experts
            assert layer.layout in range(len(layouts))
            assert Path(layer.file).parent == Path(FOLDER)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise CheckpointError(
            f"{path} is damaged", f"{type(error).__name__}: {error}.", CONVERT_AGAIN
        ) from error
    return index


class RecordFile:
    """An open record file. It keeps reading the opened file, even if another takes its name. Closed
    by `close`, or with its last reference.
    """

    def __init__(
        self, path: Path, num_records: int, record_bytes: int, *, direct: bool = False
    ) -> None:
        self.path, self.record_bytes = path, record_bytes
        size = num_records * record_bytes
        try:
            self._file, self.is_direct = _open(path, direct)
            self.close = weakref.finalize(self, os.close, self._file)
            found = os.fstat(self._file).st_size
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be opened", f"{error.strerror or error}.", CONVERT_AGAIN
            ) from error
        if found != size:
            self.close()
            kind = "truncated" if found < size else "longer than its index says"
            raise CheckpointError(
                f"{path} is {kind}",
                f"It has {found:,} bytes; {num_records} experts take {size:,}.",
                f"Copy it again, or run `penstock convert` with --verify. {CONVERT_AGAIN}",
            )

    def read(self, record: int, buffer: memoryview) -> None:
        """Fills the buffer with a record. A failed read is retried once."""
        start, record_buffer = record * self.record_bytes, buffer[: self.record_bytes]
        fill(self._file, start, record_buffer, self.path, CONVERT_AGAIN)


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    """Uses direct I/O if asked and supported by the file system."""
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, os.O_RDONLY), False
