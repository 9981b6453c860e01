"""How long work says where it is: named phases that a terminal, a log or a test can follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """One piece of news of a named phase; it has ended when `seconds` is set."""

    name: str
    detail: str = ""
    fraction: float | None = None  # 0 to 1, or None when it cannot be known
    seconds: float | None = None


OnPhase = Callable[[Phase], None]


@contextmanager
def timed(name: str, on_phase: OnPhase) -> Iterator[OnPhase]:
    """Reports a phase's start, whatever its body reports, and its end with the time it took."""
    started = time.perf_counter()
    last = Phase(name)

    def report(phase: Phase) -> None:
        nonlocal last
        last = phase
        on_phase(phase)

    report(last)
    yield report
    on_phase(Phase(name, last.detail, 1.0, time.perf_counter() - started))
