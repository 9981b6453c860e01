"""Resolves the value of --model to weights and a config.

Reads JSON and lists folders; opens no weights and imports no torch, so a wrong name fails at once.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError, ModelNotFoundError, nearest
from penstock.file_kinds import impostor, other_kind, unfinished
from penstock.gguf.folder import find_gguf, first_file, model_name, read_model
from penstock.gguf.header import is_gguf
from penstock.gguf.model_config import config_of
from penstock.models.presets import PRESETS

CONFIG_NAMES = ("config.json", "model_config.json")
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
CONVERTED = "experts.json"  # written last by `penstock convert`


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A name, the path of the weights (None for a preset, which has none) and the content of
    config.json.
    """

    name: str
    path: Path | None
    config: dict[str, Any]


def find_model(name: str) -> ModelSource:
    """The model for a name: "" is the built-in one; else a folder, a weights file or a preset."""
    if name == "":
        from penstock.assets import default_model  # created on first use

        return _open_path(default_model())
    path = Path(name).expanduser()
    if path.exists():
        return _open_path(path)
    presets = {preset.lower(): preset for preset in PRESETS}
    preset = presets.get(name.lower())
    if preset is not None:
        return ModelSource(preset, None, copy.deepcopy(PRESETS[preset]))
    raise ModelNotFoundError(
        f"There is no model {name!r}",
        f"It is not a folder, not a weights file, and none of the presets: {', '.join(PRESETS)}.",
        _todo(path) or "Give the folder that holds config.json and the weights.",
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that must hold an object; any defect is a CheckpointError that names the
    file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read",
            f"{error.strerror or error}.",
            "Check the file and its permissions.",
        ) from error
    except (ValueError, RecursionError) as error:
        if known := impostor(path):
            raise known from error
        raise CheckpointError(
            f"{path} is not JSON", f"{error}.", "Download or copy the file again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} does not hold a JSON object",
            f"It holds a {type(value).__name__}.",
            "Download or copy the file again.",
        )
    return value


def is_converted(path: Path | None) -> bool:
    """Whether the folder was written by `penstock convert`."""
    return path is not None and (path / CONVERTED).is_file()


def has_weight_files(path: Path) -> bool:
    """Whether the folder has weights; a config.json alone can still be sized."""
    return bool(weight_files(path))


def weight_files(path: Path) -> list[Path]:
    """The files with a checkpoint's weights, by name."""
    files = path.iterdir() if path.is_dir() else iter([path])
    if path.is_file() and "-of-" in path.name:  # the first of several: model-00001-of-00003.gguf
        files = path.parent.glob(f"{path.name.rpartition('-of-')[0][:-5]}*{path.suffix}")
    return sorted(file for file in files if file.suffix in (*WEIGHT_SUFFIXES, ".gguf"))


def files_digest(path: Path) -> str:
    """Of the names, sizes and times of a checkpoint's files: tells whether their weights are still
    the same, without reading them.
    """
    digest = hashlib.sha256()
    for file in weight_files(path):
        found = file.stat()
        digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()


def _open_path(path: Path) -> ModelSource:
    if path.is_dir() and not any(entry.suffix in WEIGHT_SUFFIXES for entry in path.iterdir()):
        path = find_gguf(path) or path
    if is_gguf(path):
        path = first_file(path)
        return ModelSource(model_name(path), path, config_of(read_model(path)))
    folder = path if path.is_dir() else path.parent
    if not is_converted(folder) and (error := unfinished(folder)):
        raise error
    if not path.is_dir() and path.suffix not in WEIGHT_SUFFIXES:
        raise ModelNotFoundError(
            f"{path} is not a model",
            f"A weights file ends in {', '.join((*WEIGHT_SUFFIXES, '.gguf'))}.",
            "Give the folder that holds config.json and the weights.",
        )
    return ModelSource(folder.resolve().name, path, read_json_object(_find_config(folder)))


def _find_config(folder: Path) -> Path:
    """Next to the weights; a folder with only a .pt may have its config one level up."""
    candidates = [folder / name for name in CONFIG_NAMES]
    if any(folder.glob("*.pt")):
        candidates += [folder.resolve().parent / name for name in CONFIG_NAMES]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if error := other_kind(folder):
        raise error
    found = sorted(entry.name for entry in folder.iterdir())
    raise CheckpointError(
        f"{folder} has no config.json",
        f"It holds {', '.join(found[:8]) or 'nothing'}{', ...' if len(found) > 8 else ''}.",
        "Give the folder that the whole model was downloaded into.",
    )


def _todo(path: Path) -> str:
    """Advice: a similar name for a mistyped path, or how to download a repository."""
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)) is None or path.parent.is_dir():
        return _suggest(path)
    download = (
        f"Penstock does not download models: run `hf download {path} --local-dir "
        f"{path.name}` first."
    )
    is_preset = path.name.lower() in {preset.lower() for preset in PRESETS}  # which has no weights
    return download if is_preset else f"{_suggest(path)} {download}".lstrip()


def _suggest(path: Path) -> str:
    siblings: list[str] = []
    if path.parent.is_dir():
        configs = (file for name in CONFIG_NAMES for file in path.parent.glob(f"*/{name}"))
        siblings = [file.parent.name for file in configs]
    return nearest(path.name, [*PRESETS, *siblings])
