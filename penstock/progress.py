"""How long-running work reports its progress: named phases, and the bars or log lines that show
them.

rich is imported when a bar is drawn. Knows nothing about engines, models or servers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SILENCE_S = 5.0  # a log reports a long phase at least this often
_DETAIL_COLUMN = 24  # where details start; all lines of a longer one


@dataclass(frozen=True, slots=True)
class Phase:
    """One report of a named phase; the phase has ended when `seconds` is set."""

    name: str
    detail: str = ""
    fraction: float | None = None  # 0 to 1; None: unknown
    seconds: float | None = None


OnPhase = Callable[[Phase], None]


@contextmanager
def timed(name: str, on_phase: OnPhase) -> Iterator[OnPhase]:
    """Reports a phase's start, the reports of its body, and its end with the time it took."""
    started = time.perf_counter()
    last = Phase(name)

    def report(phase: Phase) -> None:
        nonlocal last
        last = phase
        on_phase(phase)

    report(last)
    yield report
    on_phase(Phase(name, last.detail, 1.0, time.perf_counter() - started))


def wants_color(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class PhaseList:
    """The phases of a start as a list of names and times: a live bar on a terminal, plain lines in
    a log."""

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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ended phases stay on the terminal, the bar is removed. May be called twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __call__(self, phase: Phase) -> None:
        if phase.name in self._ended:
            return  # two parts may time one name; the first to end has the details
        if phase.seconds is not None:
            self._ended.add(phase.name)
            self._clear_bar(phase)
            detail = phase.detail.replace("\n", "\n" + " " * _DETAIL_COLUMN)
            self._say(f"{phase.name:<12} {phase.seconds:7.2f} s  {detail}".rstrip())
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
            self._tasks[phase.name],
            total=total,
            completed=phase.fraction or 0.0,
            detail=phase.detail.partition("\n")[0],
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
