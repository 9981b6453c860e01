"""How Penstock speaks to a terminal: phases with timers and bars, tables, notes, and errors in three lines.

Colour only on a terminal and never against NO_COLOR. Knows nothing about engines, models or servers. rich is
imported when a bar or a table is drawn, so that help and errors are immediate.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from penstock.errors import PenstockError
from penstock.progress import Phase

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_STYLES = {"red": "1;31", "bold": "1", "dim": "2", "green": "32", "cyan": "36"}
_SILENCE_S = 5.0  # a log hears of a long phase at least this often


def wants_color(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: TextIO) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if wants_color(stream) else text


def print_error(error: BaseException, stream: TextIO | None = None) -> None:
    """What happened, why, and what to do. A bug of ours gets the same three lines."""
    stream = stream or sys.stderr
    if not isinstance(error, PenstockError):
        error = PenstockError(
            f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            "Penstock did not expect this; it is probably a bug.",
            "Run the same command with --debug for the traceback.",
        )
    print(paint("error:", "red", stream), paint(error.what, "bold", stream), file=stream)
    for line in (error.why, error.todo):
        if line:
            print(f"  {line}", file=stream)
    stream.flush()


def print_note(text: str) -> None:
    print(paint("note:", "cyan", sys.stderr), text, file=sys.stderr, flush=True)


def human_count(number: float) -> str:
    """1234 -> 1.23 k, 35e9 -> 35.0 B: three digits, as people say model sizes."""
    for scale, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= scale:
            return _three_digits(number / scale) + suffix
    return f"{number:g}"


def human_bytes(number: float) -> str:
    """Decimal units, the ones bandwidths are stated in: 69321221376 -> 69.3 GB."""
    for scale, suffix in ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB")):
        if abs(number) >= scale:
            return _three_digits(number / scale) + suffix
    return f"{number:g} B"


def _three_digits(number: float) -> str:
    return f"{number:.{2 if abs(number) < 10 else 1 if abs(number) < 100 else 0}f}"


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
    # A pipe has no width: never fold a table that a program or a file will read.
    width = None if sys.stdout.isatty() else 200
    console = Console(no_color=not wants_color(sys.stdout), highlight=False, width=width)
    console.print(table, crop=False)


class PhaseList:
    """Start-up news as a list of named, timed phases: a live bar on a terminal, plain lines in a log."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self._last_line = time.perf_counter()
        self._ended: set[str] = set()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> PhaseList:
        if self.stream.isatty():
            self._progress = _live_progress(self.stream)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """What has ended stays on the terminal, the bar goes. May be called twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __call__(self, phase: Phase) -> None:
        if phase.name in self._ended:
            return  # one name may be timed by two parts; the first to end has the details
        if phase.seconds is not None:
            self._ended.add(phase.name)
            self._clear_bar(phase)
            self._say(f"{phase.name:<12} {phase.seconds:7.2f} s  {phase.detail}".rstrip())
        elif self._progress is not None:
            self._draw_bar(self._progress, phase)
        elif time.perf_counter() - self._last_line > _SILENCE_S:
            done = "" if phase.fraction is None else f" {phase.fraction:.0%}"
            self._say(f"{phase.name:<12}     ...{done}  {phase.detail}".rstrip())

    def _say(self, line: str) -> None:
        self._last_line = time.perf_counter()
        if self._progress is not None:
            self._progress.console.print(line, markup=False, soft_wrap=True)
        else:
            print(line, file=self.stream, flush=True)

    def _draw_bar(self, progress: Progress, phase: Phase) -> None:
        if phase.name not in self._tasks:
            self._tasks[phase.name] = progress.add_task(phase.name, total=None, detail="")
        total = None if phase.fraction is None else 1.0
        progress.update(
            self._tasks[phase.name], total=total, completed=phase.fraction or 0.0, detail=phase.detail
        )

    def _clear_bar(self, phase: Phase) -> None:
        if self._progress is not None and phase.name in self._tasks:
            self._progress.remove_task(self._tasks.pop(phase.name))
            self._progress.refresh()


def _live_progress(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    return Progress(
        TextColumn("{task.description}", table_column=Column(min_width=12, no_wrap=True)),
        TimeElapsedColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[detail]}", table_column=Column(ratio=1, no_wrap=True)),
        console=Console(file=stream, no_color=not wants_color(stream), highlight=False),
        expand=True,
        transient=True,
    )
