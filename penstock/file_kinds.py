"""Recognizes common wrong files by their first bytes (a Git-LFS pointer, an HTML page, an empty
file), and folders that hold something else than a model by the names in them.

Downloads end in such files more often than in damaged ones, so each kind has its own explanation
and advice.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from penstock.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
UNFINISHED_CONVERSION = "unfinished.json"  # of `penstock convert`
UNFINISHED_QUANTIZATION = "unfinished/progress.json"  # of `penstock quantize`

LOADABLE = (
    "Loaded are float32, bfloat16 and float16 weights as .safetensors, .pt or .bin files, "
    "and GGUF files."
)
HEAD_BYTES = 64
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".gguf")


def impostor(path: Path) -> CheckpointError | None:
    """An error that says what the file is instead; None if it looks like what its name says."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:  # the reader reports why it cannot be read
        return None
    if not head:
        return CheckpointError(
            f"{path} is empty",
            "An interrupted download or a full disk leaves such a file.",
            "Download or copy these files again.",
        )
    if head.startswith(b"version https://git-lfs"):
        return CheckpointError(
            f"{path} is a Git-LFS pointer, not the file itself",
            "A clone without Git LFS holds a few lines of text in place of each large file.",
            f"Run `git lfs install` and `git lfs pull` in {path.parent}, or download the files.",
        )
    if head.startswith(b"GGUF"):
        return CheckpointError(
            f"{path} is a GGUF file with another suffix",
            "A GGUF file is a whole model, not a part of a folder.",
            "Rename it to end in .gguf, and give that file instead of the folder.",
        )
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return CheckpointError(
            f"{path} is a web page",
            "A web page was downloaded instead of the file, perhaps one that asks to log in.",
            "Download the file itself.",
        )
    return None


def check_readable(path: Path) -> None:
    """Before a copy, whose own error would not say which of two files it means."""
    if not os.access(path, os.R_OK):
        raise CheckpointError(
            f"{path} cannot be read", "Permission denied.", "Check the file and its permissions."
        )


def unfinished(folder: Path) -> CheckpointError | None:
    """An error if a command of ours has begun to write a model here and has not ended."""
    for record, command in (
        (UNFINISHED_CONVERSION, "penstock convert"),
        (UNFINISHED_QUANTIZATION, "penstock quantize"),
    ):
        if (folder / record).is_file():
            return CheckpointError(
                f"{folder} is not complete",
                f"A `{command}` that has not ended writes it.",
                "Run the same command again: it continues where it stopped.",
            )
    return None


def other_kind(folder: Path) -> CheckpointError | None:
    """An error that says what a folder without a whole model holds; None if that is unknown."""
    if (folder / ADAPTER_CONFIG).is_file():
        return CheckpointError(
            f"{folder} is an adapter, not a whole model",
            f"Its {ADAPTER_CONFIG} names {_base_of(folder)} as the model that it changes.",
            "Merge it into that model with peft's merge_and_unload, and give the merged folder.",
        )
    if (folder / "model_index.json").is_file():
        return CheckpointError(
            f"{folder} is a diffusers pipeline",
            "It makes images or other media; Penstock runs language models.",
            "Give the folder of a language model.",
        )
    names = sorted(entry.name for entry in folder.iterdir())
    onnx = [name for name in names if name.endswith(".onnx")]
    if onnx and not any(name.endswith(WEIGHTS) for name in names):
        return CheckpointError(
            f"{folder} is an ONNX model",
            f"It holds {onnx[0]} and no weights in another format. {LOADABLE}",
            "Use the checkpoint that it was exported from.",
        )
    configs = [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")]
    if configs:
        inner = sorted(config.parent for config in configs)
        more = f" and {len(inner) - 1} more" if len(inner) > 1 else ""
        return CheckpointError(
            f"{folder} has no config.json",
            f"There is one in {inner[0]}{more}.",
            f"Give {inner[0]}." if len(inner) == 1 else "Give one of these folders.",
        )
    return None


def _base_of(folder: Path) -> str:
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        base = None
    return repr(base[:200]) if isinstance(base, str) and base else "no model"
