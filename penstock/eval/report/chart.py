"""What a drawing shows, before anybody draws it: lines, bars, ranges, tables, and the scales they stand on.

SVG and PNG are two ways to draw the same objects. Knows no pixels, no colours and no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

AXIS_ROOM = 1.3
NARROWEST_STEP = 1.5  # between two numbers below an axis
TICK_DIGITS = ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))


class Role(Enum):
    """What a mark is to the reader; each role has one colour."""

    OURS = "ours"
    RIVAL = "rival"  # the one to compare with
    OTHER = "other"
    BOUND = "bound"  # the floor: what physics allows
    GOAL = "goal"


@dataclass(frozen=True, slots=True)
class Series:
    """A line; `points` are (x, y), at least one. Dashed: computed, not measured."""

    name: str
    note: str
    points: tuple[tuple[float, float], ...]
    role: Role
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class LineChart:
    """Both axes are logarithmic: what doubles moves the same way everywhere."""

    slug: str
    title: str
    about: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]

    @property
    def x_values(self) -> list[float]:
        return sorted({x for series in self.series for x, _ in series.points})

    @property
    def x_labels(self) -> list[float]:
        """Those values that have room for their number beside the next one's."""
        kept: list[float] = []
        for x in reversed(self.x_values):
            if not kept or kept[-1] >= NARROWEST_STEP * x:
                kept.append(x)
        return kept[::-1]

    @property
    def y_bounds(self) -> tuple[float, float]:
        return log_bounds(y for series in self.series for _, y in series.points)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on a bar that is not its end: a floor, a goal."""

    value: float
    role: Role


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    text: str
    role: Role = Role.OURS
    marks: tuple[Mark, ...] = ()
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars from zero. `key` says in words what marks mean; `full` is the length of a whole track."""

    slug: str
    title: str
    about: str
    bars: tuple[Bar, ...]
    key: str = ""
    full: float | None = None

    @property
    def longest(self) -> float:
        ends = [value for bar in self.bars for value in (bar.value, *(mark.value for mark in bar.marks))]
        return max([*ends, self.full or 0.0])


@dataclass(frozen=True, slots=True)
class Range:
    """Where one quantity lay, by percentile."""

    label: str
    text: str
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class RangeChart:
    """Ranges on one logarithmic axis."""

    slug: str
    title: str
    about: str
    unit: str
    ranges: tuple[Range, ...]

    @property
    def bounds(self) -> tuple[float, float]:
        return log_bounds(value for each in self.ranges for value in (each.p50, each.max))


Chart = LineChart | BarChart | RangeChart


@dataclass(frozen=True, slots=True)
class Table:
    """The numbers of a chart, as text: the first column left, the others right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One thing the page says: a sentence, its drawings and numbers, and what to know before one believes."""

    slug: str
    title: str
    lead: str
    parts: tuple[Chart | Table, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Absent:
    """A section that is not on the page, and what is missing for it."""

    title: str
    why: str


def short(number: float) -> str:
    """Three digits that count: 1.95, 27.2, 6,714."""
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:,.{decimals}f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def log_bounds(values: Iterable[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis: a little beyond positive values, so that no mark sits on a border."""
    found = list(values)
    return min(found) / AXIS_ROOM, max(found) * AXIS_ROOM


def log_ticks(bounds: tuple[float, float]) -> list[float]:
    """Round numbers within the bounds, of the coarsest kind that gives at least three."""
    low, high = bounds
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in TICK_DIGITS:
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks


def spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near to those wanted as can be, `gap` apart and within the borders."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    places = [0.0] * len(wanted)
    reach = low
    for index in order:
        places[index] = max(wanted[index], reach)
        reach = places[index] + gap
    reach = high
    for index in reversed(order):
        places[index] = min(places[index], reach)
        reach = places[index] - gap
    return places
