"""Reads a GGUF file as if it were the folder of a checkpoint: `model.gguf/config.json` is a
readable path.

Readers of model files go through here and need not know which of the two they read.
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
