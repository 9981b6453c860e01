"""Charts, drawn with matplotlib: as SVG in the page's colours, as PNG in those of a theme.

A chart is drawn for the width in CSS pixels at which it is shown, so a phone and a desktop get
different drawings. Knows nothing about measurements.
"""

from __future__ import annotations

import importlib.util
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from penstock.errors import PenstockError

AXIS_ROOM = 1.3
NARROWEST_STEP = 1.5  # smallest ratio of two numbers below an axis
SHORTEST_MS = 0.01  # where a time of 0 is drawn: tokens that came together
TICK_DIGITS = ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))
WIDE, HERO = 720, 1040  # CSS pixels
PIXELS_PER_INCH, PNG_DPI, NUM_COLOURS = 72, 115.2, 96
SMALL, PLAIN, LARGE = 11, 12, 15
ROW_HEIGHT, TITLE_HEIGHT = 40, 58
OUTSIDE = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
NOT_XML = re.compile(r"[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
RANGE_KEY = "ms; dot: median, ticks: p90 and p95, ring: p99, thin line: to the slowest"
# Every text colour has a contrast of 4.5 or more to its paper.
COLOURS = """
paper  #ffffff  #0d1117
ink    #1d2127  #e8eaed
quiet  #5b6470  #9aa4b0
hair   #e3e6ea  #262c35
track  #eef0f3  #1c222b
ours   #0a62b4  #6fb4ff
rival  #b04a12  #f2a169
other  #626c78  #9aa4b0
bound  #626c78  #9aa4b0
goal   #1f7a4d  #6fce9b
"""
THEMES: Mapping[str, Mapping[str, str]] = {
    name: {line.split()[0]: line.split()[column] for line in COLOURS.strip().splitlines()}
    for column, name in ((1, "light"), (2, "dark"))
}
# rival: the one to compare with; bound: the floor
ROLES = ("ours", "rival", "other", "bound", "goal")
Theme = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Series:
    """A line of (x, y), at least one. Dashed: computed, not measured."""

    name: str
    note: str
    points: tuple[tuple[float, float], ...]
    role: str
    is_dashed: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, {self.note}" if self.note else self.name


@dataclass(frozen=True, slots=True)
class LineChart:
    """Both axes are logarithmic."""

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
        """The values whose number has room beside the next one's."""
        kept: list[float] = []
        for x in reversed(self.x_values):
            if not kept or kept[-1] >= NARROWEST_STEP * x:
                kept.append(x)
        return kept[::-1]


@dataclass(frozen=True, slots=True)
class Bar:
    """`mark` is a position on the bar other than its end: a goal, a published time."""

    label: str
    value: float
    text: str
    role: str = "ours"
    mark: float | None = None
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars from zero. `key` explains the marks; `full` is the length of a whole track."""

    slug: str
    title: str
    about: str
    bars: tuple[Bar, ...]
    key: str = ""
    full: float | None = None
    mark_role: str = "goal"


@dataclass(frozen=True, slots=True)
class RangeChart:
    """Named spreads in ms (p50, p90, p95, p99, max) on one logarithmic axis."""

    slug: str
    title: str
    about: str
    ranges: tuple[tuple[str, Sequence[float]], ...]


Chart = LineChart | BarChart | RangeChart


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(flag: str) -> None:
    """Called before anything is measured: a long load must not end with a missing package."""
    if not has_matplotlib():
        raise PenstockError(
            f"{flag} needs matplotlib",
            "It is not installed.",
            f"Run `pip install 'penstock[eval]'` or `pip install matplotlib`, or leave {flag} out.",
        )


def short(number: float | None) -> str:
    """Three significant digits: 1.95, 27.2, 6,714."""
    if number is None:
        return "–"
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:,.{decimals}f}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def whole(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def log_bounds(values: Iterable[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis, a little beyond the values: no mark sits on a border."""
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
    """Positions as near as possible to those wanted, `gap` apart and within the borders."""
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


def as_svg(chart: Chart, width: int) -> str:
    """For the inside of an HTML page: colours are the page's variables, ids are unique there."""
    name, text = f"{chart.slug}-{width}", io.StringIO()
    with _own_style({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure = _figure(width, _height(chart, width))
        _draw(chart, figure.subplots(), THEMES["light"], is_wide=width >= WIDE)
        figure.savefig(text, format="svg", transparent=True)
    root = ElementTree.fromstring(NOT_XML.sub(" ", text.getvalue()))
    _clean(root)
    series = chart.series if isinstance(chart, LineChart) else ()
    for group in [each for each in root.iter("g") if each.get("id", "").startswith("series-")]:
        line = series[int(group.attrib.pop("id").removeprefix("series-"))]
        for mark, (x, y) in zip(group.iter("use"), line.points):
            ElementTree.SubElement(mark, "title").text = f"{line.name}: {short(y)} at {x:,g}"
    box, names = root.attrib["viewBox"], (f"{name}-title", f"{name}-about")
    root.attrib = {
        "class": "chart",
        "viewBox": box,
        "role": "img",
        "aria-labelledby": " ".join(names),
    }
    for place, tag, words in ((0, "title", chart.title), (1, "desc", chart.about)):
        element = ElementTree.Element(tag, id=names[place])
        element.text = NOT_XML.sub(" ", words)
        root.insert(place, element)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element) -> None:
    """Removes name spaces, ids except those of marks and series, and own colours and fonts."""
    element.tag = element.tag.rpartition("}")[2]
    for child in list(element):
        if child.tag.endswith(("}metadata", "}style", "}clipPath")):
            element.remove(child)
        else:
            _clean(child)
    found = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    if element.tag == "g" and not found.get("id", "").startswith("series-"):
        found["class"] = "tick" if found.pop("id", "").startswith(("xtick_", "ytick_")) else ""
        found = {key: value for key, value in found.items() if value}
    found.pop("clip-path", None)
    if "style" in found:
        style = re.sub(r"'DejaVu Sans'[^;]*", "var(--font)", found["style"])
        for role, colour in THEMES["light"].items():
            style = style.replace(colour, f"var(--{role})")
        found["style"] = style
    element.attrib = found
    element.tail = None
    if element.tag not in ("text", "tspan", "title"):
        element.text = None


def save_png(charts: Sequence[Chart], path: Path, theme: Theme) -> None:
    """Charts side by side, in few colours: a third of the bytes for files kept in a repository."""
    from PIL import Image  # comes with matplotlib

    width = WIDE if len(charts) == 1 else HERO
    drawn = io.BytesIO()
    with _own_style({}):
        figure = _figure(width, TITLE_HEIGHT + max(_height(chart, width) for chart in charts), 0.18)
        for chart, axes in zip(charts, figure.subplots(1, len(charts), squeeze=False)[0]):
            pad = 24 if isinstance(chart, LineChart) else 8
            place = {"loc": "left", "fontsize": LARGE, "fontweight": "bold", "pad": pad}
            axes.set_title(chart.title, color=theme["ink"], **place)
            _draw(chart, axes, theme, is_wide=True)
            if isinstance(chart, RangeChart):  # the page has this key below its charts
                axes.set_xlabel(RANGE_KEY, fontsize=SMALL, color=theme["quiet"], loc="left")
        figure.savefig(drawn, dpi=PNG_DPI, facecolor=theme["paper"])
    picture = Image.open(drawn).convert("RGB")
    picture.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


@contextmanager
def _own_style(settings: Mapping[str, Any]) -> Iterator[None]:
    """Without the user's matplotlibrc, without formulas, without warnings about a font's glyphs."""
    from matplotlib import style

    ours = {"font.family": "DejaVu Sans", "text.parse_math": False, **settings}
    with style.context(["default", ours]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _figure(width: int, height: int, pad: float = 0.03) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=pad, h_pad=pad, wspace=0.04)
    return Figure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH), layout=layout)


