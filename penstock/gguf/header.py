"""Reads the header of a GGUF file: its metadata, and where each tensor is stored.

    [magic, version, counts | key, type, value ... | name, dimensions, type, offset ... | data ...]

The data is aligned. Nothing in the file is trusted: a count is compared with the remaining bytes
before anything is allocated for it, and a tensor's position with the file's size. Every defect
becomes one CheckpointError.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from penstock.errors import CheckpointError
from penstock.file_kinds import impostor


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors."""

    name: str
    block_size: int  # elements
    block_bytes: int


# By their number in the file; the format has withdrawn the missing numbers.
BLOCK_TYPES = {
    number: BlockType(name, block_size, block_bytes)
    for number, name, block_size, block_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}


MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 * 2**20  # several times that of the largest vocabularies
MAX_LIST = 2**22  # values: the largest vocabularies have half a million merges
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
MAX_NAME_BYTES = 4096
MAX_SHOWN = 64  # characters of a name in a message
DEFAULT_ALIGNMENT = 32
TRUNCATED = "An interrupted download or a full disk leaves such a file."
OTHER_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".json")

NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The position of a tensor, checked against the size of the file."""

    name: str
    shape: tuple[int, ...]  # in the order of torch: the last dimension is contiguous
    type: BlockType
    path: Path
    offset: int  # of its first byte in the file

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements // self.type.block_size * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF: by its suffix, or by its first bytes if it has none, as in Ollama's
    store.
    """
    if path.suffix in OTHER_SUFFIXES or not os.path.isfile(path):
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """The header of one file, cached until the file changes."""
    try:
        status = path.stat()
        return _read_header(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read",
            f"{error.strerror or error}.",
            "Check the file and its permissions.",
        ) from error


def damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is damaged: {what}",
        "A valid GGUF file cannot contain this.",
        "Download or copy the file again.",
    )


