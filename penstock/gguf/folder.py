"""Reads a GGUF file as if it were the folder of a checkpoint: `model.gguf/config.json` is a
readable path.

Readers of model files go through here and need not know which of the two they read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.gguf.header import Header, TensorInfo, damaged, is_gguf, read_header
from penstock.gguf.model_config import config_of
from penstock.gguf.vocabulary import generation_config_of, tokenizer_config_of, tokenizer_of

FILES: dict[str, Callable[[Header], dict[str, Any]]] = {
    "config.json": config_of,
    "tokenizer.json": tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
    "generation_config.json": generation_config_of,
}


def folder_of(path: Path) -> Path:
    """The folder or GGUF file of a model, given it or a file in it."""
    return path if path.is_dir() or is_gguf(path) else path.parent


def has_file(file: Path) -> bool:
    return file.is_file() or (file.name in FILES and is_gguf(file.parent))


def on_disk(file: Path) -> Path:
    """The file on disk, for messages: for a part of a GGUF file, the file itself."""
    return file.parent if file.name in FILES and is_gguf(file.parent) else file


def read_text(file: Path) -> str:
    """Raises the same errors as reading a file."""
    if on_disk(file) != file:
        return json.dumps(FILES[file.name](read_model(file.parent)), ensure_ascii=False)
    return file.read_text(encoding="utf-8")


def find_gguf(folder: Path) -> Path | None:
    """The only model of a folder with GGUF files; None if it has none."""
    files = sorted(entry for entry in folder.glob("*.gguf") if not entry.name.startswith("mmproj"))
    models = sorted({first_file(file) for file in files})
    if len(models) > 1:
        names = ", ".join(model.name for model in models[:8])
        raise CheckpointError(
            f"{folder} holds {len(models)} GGUF models",
            f"They are {names}{', ...' if len(models) > 8 else ''}.",
            "Give one of these files.",
        )
    return models[0] if models else None


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
    """The metadata of the first file, and the tensors of all of them: one model may be in several,
    `NAME-00001-of-00003.gguf`."""
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