def _height(chart: Chart, width: int) -> int:
    match chart:
        case LineChart():
            return 380 if width >= WIDE else 300
        case BarChart():
            return ROW_HEIGHT * len(chart.bars) + (24 if chart.key else 4)
        case RangeChart():
            return ROW_HEIGHT * len(chart.ranges) + 44


def _draw(chart: Chart, axes: Any, theme: Theme, *, is_wide: bool) -> None:
    axes.set_facecolor(theme["paper"])
    axes.tick_params(
        colors=theme["quiet"],
        labelsize=SMALL,
        left=False,
        bottom=False,
        labelleft=isinstance(chart, LineChart),
    )
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    match chart:
        case LineChart():
            _draw_lines(chart, axes, theme, is_wide)
        case BarChart():
            _draw_bars(chart, axes, theme)
        case RangeChart():
            _draw_ranges(chart, axes, theme)


def _set_log_axis(
    axes: Any, axis: str, bounds: tuple[float, float], ticks: list[float], theme: Theme
) -> None:
    axes.set(**{f"{axis}scale": "log", f"{axis}lim": bounds})
    axes.set(**{f"{axis}ticks": ticks, f"{axis}ticklabels": [f"{tick:,g}" for tick in ticks]})
    axes.minorticks_off()
    axes.grid(axis=axis, color=theme["hair"], linewidth=0.8)


