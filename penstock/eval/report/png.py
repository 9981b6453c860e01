"""The page's charts as pictures, through matplotlib: each for light and for dark pages, one for the README.

Draws the same chart objects as svg.py, in the same colours. matplotlib is an extra; without it there is a
page and no pictures.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.eval.report.chart import (
    BarChart,
    Chart,
    LineChart,
    RangeChart,
    Role,
    log_ticks,
    short,
    spread_labels,
)
from penstock.eval.report.sections import Report
from penstock.eval.report.style import THEMES

HERO = ("throughput", "decode")
DPI = 160
NUM_COLOURS = 96
SMALL, PLAIN, LARGE = 8.0, 9.0, 11.0
Theme = Mapping[str, str]


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise PenstockError(
            "--png needs matplotlib",
            "It is not installed.",
            "Run `pip install 'penstock[eval]'` or `pip install matplotlib`, or leave --png out.",
        )


def save_all(report: Report, folder: Path) -> Iterator[Path]:
    """Writes NAME-light.png and NAME-dark.png for every chart, and `hero` where its two charts are there."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    charts = {
        part.slug: part
        for section in report.sections
        for part in section.parts
        if isinstance(part, LineChart | BarChart | RangeChart)
    }
    for name, theme in THEMES.items():
        for slug, chart in charts.items():
            figure = Figure(figsize=(7.2, _height(chart)), layout=_layout())
            _draw(chart, figure.subplots(), theme)
            yield _save(figure, folder / f"{slug}-{name}.png", theme)
        if all(slug in charts for slug in HERO):
            figure = Figure(figsize=(10.4, 4.3), layout=_layout())
            for slug, axes in zip(HERO, figure.subplots(1, 2)):
                _draw(charts[slug], axes, theme)
            yield _save(figure, folder / f"hero-{name}.png", theme)


def _layout() -> Any:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.04)


def _height(chart: Chart) -> float:
    match chart:
        case LineChart():
            return 4.2
        case BarChart():
            return 0.7 + 0.34 * len(chart.bars)
        case RangeChart():
            return 1.0 + 0.38 * len(chart.ranges)


def _save(figure: Any, path: Path, theme: Theme) -> Path:
    """With few colours in a palette: a third of the bytes, and these files live in a repository."""
    from PIL import Image  # comes with matplotlib

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, facecolor=theme["paper"])
    Image.open(drawn).convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def _draw(chart: Chart, axes: Any, theme: Theme) -> None:
    axes.set_facecolor(theme["paper"])
    axes.set_title(
        chart.title,
        loc="left",
        fontsize=LARGE,
        fontweight="bold",
        color=theme["ink"],
        pad=22 if isinstance(chart, LineChart) else 10,
    )
    axes.tick_params(colors=theme["quiet"], labelsize=SMALL, length=0)
    axes.spines[:].set_visible(False)
    match chart:
        case LineChart():
            _draw_lines(chart, axes, theme)
        case BarChart():
            _draw_bars(chart, axes, theme)
        case RangeChart():
            _draw_ranges(chart, axes, theme)


