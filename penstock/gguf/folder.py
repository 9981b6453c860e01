"""A GGUF file read as the folder of a checkpoint: `model.gguf/config.json` is a path that can be
read.

Who reads the files of a model asks here, and need not know which of the two it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.gguf.header import Header, is_gguf
from penstock.gguf.model_config import config_of
from penstock.gguf.split import first_file, read_model
from penstock.gguf.vocabulary import generation_config_of, tokenizer_config_of, tokenizer_of

FILES: dict[str, Callable[[Header], dict[str, Any]]] = {
    "config.json": config_of,
    "tokenizer.json": tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
    "generation_config.json": generation_config_of,
}


def folder_of(path: Path) -> Path:
    """That holds the files of a model, given it or a file in it."""
    return path if path.is_dir() or is_gguf(path) else path.parent


def has_file(file: Path) -> bool:
    return file.is_file() or (file.name in FILES and is_gguf(file.parent))


def read_text(file: Path) -> str:
    """Raises what reading a file raises."""
    if file.name in FILES and is_gguf(file.parent):
        return json.dumps(FILES[file.name](read_model(file.parent)), ensure_ascii=False)
    return file.read_text(encoding="utf-8")


def find_gguf(folder: Path) -> Path | None:
    """The one model of a folder that holds GGUF files; None: there are none."""
    files = sorted(entry for entry in folder.glob("*.gguf") if not entry.name.startswith("mmproj"))
    models = sorted({first_file(file) for file in files})
    if len(models) > 1:
        names = ", ".join(model.name for model in models[:8])
        raise CheckpointError(
            f"{folder} holds {len(models)} GGUF models",
            f"They are {names}{', ...' if len(models) > 8 else ''}.",
            "Give the file of the one that is meant.",
        )
    return models[0] if models else None
