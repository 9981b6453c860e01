"""One model in several GGUF files, `NAME-00001-of-00003.gguf`; the first has the metadata."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.gguf.header import Header, TensorInfo, damaged, read_header

MAX_LISTED = 8
_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def model_name(path: Path) -> str:
    match = _NAME.fullmatch(path.name)
    return match["stem"] if match else path.name.removesuffix(".gguf")


def first_file(path: Path) -> Path:
    """The file with the metadata, whichever of the files is given."""
    match = _NAME.fullmatch(path.name)
    return path.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf") if match else path


def read_model(path: Path) -> Header:
    """The metadata of the first file, and the tensors of all of them."""
    match = _NAME.fullmatch(path.name)
    count = int(match["count"]) if match else 1
    paths = [path]
    if match:
        paths = [
            path.with_name(f"{match['stem']}-{n:05}-of-{count:05}.gguf")
            for n in range(1, count + 1)
        ]
    missing = [file.name for file in paths if not file.is_file()]
    if missing or not paths:
        more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
        raise CheckpointError(
            f"{path.name} is one of {count} files, of which {len(missing)} are missing",
            f"Missing beside it are {', '.join(missing[:MAX_LISTED])}{more}.",
            "Download all files of the model into one folder.",
        )
    first = read_header(paths[0])
    _check_part(first, 0, count)
    tensors: dict[str, TensorInfo] = dict(first.tensors)
    for number, file in enumerate(paths[1:], start=1):
        part = read_header(file)
        _check_part(part, number, count)
        _check_alike(first, part)
        if repeated := tensors.keys() & part.tensors.keys():
            raise damaged(file, f"an earlier file of the model has {min(repeated)[:64]}, too")
        tensors |= part.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise damaged(
            path, f"the model should have {expected} tensors, and its files have {len(tensors)}"
        )
    return Header(paths[0], first.metadata, tensors)


def _check_part(part: Header, number: int, count: int) -> None:
    seen = part.metadata.get("split.no", 0), part.metadata.get("split.count", 1) or 1
    if seen != (number, count):
        raise CheckpointError(
            f"{part.path.name} is not what its name says: it is part {seen[0]!r} of {seen[1]!r}, "
            "from 0 on",
            f"By its name it is part {number} of {count}.",
            "Restore the name of the file, or download it again.",
        )


def _check_alike(first: Header, part: Header) -> None:
    for key in ("general.architecture", "split.tensors.count"):
        seen = part.metadata.get(key, first.metadata.get(key))
        if seen != first.metadata.get(key):
            raise CheckpointError(
                f"{part.path.name} belongs to another model than {first.path.name}",
                f"Their {key} is {str(seen)[:64]} and {str(first.metadata.get(key))[:64]}.",
                "Download the files of one model into a folder of their own.",
            )
