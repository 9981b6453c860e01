"""Terminal output: tables, notes, and errors in three lines. Phases are in progress.py.

Colour only on a terminal and never against NO_COLOR. Knows nothing about engines, models or
servers. rich is imported when a table is drawn, so that help and errors are immediate.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import TextIO

from penstock.errors import PenstockError
from penstock.progress import wants_color

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # name no file
_STYLES = {"red": "1;31", "bold": "1", "dim": "2", "green": "32", "cyan": "36"}


def paint(text: str, style: str, stream: TextIO) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if wants_color(stream) else text


def print_error(error: BaseException, stream: TextIO | None = None) -> None:
    """What happened, why, and what to do. A bug of ours gets the same three lines."""
    stream = stream or sys.stderr
    if isinstance(error, OSError) and (error.filename or error.errno in _WRITE_ERRORS):
        error = PenstockError(
            f"Cannot read or write {error.filename}"
            if error.filename
            else "Cannot write the output",
            f"{error.strerror}.",
            "Check the path, its permissions and the free space.",
        )
    elif not isinstance(error, PenstockError):
        error = PenstockError(
            f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            "Penstock did not expect this; it is probably a bug.",
            "Run the same command with --debug for the traceback.",
        )
    print(paint("error:", "red", stream), paint(error.what, "bold", stream), file=stream)
    for line in (*error.why.splitlines(), *error.todo.splitlines()):
        print(f"  {line}", file=stream)
    stream.flush()


def print_note(text: str) -> None:
    print(paint("note:", "cyan", sys.stderr), text, file=sys.stderr, flush=True)


def human_count(number: float) -> str:
    """1234 -> 1.23 k, 35e9 -> 35.0 B: three digits, as in model sizes."""
    return _scaled(number, (" T", " B", " M", " k", ""))


def human_bytes(number: float) -> str:
    """Decimal units, as bandwidths are stated: 69321221376 -> 69.3 GB."""
    return _scaled(number, (" TB", " GB", " MB", " kB", " B"))


def _scaled(number: float, suffixes: Sequence[str]) -> str:
    """Three digits; the last suffix is for numbers below a thousand."""
    for scale, suffix in zip((1e12, 1e9, 1e6, 1e3), suffixes):
        if abs(number) >= scale:
            shown = abs(number / scale)
            return f"{number / scale:.{2 if shown < 10 else 1 if shown < 100 else 0}f}{suffix}"
    return f"{number:g}{suffixes[-1]}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table for people: the first column left, the others right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # A pipe has no width: never wrap a table that a program or a file will read.
    width = None if sys.stdout.isatty() else 200
    console = Console(no_color=not wants_color(sys.stdout), highlight=False, width=width)
    console.print(table, crop=False)
