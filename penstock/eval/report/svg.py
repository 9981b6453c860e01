"""Draws charts as SVG, in the colours of the page around them: every mark has a class, none has a colour.

A chart is drawn for a width in CSS pixels at which its text is read, so a phone and a desktop get drawings
of their own. Knows shapes and text; never where a number came from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from penstock.eval.report.chart import (
    BarChart,
    Chart,
    LineChart,
    Range,
    RangeChart,
    Role,
    Series,
    log_ticks,
    short,
    spread_labels,
)

LINE_HEIGHT = 14.0
ROW_HEIGHT = 40.0
DIGIT_WIDTH = 7.0  # of the small text; a little more than most fonts need
WIDE = 500  # pixels, from which on there is room for numbers beside names


class Scale:
    """From values to pixels, by the logarithm or straight."""

    def __init__(self, low: float, high: float, start: float, end: float, *, is_log: bool) -> None:
        self._is_log = is_log
        self._low, self._high = self._inner(low), self._inner(high)
        self._start, self._end = start, end

    def _inner(self, value: float) -> float:
        return math.log(value) if self._is_log else value

    def __call__(self, value: float) -> float:
        span = self._high - self._low
        share = (self._inner(value) - self._low) / span if span else 0.5
        return self._start + share * (self._end - self._start)


def draw(chart: Chart, width: int) -> str:
    match chart:
        case LineChart():
            height = 380 if width >= WIDE else 300
            body = _draw_lines(chart, float(width), float(height))
        case BarChart():
            height = round(ROW_HEIGHT * len(chart.bars))
            body = _draw_bars(chart, float(width))
        case RangeChart():
            height = round(ROW_HEIGHT * len(chart.ranges)) + 24
            body = _draw_ranges(chart, float(width), float(height))
    name = f"{chart.slug}-{width}"
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="{name}-title {name}-about">\n'
        f'<title id="{name}-title">{escape(chart.title)}</title>\n'
        f'<desc id="{name}-about">{escape(chart.about)}</desc>\n'
        f"{body}\n</svg>"
    )


def _draw_lines(chart: LineChart, width: float, height: float) -> str:
    xs, ticks = chart.x_values, [(tick, f"{tick:,g}") for tick in log_ticks(chart.y_bounds)]
    is_wide = width >= WIDE
    left = 10 + DIGIT_WIDTH * max((len(text) for _, text in ticks), default=0)
    right, top, bottom = width - (168 if is_wide else 108), 26.0, height - 38.0
    x_at = Scale(xs[0], xs[-1], left + 8, right - 8, is_log=True)
    y_at = Scale(*chart.y_bounds, bottom, top, is_log=True)
    parts = [_text(0, 12, chart.y_label, "axis")]
    for tick, text in ticks:
        y = y_at(tick)
        parts.append(_line(left, y, right, y, "grid"))
        parts.append(_text(left - 8, y + 4, text, "tick end"))
    for x in chart.x_labels:
        parts.append(_text(x_at(x), bottom + 16, f"{x:,g}", "tick middle"))
    parts.append(_text((left + right) / 2, bottom + 33, chart.x_label, "axis middle"))
    for series in chart.series:
        parts.append(_draw_series(series, [(x_at(x), y_at(y)) for x, y in series.points]))
    places = [(x_at(each.points[-1][0]), y_at(each.points[-1][1])) for each in chart.series]
    at_border = [each.points[-1][0] == xs[-1] for each in chart.series]
    parts += _label_above(chart.series, places, at_border)
    parts += _label_beside(chart.series, places, at_border, right + 6, (top, bottom), is_wide)
    return "\n".join(parts)


def _draw_series(series: Series, places: Sequence[tuple[float, float]]) -> str:
    style = f"{series.role.value}{' dashed' if series.is_dashed else ''}"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline class="line {style}" points="{path}"/>']
    if series.role not in (Role.BOUND, Role.GOAL):
        radius = 3.5 if series.role is Role.OURS else 2.5
        for (x, y), (at, value) in zip(places, series.points):
            said = escape(f"{series.name}: {short(value)} at {at:,g}")
            parts.append(f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">')
            parts.append(f"<title>{said}</title></circle>")
    return "".join(parts)


def _label_above(
    series: Sequence[Series], places: Sequence[tuple[float, float]], at_border: Sequence[bool]
) -> list[str]:
    """A line that ends before the right border is named above its end, where lines that rise leave room."""
    return [
        _text(x + 4, y - 9, each.name, f"label end {each.role.value}")
        for each, (x, y), is_last in zip(series, places, at_border)
        if not is_last
    ]


def _label_beside(
    series: Sequence[Series],
    places: Sequence[tuple[float, float]],
    at_border: Sequence[bool],
    x: float,
    bounds: tuple[float, float],
    with_values: bool,
) -> list[str]:
    """Lines that reach the right border are named there, apart from each other."""
    named = [(each, y) for each, (_, y), is_last in zip(series, places, at_border) if is_last]
    has_notes = any(each.note for each, _ in named)
    wanted = [y + 4 - (LINE_HEIGHT / 2 if has_notes else 0) for _, y in named]
    gap = LINE_HEIGHT * (2.25 if has_notes else 1.15)
    parts = []
    for (each, _), y in zip(named, spread_labels(wanted, gap, *bounds)):
        value = f"  {short(each.points[-1][1])}" if with_values else ""
        parts.append(_text(x, y, each.name + value, f"label {each.role.value}"))
        if each.note:
            parts.append(_text(x, y + LINE_HEIGHT, each.note, "note"))
    return parts


def _draw_bars(chart: BarChart, width: float) -> str:
    """Each bar has a line of text above it, so that long names need no column of their own."""
    scale = Scale(0.0, chart.longest, 0.0, width - 2, is_log=False)
    parts = []
    for index, bar in enumerate(chart.bars):
        top = index * ROW_HEIGHT
        parts.append(_text(0, top + 13, bar.label, "label"))
        parts.append(_text(width, top + 13, bar.text, "value end"))
        track = scale(chart.full) if chart.full else width - 2
        parts.append(_rect(0, top + 19, track, 10, "track"))
        style = f"bar {bar.role.value}{' hollow' if bar.is_dashed else ''}"
        parts.append(_rect(0, top + 19, max(1.0, scale(bar.value)), 10, style))
        for mark in bar.marks:
            x = scale(mark.value)
            parts.append(_line(x, top + 17, x, top + 31, "mark under"))
            parts.append(_line(x, top + 17, x, top + 31, f"mark {mark.role.value}"))
    return "\n".join(parts)


def _draw_ranges(chart: RangeChart, width: float, height: float) -> str:
    scale = Scale(*chart.bounds, 4.0, width - 6, is_log=True)
    parts = []
    for tick in log_ticks(chart.bounds):
        x = scale(tick)
        parts.append(_line(x, 0, x, height - 20, "grid"))
        room = DIGIT_WIDTH * len(f"{tick:,g}") / 2
        parts.append(_text(max(room, min(x, width - room)), height - 5, f"{tick:,g}", "tick middle"))
    parts += [_draw_range(each, index, scale, width) for index, each in enumerate(chart.ranges)]
    return "\n".join(parts)


def _draw_range(each: Range, index: int, scale: Scale, width: float) -> str:
    top = index * ROW_HEIGHT
    y = top + 26
    p50, p90, p95, p99, slowest = map(scale, (each.p50, each.p90, each.p95, each.p99, each.max))
    return "\n".join(
        [
            _text(0, top + 13, each.label, "label"),
            _text(width, top + 13, each.text, "value end"),
            _line(p99, y, slowest, y, "tail"),
            _line(slowest, y - 3, slowest, y + 3, "tail"),
            _line(p50, y, p99, y, "range"),
            *(_line(x, y - 4, x, y + 4, "range thin") for x in (p90, p95)),
            f'<circle class="ring" cx="{p99:.1f}" cy="{y:.1f}" r="4"/>',
            f'<circle class="dot ours" cx="{p50:.1f}" cy="{y:.1f}" r="5"/>',
        ]
    )


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _rect(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'
