"""Locks an output folder, so that two commands do not write the same files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ConfigError


@contextmanager
def only_writer(output: Path, command: str) -> Iterator[None]:
    """Refuses a folder that another process of this command writes to. The folder must exist."""
    folder = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"Another `{command}` is writing to {output}",
                todo="Wait until it ends, or give another folder with -o.",
            ) from error
        except OSError:
            pass  # this file system has no locks
        yield
    finally:
        os.close(folder)
