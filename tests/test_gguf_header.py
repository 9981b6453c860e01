"""GGUF headers: read as written, and refused with our errors if they are wrong."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_files import random_state, write_gguf
from penstock.errors import CheckpointError
from penstock.gguf.folder import read_model
from penstock.gguf.header import MAX_HEADER_BYTES, read_header
from penstock.models.source import find_model
from small_models import LLAMA

ONE_LAYER = {**LLAMA, "num_hidden_layers": 1}


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data)) + data


def value(key: str, kind: int, data: bytes) -> bytes:
    return string(key) + u32(kind) + data


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def file_of(
    values: list[bytes], tensors: list[bytes], num_data: int = 4096, version: int = 3
) -> bytes:
    head = (
        b"GGUF" + u32(version) + u64(len(tensors)) + u64(len(values)) + b"".join(values + tensors)
    )
    return head + bytes(-len(head) % 32) + bytes(num_data)


def read(tmp_path: Path, data: bytes) -> str:
    """The error for a file; finding it takes no time and no memory."""
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    started = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert time.process_time() - started < 0.5
    error = caught.value
    assert error.why
    assert error.todo
    assert len(error.what) < 300
    return error.what


def test_what_the_gguf_package_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    expected = {
        "a.text": "Zürich",
        "a.flag": True,
        "a.small": -3,
        "a.large": 2**63 + 5,
        "a.float": 0.5,
        "a.texts": ["", "x", "größe"],
        "a.numbers": [1, -2, 3],
        "a.flags": [True, False],
    }
    writer.add_string("a.text", "Zürich")
    writer.add_bool("a.flag", True)
    writer.add_int8("a.small", -3)
    writer.add_uint64("a.large", 2**63 + 5)
    writer.add_float64("a.float", 0.5)
    for key in ("a.texts", "a.numbers", "a.flags"):
        writer.add_array(key, expected[key])  # type: ignore[arg-type]
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("first", np.zeros(7, np.float32))
    writer.add_tensor("weights", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert {key: header.metadata[key] for key in expected} == expected
    assert list(header.tensors) == ["first", "weights"]
    info = header.tensors["weights"]
    assert (info.shape, info.type.name, info.num_bytes) == ((3, 4), "F32", 48)
    assert path.read_bytes()[info.offset : info.offset + 48] == weights.tobytes()


LIST, TEXTS, BYTES = 9, u32(8), u32(0)
DAMAGED = {
    "empty": (b"", "is empty"),
    "short": (b"GGUF\3\0\0\0", "it has 8 bytes"),
    "magic": (b"GGML" + file_of([], [])[4:], "begins with b'GGML'"),
    "version 1": (file_of([], [], version=1), "of version 1"),
    "big-endian": (file_of([], [], version=3 << 24), "in big-endian order"),
    "tensors": (
        b"GGUF" + u32(3) + u64(2**60) + u64(0) + bytes(64),
        "1,152,921,504,606,846,976 tensors",
    ),
    "values": (b"GGUF" + u32(3) + u64(0) + u64(2**63) + bytes(64), "metadata values"),
    "key's length": (file_of([u64(2**40) + bytes(32)], []), "should have 1,099,511,627,776 bytes"),
    "key's bytes": (file_of([string(b"\xff\xfe") + u32(0) + b"\0"], []), "is not text"),
    "text's length": (file_of([value("a", 8, u64(2**50))], []), "a should have"),
    "kind of value": (file_of([value("a", 13, bytes(8))], []), "a has the unknown type 13"),
    "kind of list": (
        file_of([value("a", LIST, u32(9) + u64(1))], []),
        "a is a list of the unknown type 9",
    ),
    "list's length": (
        file_of([value("a", LIST, TEXTS + u64(2**61))], []),
        "a should be a list of 2,305,",
    ),
    "list of texts": (
        file_of([value("a", LIST, TEXTS + u64(2**20))], []),
        "1,048,576 strings in a",
    ),
    "list of bytes": (
        file_of([value("a", LIST, BYTES + u64(2**20))], []),
        "a should have 1,048,576 bytes",
    ),
    "flag": (file_of([value("a", 7, b"\2")], []), "a is neither true nor false"),
    "key twice": (file_of([value("a", 0, b"\1")] * 2, []), "it has a twice"),
    "alignment": (file_of([value("general.alignment", 4, u32(48))], []), "general.alignment is 48"),
    "alignment 0": (file_of([value("general.alignment", 4, u32(0))], []), "general.alignment is 0"),
    "alignment's type": (file_of([value("general.alignment", 8, string("32"))], []), "is '32'"),
    "no dimensions": (file_of([], [tensor("w", ())]), "w has 0 dimensions"),
    "many dimensions": (file_of([], [tensor("w", (1,) * 5)]), "w has 5 dimensions"),
    "dimension 0": (file_of([], [tensor("w", (4, 0))]), "w is [0, 4]"),
    "absurd dimensions": (file_of([], [tensor("w", (2**63, 2**63))]), "w ends at byte"),
    "product of 2^64": (file_of([], [tensor("w", (2**32, 2**32))]), "w ends at byte"),
    "kind": (file_of([], [tensor("w", (4,), kind=77)]), "stores w as type 77, which is not known"),
    "part of a block": (file_of([], [tensor("w", (48,), kind=8)]), "Q8_0 has blocks of 32"),
    "offset": (file_of([], [tensor("w", (4,), offset=8)]), "w begins at byte 8"),
    "far offset": (file_of([], [tensor("w", (4,), offset=2**63)]), "w ends at byte"),
    "truncated": (file_of([], [tensor("w", (64, 64))], num_data=16383), "is truncated: w ends at"),
    "overlap": (
        file_of([], [tensor("v", (64,)), tensor("w", (64,), offset=224)]),
        "v and w overlap",
    ),
    "tensor twice": (
        file_of([], [tensor("w", (4,)), tensor("w", (4,), offset=32)]),
        "it has w twice",
    ),
    "no name's end": (
        file_of([], [u64(4000) + b"w"], num_data=0),
        "the name of a tensor should have",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_an_inconsistent_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    data, expected = DAMAGED[kind]
    assert expected in read(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git-LFS pointer"),
        (b"<!DOCTYPE html><p>Log in</p>", "is a web page"),
    ],
)
def test_a_file_that_was_never_a_gguf_is_called_by_its_name(
    data: bytes, said: str, tmp_path: Path
) -> None:
    assert said in read(tmp_path, data)


def test_a_header_ends_before_the_memory_does(tmp_path: Path) -> None:
    """In a sparse file of any size, a text of any length would seem valid."""
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of([value("a", 8, u64(2**33))], []))
    os.truncate(path, 2**34)
    with pytest.raises(CheckpointError, match=f"a header may have {MAX_HEADER_BYTES:,} bytes"):
        read_header(path)


def test_a_header_is_read_again_when_the_file_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for number in (1, 2):
        path.write_bytes(file_of([value("a", 0, bytes([number]))], []))
        os.utime(path, (number, number))
        assert read_header(path).metadata["a"] == number


# One model in several files


def split(folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    state = random_state(ONE_LAYER)
    write_gguf(folder / "small.gguf", "llama", ONE_LAYER, state, split_max_tensors=4)
    files = sorted(folder.glob("small-*.gguf"))
    assert len(files) >= 3
    return files


def test_a_split_model_is_one_model_whichever_file_is_given(tmp_path: Path) -> None:
    files = split(tmp_path)
    whole = write_gguf(tmp_path / "whole", "llama", ONE_LAYER, random_state(ONE_LAYER))
    for given in (files[0], files[-1]):
        source = find_model(str(given))
        assert source.name == "small"
        assert source.path == files[0]
        assert read_model(source.path).tensors.keys() == read_model(whole).tensors.keys()


def missing(files: list[Path]) -> None:
    files[1].unlink()


def cyclic(files: list[Path]) -> None:
    files[1].unlink()
    files[1].symlink_to(files[0])


def repeated(files: list[Path]) -> None:
    files[2].write_bytes(files[1].read_bytes())


def renamed(files: list[Path]) -> None:
    content = files[1].read_bytes()
    files[1].write_bytes(files[2].read_bytes())
    files[2].write_bytes(content)


def of_another_model(files: list[Path]) -> None:
    patch(files[1], b"split.tensors.count", 4, lambda count: struct.pack("<i", count + 1))


def of_another_count(files: list[Path]) -> None:
    for file in files:
        patch(file, b"split.tensors.count", 4, lambda count: struct.pack("<i", count + 1))


def patch(file: Path, key: bytes, num_bytes: int, change: Callable[[int], bytes]) -> None:
    data = file.read_bytes()
    start = data.index(key) + len(key) + 4
    number = int.from_bytes(data[start : start + num_bytes], "little")
    file.write_bytes(data[:start] + change(number) + data[start + num_bytes :])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (missing, r"of which 1 are missing"),
        (cyclic, r"small-00002-of-0000\d.gguf is not what its name says: it is part 0"),
        (repeated, r"small-00003-of-0000\d.gguf is not what its name says: it is part 1"),
        (renamed, r"small-00002-of-0000\d.gguf is not what its name says: it is part 2"),
        (of_another_model, r"belongs to another model"),
        (of_another_count, r"the model should have \d+ tensors, and its files have \d+"),
    ],
)
def test_files_that_are_not_one_model_are_refused(
    damage: Callable[[list[Path]], None], expected: str, tmp_path: Path
) -> None:
    files = split(tmp_path)
    damage(files)
    with pytest.raises(CheckpointError, match=expected) as caught:
        find_model(str(files[0]))
    assert caught.value.why
    assert caught.value.todo


def test_a_part_under_another_name_is_not_taken_for_a_model(tmp_path: Path) -> None:
    files = split(tmp_path / "parts")
    alone = files[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"it is part 0 of \d"):
        find_model(str(alone))
