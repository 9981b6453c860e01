"""What a file of a model folder is when it is not what its name says: told by its first bytes.

Downloads end in such files more often than in damaged ones. Knows how each comes about, and what to
do.
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
    """An error that says what the file is instead; None: nothing is known against it."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:  # who reads it says why it cannot be read
        return None
    if not head:
        return CheckpointError(
            f"{path} is empty",
            "A download that was broken off leaves such a file, and so does a full disk.",
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
            f"{path} is a GGUF file by another name",
            "Such a file is a whole model, not a part of a folder.",
            "Give it a name that ends in .gguf, and give that file in place of the folder.",
        )
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return CheckpointError(
            f"{path} is a web page",
            "A link to a page was downloaded, or a page that asks to log in.",
            "Download the file itself.",
        )
    return None
