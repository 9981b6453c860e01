"""Where what was made on this machine is kept for the next start: compiled kernels, measured tiles.

In the user's cache folder, never in the installed package, which may be read-only or shared. All of
it can be deleted and made again.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path:
    """May not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock" / name


def write_whole(path: Path, data: bytes) -> None:
    """All of it or nothing, since others may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)
