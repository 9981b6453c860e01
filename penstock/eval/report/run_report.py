"""Results as one page that needs nothing else, and as pictures.

    penstock eval report results/h200 [--output report.html --png FOLDER --baseline PATH]

Reads what `penstock bench --json` and `penstock eval --output` wrote, and what others published (the folder
baseline, where there is one). A section whose numbers are missing is left out, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.config import setting
from penstock.errors import PenstockError
from penstock.eval.report import page, png
from penstock.eval.report.data import Results, read_all
from penstock.eval.report.sections import Report, compose
from penstock.eval.results import prepare_output

PUBLISHED = Path("baseline")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """What is read, and where the page goes."""

    results: tuple[str, ...] = setting(("results",), "folders and files with results")
    baseline: str | None = setting(None, "what others reach, and goals (default: the folder baseline)")
    output: str = setting("report.html", "the page")
    png: str | None = setting(None, "also draw the charts into this folder (matplotlib)")


def run(settings: ReportSettings) -> int:
    prepare_output(settings.output)
    if settings.png:
        png.require_matplotlib()
    results = read_all(settings.results, "RESULTS")
    if not results.origins:
        raise PenstockError(
            f"{', '.join(settings.results)} holds no results",
            f"Of {len(results.unknown)} JSON files none says what it measured.",
            "Name what `penstock bench --json` or `penstock eval --output` wrote, or the folder of it.",
        )
    report = compose(results, _read_others(settings))
    file = Path(settings.output).expanduser()
    text = page.render(report)
    file.write_text(text, encoding="utf-8")
    print(describe(report, file, len(text.encode())))
    if settings.png:
        for picture in png.save_all(report, Path(settings.png).expanduser()):
            print(picture)
    return 0


def _read_others(settings: ReportSettings) -> Results:
    if settings.baseline:
        return read_all([settings.baseline], "--baseline")
    return read_all([str(PUBLISHED)], "--baseline") if PUBLISHED.is_dir() else Results()


def describe(report: Report, file: Path, num_bytes: int) -> str:
    lines = [f"{file}: {report.title}, {num_bytes / 1024:,.0f} KiB"]
    lines += [f"  {section.title}: {section.lead}" for section in report.sections]
    lines += [f"  left out: {each.title}. {each.why}" for each in report.absent]
    return "\n".join(lines)