@lru_cache(maxsize=8)  # the parts of a split model
def _read_header(path: Path, size: int, mtime_ns: int) -> Header:
    with path.open("rb", buffering=2**20) as file:
        return _Reader(path, file, size).read()


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._num_left = min(size, MAX_HEADER_BYTES)

    def read(self) -> Header:
        self._check_start()
        num_tensors, num_values = self._number("<u8"), self._number("<u8")
        self._check_count(num_values, 13, "metadata values")
        self._check_count(num_tensors, 33, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._name("a metadata key")
            if key in metadata:
                raise self._damaged(f"it has {key[:MAX_SHOWN]} twice")
            metadata[key] = self._value(key, self._number("<u4"))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            type(alignment) is not int
            or not 0 < alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._damaged(f"general.alignment is {alignment!r:.64}, not a power of two")
        found = [self._tensor(alignment) for _ in range(num_tensors)]
        data_start = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, block_type, offset in found:
            if name in tensors:
                raise self._damaged(f"it has {name[:MAX_SHOWN]} twice")
            tensors[name] = TensorInfo(name, shape, block_type, self._path, data_start + offset)
        self._check_places(tensors.values())
        return Header(self._path, metadata, tensors)

    def _check_start(self) -> None:
        magic = self._file.read(4)
        self._file.seek(0)
        if magic != MAGIC and (error := impostor(self._path)):
            raise error
        if self._size < 24:
            raise self._damaged(f"it has {self._size} bytes")
        self._take(4, "")
        version = self._number("<u4")
        if magic != MAGIC:
            raise self._damaged(f"it begins with {magic!r}, not with {MAGIC!r}")
        if version in VERSIONS:
            return
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        kind = "in big-endian order" if is_swapped else f"of version {version}"
        raise CheckpointError(
            f"{self._path.name} is a GGUF file {kind}",
            f"Read are the versions {' and '.join(map(str, VERSIONS))}, in little-endian order.",
            "Convert the model again, with a current tool.",
        )

    def _take(self, num_bytes: int, what: str) -> bytes:
        """The next bytes; fewer are an error."""
        if num_bytes > self._num_left:
            raise self._too_short(f"{what or 'its header'} should have {num_bytes:,} bytes more")
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self._damaged("it became shorter while it was read")
        self._num_left -= num_bytes
        return data

    def _number(self, code: str) -> Any:
        data = self._take(int(code[2]), "")
        return np.frombuffer(data, code)[0].item()

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        """`least_bytes`: the minimal size of each entry."""
        if count * least_bytes > self._num_left:
            raise self._too_short(f"it should have {count:,} {what}")

    def _name(self, what: str) -> str:
        length = self._number("<u8")
        if length > MAX_NAME_BYTES:
            raise self._damaged(f"the name of {what} should have {length:,} bytes")
        data = self._take(length, f"the name of {what}")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"the name of {what} is not text: {data[:MAX_SHOWN]!r}") from None

    def _string(self, key: str) -> str:
        length = int.from_bytes(self._take(8, key), "little")
        # Do not refuse a model for a description in another encoding.
        return self._take(length, key).decode("utf-8", errors="replace")

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._string(key)
        if kind == BOOL:
            return self._bools(key, 1)[0]
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind != ARRAY:
            raise self._damaged(f"{key[:MAX_SHOWN]} has the unknown type {kind}")
        kind, count = self._number("<u4"), self._number("<u8")
        if count > MAX_LIST:
            raise self._damaged(f"{key[:MAX_SHOWN]} should be a list of {count:,} values")
        if kind == STRING:
            self._check_count(count, 8, f"strings in {key[:MAX_SHOWN]}")
            return [self._string(key) for _ in range(count)]
        if kind == BOOL:
            return self._bools(key, count)
        if kind not in NUMBERS:
            raise self._damaged(f"{key[:MAX_SHOWN]} is a list of the unknown type {kind}")
        code = NUMBERS[kind]
        return np.frombuffer(self._take(count * int(code[2]), key), code).tolist()

    def _bools(self, key: str, count: int) -> list[bool]:
        data = self._take(count, key)
        if data.strip(b"\0\1"):
            raise self._damaged(f"{key[:MAX_SHOWN]} is neither true nor false")
        return [byte == 1 for byte in data]

    def _tensor(self, alignment: int) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self._name("a tensor")
        shown = name[:MAX_SHOWN]
        num_dimensions = self._number("<u4")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"{shown} has {num_dimensions} dimensions")
        shape = tuple(self._number("<u8") for _ in range(num_dimensions))[::-1]
        number, offset = self._number("<u4"), self._number("<u8")
        block_type = BLOCK_TYPES.get(number)
        if block_type is None:
            raise CheckpointError(
                f"{self._path.name} stores {shown} as type {number}, which is not known",
                f"Known are {', '.join(block_type.name for block_type in BLOCK_TYPES.values())}.",
                "Convert the model again, to one of these.",
            )
        if not all(shape) or shape[-1] % block_type.block_size:
            raise self._damaged(
                f"{shown} is {list(shape)}, and {block_type.name} has blocks of "
                f"{block_type.block_size}"
            )
        if offset % alignment:
            raise self._damaged(
                f"{shown} begins at byte {offset:,}, not at a multiple of {alignment}"
            )
        return name, shape, block_type, offset

    def _check_places(self, tensors: Iterable[TensorInfo]) -> None:
        ordered = sorted(tensors, key=lambda info: info.offset)
        for info in ordered:
            end = info.offset + info.num_bytes
            if end > self._size:
                place = f"{info.name[:MAX_SHOWN]} ends at byte {end:,}, the file at {self._size:,}"
                raise CheckpointError(
                    f"{self._path.name} is truncated: {place}",
                    TRUNCATED,
                    "Download or copy the file again.",
                )
        for info, later in pairwise(ordered):
            if info.offset + info.num_bytes > later.offset:
                names = f"{info.name[:MAX_SHOWN]} and {later.name[:MAX_SHOWN]}"
                raise self._damaged(f"{names} overlap")

    def _too_short(self, what: str) -> CheckpointError:
        left = f"the file has {self._size:,}"
        if self._size > MAX_HEADER_BYTES:
            left = f"a header may have {MAX_HEADER_BYTES:,}"
        return CheckpointError(
            f"{self._path.name} is truncated or damaged: {what}; {left} bytes",
            TRUNCATED,
            "Download or copy the file again.",
        )

    def _damaged(self, what: str) -> CheckpointError:
        return damaged(self._path, what)