def _draw_lines(chart: LineChart, axes: Any, theme: Theme, is_wide: bool) -> None:
    xs, ys = chart.x_values, log_bounds(y for series in chart.series for _, y in series.points)
    x_bounds = (xs[0] / 1.1, xs[-1] * (1.1 if len(xs) > 1 else 2.0))
    _set_log_axis(axes, "x", x_bounds, chart.x_labels, theme)
    _set_log_axis(axes, "y", ys, log_ticks(ys), theme)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(chart.x_label, fontsize=SMALL, color=theme["quiet"])
    axes.annotate(chart.y_label, (0, 1), (0, 9), color=theme["quiet"], fontsize=SMALL, **OUTSIDE)
    for index, series in enumerate(chart.series):
        colour, is_ours = theme[series.role], series.role == "ours"
        has_dots = series.role not in ("bound", "goal")
        axes.plot(
            *zip(*series.points),
            color=colour,
            linestyle=":" if series.role == "bound" else "--" if series.is_dashed else "-",
            linewidth=2.2 if is_ours else 1.5,
            marker="o" if has_dots else None,
            markersize=6 if is_ours else 4,
            markerfacecolor=theme["paper"] if series.is_dashed else colour,
            clip_on=False,
            gid=f"series-{index}",
        )
    _label_lines(chart, axes, theme, is_wide)


def _label_lines(chart: LineChart, axes: Any, theme: Theme, is_wide: bool) -> None:
    """Beside the right border, kept apart; a line that ends before it is named above its end."""
    at_border = [each for each in chart.series if each.points[-1][0] == chart.x_values[-1]]
    to_share = (axes.transData + axes.transAxes.inverted()).transform
    wanted = [float(to_share(series.points[-1])[1]) for series in at_border]
    gap = (0.11 if any(series.note for series in at_border) else 0.06) * (1.0 if is_wide else 1.25)
    places = dict(zip(map(id, at_border), spread_labels(wanted, gap, 0.03, 0.97)))
    for series in chart.series:
        text = f"{series.name}  {short(series.points[-1][1])}" if is_wide else series.name
        weight = "bold" if series.role == "ours" else "normal"
        look = {"color": theme[series.role], "fontsize": PLAIN, "fontweight": weight}
        y = places.get(id(series))
        if y is None:
            axes.annotate(
                text, series.points[-1], (4, 8), textcoords="offset points", ha="right", **look
            )
            continue
        axes.annotate(text, (1, y), (8, 3 if series.note else -4), **look, **OUTSIDE)
        if series.note:
            place = {"color": theme["quiet"], "fontsize": SMALL, **OUTSIDE}
            axes.annotate(series.note, (1, y), (8, -10), **place)


def _draw_bars(chart: BarChart, axes: Any, theme: Theme) -> None:
    """Each bar has its name above it, so that long names need no column of their own."""
    ends = [end for bar in chart.bars for end in (bar.value, bar.mark or 0.0)]
    longest = max([*ends, chart.full or 0.0]) or 1.0
    axes.set(xlim=(0, longest), ylim=(len(chart.bars) - 0.5, -0.5), xticks=[])
    for y, bar in enumerate(chart.bars):
        _name_row(bar.label, bar.text, y, axes, theme)
        bars = {"height": 0.26, "clip_on": False}
        axes.barh(y + 0.2, chart.full or longest, color=theme["track"], **bars)
        axes.barh(
            y + 0.2, bar.value, color=theme[bar.role], alpha=0.45 if bar.is_dashed else None, **bars
        )
        if bar.mark is not None:
            mark, span = [bar.mark] * 2, [y + 0.03, y + 0.37]
            axes.plot(mark, span, color=theme["paper"], linewidth=6, clip_on=False)
            axes.plot(mark, span, color=theme[chart.mark_role], linewidth=2, clip_on=False)
    if chart.key:
        axes.set_xlabel(chart.key, fontsize=SMALL, color=theme["quiet"], loc="left")


def _name_row(label: str, text: str, y: float, axes: Any, theme: Theme) -> None:
    box = {"facecolor": theme["paper"], "edgecolor": "none", "pad": 1}
    for x, words, side in ((0, label, "left"), (1, text, "right")):
        look = {"ha": side, "va": "center_baseline", "color": theme["ink"], "fontsize": PLAIN}
        axes.text(x, y - 0.18, words, transform=axes.get_yaxis_transform(), bbox=box, **look)


def _draw_ranges(chart: RangeChart, axes: Any, theme: Theme) -> None:
    drawn = [[max(SHORTEST_MS, each) for each in spread] for _, spread in chart.ranges]
    bounds, ours = log_bounds(each for spread in drawn for each in spread), theme["ours"]
    _set_log_axis(axes, "x", bounds, log_ticks(bounds), theme)
    axes.set(ylim=(len(chart.ranges) - 0.4, -0.5), yticks=[])
    for row, (label, spread) in enumerate(chart.ranges):
        y, (p50, p90, p95, p99, slowest) = row + 0.2, drawn[row]
        _name_row(label, f"{short(spread[0])} · p99 {short(spread[3])}", row, axes, theme)
        axes.plot([p99, slowest], [y, y], color=theme["other"], linewidth=1)
        axes.plot([p50, p99], [y, y], color=ours, linewidth=2)
        axes.plot([p90, p95], [y, y], "|", color=ours, markersize=8)
        axes.plot(slowest, y, "|", color=theme["other"], markersize=6)
        axes.plot(p99, y, "o", color=ours, markerfacecolor=theme["paper"], markersize=6)
        axes.plot(p50, y, "o", color=ours, markersize=8)
