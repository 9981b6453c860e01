"""Where the time of a run goes: seconds by phase, so that thrift follows numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping


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
