"""How long work says where it is: named phases that a terminal, a log or a test can follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """One piece of news of a named phase; it has ended when `seconds` is set."""

    name: str
    detail: str = ""
    fraction: float | None = None  # 0 to 1, or None when it cannot be known
    seconds: float | None = None


OnPhase = Callable[[Phase], None]
