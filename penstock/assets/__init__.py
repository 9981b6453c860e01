"""The embedded model: a tiny Qwen3.5-MoE with made-up weights, so that everything runs without a download.

Owns where it is kept. It is written on first use, under a name that changes with what would be written, and
appears complete or not at all, however many processes ask for it at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from penstock.errors import ConfigError

MODEL_NAME = "penstock-tiny"
_SOURCES = ("tiny.py", "corpus.txt", "chat_template.jinja")


def default_model() -> Path:
    """The folder of the embedded model, written if this is its first use."""
    home = Path(os.environ.get("PENSTOCK_HOME") or Path.home() / ".cache" / "penstock")
    place = home / f"{MODEL_NAME}-{_fingerprint()}"
    folder = place / MODEL_NAME
    if folder.is_dir():
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=home))
    except OSError as error:
        raise ConfigError(
            f"the embedded model cannot be written to {home}",
            f"{error}.",
            "Set PENSTOCK_HOME to a folder that can be written.",
        ) from error
    try:
        from penstock.assets.tiny import write_model

        write_model(draft / MODEL_NAME)
        _publish(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _publish(draft: Path, place: Path) -> None:
    """Renames the draft to its place, unless another process was first."""
    draft.chmod(0o755)
    try:
        draft.rename(place)
    except OSError:
        if not (place / MODEL_NAME).is_dir():
            raise


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:12]
