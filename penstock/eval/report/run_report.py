"""Writes results as one self-contained page, and as pictures.

    penstock eval report results/h200 [--output report.html --png FOLDER --baseline PATH]

Reads the files of `penstock bench --json` and `penstock eval --output`, and what others published
(the folder baseline, if it exists). Without matplotlib the page has tables and no charts.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minijinja

from penstock.config import setting
from penstock.errors import PenstockError
from penstock.eval.report.charts import (
    THEMES,
    Chart,
    as_svg,
    has_matplotlib,
    percent,
    require_matplotlib,
    save_png,
    short,
    whole,
)
from penstock.eval.report.data import Results, read_all
from penstock.eval.report.findings import find
from penstock.eval.results import prepare_output

PUBLISHED = Path("baseline")
HERO = ("throughput", "decode")
LEAD = re.compile(r"<section[^>]*>\n<h2>(.*?)</h2>\n<p>(.*?)</p>", re.DOTALL)
ABSENT = re.compile("<li><b>(.*)</b>: (.*)</li>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """What to read, and where to write the page."""

    results: tuple[str, ...] = setting(("results",), "folders and files with results")
    baseline: str | None = setting(
        None, "others' results, and goals (default: the folder baseline)"
    )
    output: str = setting("report.html", "the page")
    png: str | None = setting(None, "also draw the charts into this folder (matplotlib)")


def run(settings: ReportSettings) -> int:
    prepare_output(settings.output)
    if settings.png:
        require_matplotlib("--png")
    results = read_all(settings.results, "RESULTS")
    if not results.origins:
        raise PenstockError(
            f"{', '.join(settings.results)} has no results",
            f"None of its {len(results.unknown)} JSON files names a known measurement.",
            "Use a file of `penstock bench --json` or `penstock eval --output`, or its folder.",
        )
    others = [settings.baseline or str(PUBLISHED)]
    is_given = settings.baseline or PUBLISHED.is_dir()
    findings = find(results, read_all(others, "--baseline") if is_given else Results())
    file = Path(settings.output).expanduser()
    page = render(findings)
    file.write_text(page, encoding="utf-8")
    print(describe(page, file))
    if settings.png:
        for picture in save_pictures(findings, Path(settings.png).expanduser()):
            print(picture)
    return 0


def render(findings: Mapping[str, Any]) -> str:
    """One HTML file without external scripts, fonts or pictures."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    jinja = minijinja.Environment(templates={"page.html": template})
    for form in (short, percent, whole, code):
        jinja.add_filter(form.__name__, form)
    tools = {"svg": as_svg, "has_charts": has_matplotlib(), "themes": THEMES}
    return jinja.render_template("page.html", **findings, **tools)


def code(text: str) -> Any:
    """A sentence as HTML; text between backticks becomes code."""
    return minijinja.safe(re.sub("`(.*?)`", r"<code>\1</code>", html.escape(text)))


def describe(page: str, file: Path) -> str:
    """The page's main sentences, read from the page, so that each is written only once."""
    (title,) = re.findall(r"<h1>(.*?)</h1>", page, re.DOTALL)
    lines = [f"{file}: {title}, {len(page.encode()) / 1024:,.0f} KiB"]
    lines += [f"  {title}: {' '.join(lead.split())}" for title, lead in LEAD.findall(page)]
    lines += [f"  left out: {title}. {why}" for title, why in ABSENT.findall(page)]
    return html.unescape(re.sub("</?code>", "`", "\n".join(lines)))


def save_pictures(findings: Mapping[str, Any], folder: Path) -> Iterator[Path]:
    """NAME-light.png and NAME-dark.png for every chart, and `hero` if both its charts exist."""
    found = [section for section in findings.values() if isinstance(section, dict)]
    charts: list[Chart] = [
        chart
        for section in found
        for chart in section.get("charts") or [section.get("chart")]
        if chart
    ]
    pictures = {chart.slug: [chart] for chart in charts}
    if all(slug in pictures for slug in HERO):
        pictures["hero"] = [pictures[slug][0] for slug in HERO]
    folder.mkdir(parents=True, exist_ok=True)
    for slug, drawn in pictures.items():
        for name, theme in THEMES.items():
            path = folder / f"{slug}-{name}.png"
            save_png(drawn, path, theme)
            yield path
