"""The cache folder of this machine: compiled kernels and measured tiles, kept for the next start.

It is in the user's cache folder, never in the installed package, which may be read-only or
shared. Everything in it can be deleted and is created again.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path:
    """It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock" / name


def write_whole(path: Path, data: bytes) -> None:
    """Writes atomically, since others may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)
