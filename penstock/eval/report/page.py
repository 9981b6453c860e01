"""One HTML file from a report: no script, no font and no picture from elsewhere.

Each chart is drawn twice, for a phone and for a desktop; CSS shows the one that fits. Knows HTML; never a
measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.eval.report.chart import Absent, BarChart, Chart, Section, Table
from penstock.eval.report.sections import Report
from penstock.eval.report.style import stylesheet
from penstock.eval.report.svg import draw

WIDTHS = {"wide": 720, "narrow": 358}


def render(report: Report) -> str:
    head = (
        '<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(report.title)}</title>\n"
        f"<style>\n{stylesheet()}\n</style>"
    )
    parts = [_header(report), *map(_section, report.sections)]
    if report.absent:
        parts.append(_absent(report.absent))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n'
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(report: Report) -> str:
    items = "\n".join(
        f"<li><b>{escape(each.value)}{f'<small>{escape(each.unit)}</small>' if each.unit else ''}</b>"
        f"<span>{escape(each.about)}</span></li>"
        for each in report.headlines
    )
    headlines = f'<ul class="headlines">\n{items}\n</ul>' if items else ""
    return (
        f'<header>\n<h1>{escape(report.title)}</h1>\n<p class="quiet">{escape(report.subtitle)}</p>\n'
        f"{headlines}\n</header>"
    )


def _section(section: Section) -> str:
    parts = [
        _table(part) if isinstance(part, Table) else _figure(part, section.title) for part in section.parts
    ]
    notes = "".join(f"<li>{_words(note)}</li>" for note in section.notes)
    if notes:
        parts.append(f'<ul class="notes">{notes}</ul>')
    body = "\n".join(parts)
    return (
        f'<section id="{section.slug}">\n<h2>{escape(section.title)}</h2>\n<p>{_words(section.lead)}</p>\n'
        f"{body}\n</section>"
    )


def _figure(chart: Chart, section_title: str) -> str:
    drawings = "\n".join(
        f'<div class="{name}">\n{draw(chart, width)}\n</div>' for name, width in WIDTHS.items()
    )
    title = f"<h3>{escape(chart.title)}</h3>\n" if chart.title != section_title else ""
    key = (
        f"\n<figcaption>{escape(chart.key)}</figcaption>" if isinstance(chart, BarChart) and chart.key else ""
    )
    return f"{title}<figure>\n{drawings}{key}\n</figure>"


def _table(table: Table) -> str:
    """In a box that scrolls by itself: a wide table must not make the page wide."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.caption)}">\n<table>\n'
        f"<caption>{escape(table.caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def _absent(absent: Sequence[Absent]) -> str:
    items = "".join(f"<li><b>{escape(each.title)}</b>: {_words(each.why)}</li>" for each in absent)
    return f'<section id="absent">\n<h2>Not on this page</h2>\n<ul class="notes">{items}</ul>\n</section>'


def _words(text: str) -> str:
    """A sentence in which `this` is code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
