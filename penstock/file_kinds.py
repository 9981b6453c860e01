"""Recognizes common wrong files in a model folder by their first bytes: a Git-LFS pointer, an HTML
page, an empty file.

Downloads end in such files more often than in damaged ones, so each kind has its own explanation
and advice.
"""

from __future__ import annotations

from pathlib import Path

from penstock.errors import CheckpointError

LOADABLE = (
    "Loaded are float32, bfloat16 and float16 weights as .safetensors, .pt or .bin files, "
    "and GGUF files."
)
HEAD_BYTES = 64


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
