"""results.log: the progress of a run, also when it fails, and where its time goes.

The first trial replaces an earlier run's log. A run that ends before that appends the reason: the
old engine, which is still there, keeps its log, and the reader learns why there is no new one.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.errors import PenstockError


class RunLog:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.log"
        self._early_lines: list[str] | None = []  # None once there was a trial
        self._explained: BaseException | None = None

    def add(self, line: str) -> None:
        if self._early_lines is None:
            self._append(line)
        else:
            self._early_lines.append(line)

    def begin(self) -> None:
        """The first trial is over: the log is this run's from now on."""
        if self._early_lines is not None:
            replace_file(self.path, "".join(f"{line}\n" for line in self._early_lines))
            self._early_lines = None

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Logs an exception raised inside, once, and raises it again."""
        try:
            yield
        except BaseException as error:
            if error is not self._explained:
                self._explained = error
                with contextlib.suppress(OSError):  # the first error matters more
                    self._append(*self._explanation(error))
            raise

    def _explanation(self, error: BaseException) -> list[str]:
        ending = "ended" if self._early_lines is None else "came to nothing"
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}: this run {ending}."
        if isinstance(error, PenstockError):
            said = f"error: {error}"
        elif isinstance(error, KeyboardInterrupt):
            said = "It was interrupted."
        else:
            said = "".join(traceback.format_exception(error)).rstrip()
        return [head, *(self._early_lines or ()), textwrap.indent(said, "  ")]

    def _append(self, *lines: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


def replace_file(path: Path, text: str) -> None:
    """Writes all or nothing, also if interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    os.replace(draft, path)


class Phases:
    """One clock, read at the end of every phase. A phase that comes again adds up."""

    def __init__(self, started: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.monotonic() if started is None else started
        self._last = self.started

    def end(self, name: str) -> float:
        """The phase of this name ends now; its seconds."""
        now = time.monotonic()
        taken, self._last = now - self._last, now
        self.seconds[name] = self.seconds.get(name, 0.0) + taken
        return taken

    @property
    def total_s(self) -> float:
        return self._last - self.started


def tell(seconds: Mapping[str, float]) -> str:
    """`build 1.2, gate 3.4`"""
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