def _draw_lines(chart: LineChart, axes: Any, theme: Theme) -> None:
    xs, ticks = chart.x_values, log_ticks(chart.y_bounds)
    axes.set(xscale="log", yscale="log", ylim=chart.y_bounds)
    axes.set_xlim(xs[0] / 1.1, xs[-1] * 1.1 if len(xs) > 1 else xs[0] * 2)
    axes.minorticks_off()
    axes.set_xticks(chart.x_labels, [f"{x:,g}" for x in chart.x_labels])
    axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.grid(axis="y", color=theme["hair"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(chart.x_label, fontsize=SMALL, color=theme["quiet"])
    above = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(chart.y_label, (0, 1), (0, 7), color=theme["quiet"], fontsize=SMALL, **above)
    for series in chart.series:
        colour = theme[series.role.value]
        style = {Role.BOUND: ":", Role.GOAL: "-"}.get(series.role, "--" if series.is_dashed else "-")
        has_dots = series.role not in (Role.BOUND, Role.GOAL)
        axes.plot(
            [x for x, _ in series.points],
            [y for _, y in series.points],
            color=colour,
            linestyle=style,
            linewidth=2.0 if series.role is Role.OURS else 1.3,
            marker="o" if has_dots else None,
            markersize=5 if series.role is Role.OURS else 3.5,
            markerfacecolor=theme["paper"] if series.is_dashed else colour,
            clip_on=False,
        )
    _label_lines(chart, axes, theme)


def _label_lines(chart: LineChart, axes: Any, theme: Theme) -> None:
    """In fractions of the axes' height, where labels can be kept apart whatever the scale."""
    last_x = chart.x_values[-1]
    at_border = [series for series in chart.series if series.points[-1][0] == last_x]
    to_share = (axes.transData + axes.transAxes.inverted()).transform
    wanted = [float(to_share(series.points[-1])[1]) for series in at_border]
    gap = 0.11 if any(series.note for series in at_border) else 0.06
    for series, y in zip(at_border, spread_labels(wanted, gap, 0.03, 0.97)):
        colour = theme[series.role.value]
        text = f"{series.name}  {short(series.points[-1][1])}"
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
        offset, weight = (3 if series.note else -3), ("bold" if series.role is Role.OURS else "normal")
        axes.annotate(text, (1, y), (6, offset), color=colour, fontsize=PLAIN, fontweight=weight, **place)
        if series.note:
            axes.annotate(series.note, (1, y), (6, -8), color=theme["quiet"], fontsize=SMALL, **place)
    for series in chart.series:
        if series not in at_border:
            colour = theme[series.role.value]
            text = f"{series.name}  {short(series.points[-1][1])}"
            end = series.points[-1]
            axes.annotate(
                text, end, (3, 7), textcoords="offset points", ha="right", color=colour, fontsize=PLAIN
            )


def _draw_bars(chart: BarChart, axes: Any, theme: Theme) -> None:
    places = range(len(chart.bars))
    axes.set(xlim=(0, chart.longest), ylim=(len(chart.bars) - 0.4, -0.6))
    axes.set_yticks(list(places), [bar.label for bar in chart.bars])
    axes.tick_params(axis="y", labelcolor=theme["ink"], labelsize=PLAIN)
    axes.set_xticks([])
    for y, bar in zip(places, chart.bars):
        colour = theme[bar.role.value]
        axes.barh(y, chart.full or chart.longest, height=0.42, color=theme["track"])
        axes.barh(y, bar.value, height=0.42, color=colour, alpha=0.45 if bar.is_dashed else 1.0)
        for mark in bar.marks:
            axes.plot([mark.value] * 2, [y - 0.34, y + 0.34], color=theme[mark.role.value], linewidth=2)
        _label_beside(bar.text, y, axes, theme)
    if chart.key:
        axes.set_xlabel(chart.key, fontsize=SMALL, color=theme["quiet"], loc="left")


def _label_beside(text: str, y: float, axes: Any, theme: Theme) -> None:
    axes.annotate(
        text,
        (1.01, y),
        xycoords=("axes fraction", "data"),
        va="center_baseline",
        color=theme["ink"],
        fontsize=PLAIN,
        annotation_clip=False,
    )


def _draw_ranges(chart: RangeChart, axes: Any, theme: Theme) -> None:
    ticks, ours = log_ticks(chart.bounds), theme["ours"]
    axes.set(xscale="log", xlim=chart.bounds, ylim=(len(chart.ranges) - 0.4, -0.6))
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.grid(axis="x", color=theme["hair"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_yticks(list(range(len(chart.ranges))), [each.label for each in chart.ranges])
    axes.tick_params(axis="y", labelcolor=theme["ink"], labelsize=PLAIN)
    for y, each in enumerate(chart.ranges):
        axes.plot([each.p99, each.max], [y, y], color=theme["other"], linewidth=0.8)
        axes.plot([each.p50, each.p99], [y, y], color=ours, linewidth=1.8)
        axes.plot([each.p90, each.p95], [y, y], "|", color=ours, markersize=7)
        axes.plot(each.max, y, "|", color=theme["other"], markersize=5)
        axes.plot(each.p99, y, "o", color=ours, markerfacecolor=theme["paper"], markersize=5.5)
        axes.plot(each.p50, y, "o", color=ours, markersize=6.5)
        _label_beside(each.text, y, axes, theme)
    key = f"{chart.unit}; dot: median, ticks: p90 and p95, ring: p99, thin line: to the slowest"
    axes.set_xlabel(key, fontsize=SMALL, color=theme["quiet"], loc="left")
