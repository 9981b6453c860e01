"""The records of a run: a row per trial as it happens, a log for people, and the report at the end.

Every write is atomic: an interrupted run leaves the best engine and the records so far.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.forge.measure import Timing
from penstock.forge.run_log import RunLog, replace_file


@dataclass(frozen=True, slots=True)
class Row:
    """One trial."""

    trial: int
    author: str  # "search", or the name of a writing model
    idea: str
    why: str  # what made it worth a try
    lines_added: int
    lines_removed: int
    gate: str
    fault: str
    verdict: str  # "kept" or "discarded"
    at_s: float
    seconds: float
    score: float = 0.0  # times as fast as the first version, over all families
    gains: Mapping[str, float] = field(default_factory=dict)
    call_ms: Mapping[str, float] = field(default_factory=dict)
    worst: float = 0.0  # distance from right logits, in units of the tolerance
    peak_bytes: int = 0
    build_s: float = 0.0
    # Seconds: start, build, gate, measure, profile.
    phases: Mapping[str, float] = field(default_factory=dict)
    held_to: tuple[str, ...] = ()  # the restrictions that the candidate ran under

    def line(self) -> str:
        said = f"{self.score:.2f}x" if self.score else f"stopped at {self.gate}: {self.fault}"
        return f"[{self.at_s:6.1f} s] trial {self.trial}: {self.idea}: {said}, {self.verdict}"


class Ledger:
    def __init__(
        self, folder: Path, started: float | None = None, log: RunLog | None = None
    ) -> None:
        """`started` is on the monotonic clock, set if the run began before its ledger.

        The first row replaces an earlier run's files, so that a run without a result keeps them.
        """
        self.folder = folder
        self.rows: list[Row] = []
        self._started = time.monotonic() if started is None else started
        self._log = log or RunLog(folder)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started

    def add(self, row: Row) -> None:
        if not self.rows:
            replace_file(self.folder / "ledger.jsonl", "")
            self._log.begin()
        self.rows.append(row)
        facts = {name: _short(getattr(row, name)) for name in row.__slots__}
        with (self.folder / "ledger.jsonl").open("a") as file:
            file.write(json.dumps(facts, ensure_ascii=False) + "\n")
        self.log(row.line())

    def log(self, line: str) -> None:
        self._log.add(line)


def count_changes(before: str, after: str) -> tuple[int, int]:
    """Lines added and removed."""
    changes = [line[:2] for line in difflib.ndiff(before.splitlines(), after.splitlines())]
    return changes.count("+ "), changes.count("- ")


@dataclass(frozen=True, slots=True)
class Story:
    """The content of the report."""

    model: str
    machine: str
    device: str
    decisions: list[tuple[str, str, str]]  # question, choice, why
    first: Mapping[str, Timing]
    best: Mapping[str, Timing]
    floors_ms: Mapping[str, float]  # by bench, if known
    gains: Mapping[str, float]
    enforced: Mapping[str, str]
    given_up: Mapping[str, str]  # restrictions, and what did not work under them
    profile: Mapping[str, float]
    ending: str


def write_report(path: Path, story: Story, rows: list[Row]) -> None:
    lines = [
        "# An engine, and how it came about",
        "",
        f"Model: {story.model}.  ",
        f"Machine: {story.machine}.",
        "",
        story.ending,
        "",
        "![The best engine so far over the trials](progress.svg)",
    ]
    times = ("first version, ms a call", "best, ms a call")
    lines += _heading("What was gained", "bench", *times, "tokens/s", "gain", "floor, ms")
    for name, timing in story.best.items():
        first = story.first[name]
        floor = f"{story.floors_ms[name]:.3f}" if name in story.floors_ms else ""
        gain = f"{first.seconds / timing.seconds:.2f}x"
        speed = f"{timing.tokens_per_second:,.0f}"
        lines.append(
            _row(name, f"{first.call_ms:.3f}", f"{timing.call_ms:.3f}", speed, gain, floor)
        )
    gains = ", ".join(f"{family} {gain:.2f}x" for family, gain in story.gains.items())
    lines += ["", f"By family: {gains or 'not timed'}."]
    lines += _heading("What was decided", "question", "choice", "why")
    lines += [_row(*decided) for decided in story.decisions]
    columns = ("trial", "idea", "why", "lines", "came to", "score", "verdict")
    lines += _heading("What was tried", *columns)
    lines += map(_trial_row, rows)
    total = sum(story.profile.values()) or 1.0
    ranked = sorted(story.profile.items(), key=lambda item: -item[1])
    lines += _heading("Where the best one spends its time")
    lines += [f"- {part}: {seconds / total:.0%}" for part, seconds in ranked[:9]]
    lines += _heading("What candidates were held to")
    lines += [f"- {what}: {how}" for what, how in story.enforced.items()]
    lines += [f"- not {what}: {why}" for what, why in story.given_up.items()]
    replace_file(path, "\n".join(lines) + "\n")


def _heading(title: str, *columns: str) -> list[str]:
    """The beginning of a section, and of its table if it has columns."""
    table = [_row(*columns), "|" + "---|" * len(columns)] if columns else []
    return ["", f"## {title}", "", *table]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _trial_row(row: Row) -> str:
    came_to = row.gate
    if row.gate != "passed":
        came_to = f"{row.gate}: {row.fault[:90]}".replace("|", "/")
    size = f"+{row.lines_added} −{row.lines_removed}"
    score = f"{row.score:.2f}x" if row.score else ""
    return _row(str(row.trial), row.idea, row.why, size, came_to, score, row.verdict)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    return value
