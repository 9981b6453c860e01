"""Lets threads load kernel launchers concurrently.

Triton compiles one small extension module for the launches of each signature, and all of them have
the same name. Python gives modules of one name one namespace when it loads a file again, so a
thread may get the launcher that another thread has just loaded, for a kernel with other arguments.
"""

from __future__ import annotations

import threading
from types import ModuleType

from triton.runtime import build


def keep_launchers_apart() -> None:
    """From here on, each load gets its own namespace. Calling it again has no effect."""
    load = getattr(build, "_load_module_from_path", None)
    if load is None or getattr(load, "keeps_apart", False):
        return
    lock = threading.Lock()

    def load_apart(name: str, path: str) -> ModuleType:
        with lock:
            loaded = load(name, path)
            own = ModuleType(name)
            own.__dict__.update(vars(loaded))
            return own

    load_apart.keeps_apart = True  # type: ignore[attr-defined]
    build._load_module_from_path = load_apart
