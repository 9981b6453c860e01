"""The order of the page: which sections there are, which are missing, and the few numbers that come first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.eval.report.about_answers import correctness_section, origin_section, replies_section
from penstock.eval.report.about_serving import (
    closed_levels,
    main_serving,
    projection_of,
    score_section,
    throughput_section,
    waiting_section,
)
from penstock.eval.report.about_steps import (
    decode_section,
    kernels_section,
    main_decode,
    prefill_section,
    roofline_section,
)
from penstock.eval.report.chart import Absent, Section, short
from penstock.eval.report.data import Results


@dataclass(frozen=True, slots=True)
class Headline:
    value: str
    unit: str
    about: str


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    subtitle: str
    headlines: tuple[Headline, ...]
    sections: tuple[Section, ...]
    absent: tuple[Absent, ...]


def compose(results: Results, others: Results) -> Report:
    found = [
        throughput_section(results, others),
        score_section(results, others),
        decode_section(results, others),
        roofline_section(results),
        waiting_section(results),
        prefill_section(results, others),
        kernels_section(results),
        replies_section(results),
        correctness_section(results),
    ]
    sections = [each for each in found if isinstance(each, Section)]
    absent = [each for each in found if isinstance(each, Absent)]
    if results.origins:
        sections.append(origin_section(results))
    return Report(_title(results), _subtitle(results), _headlines(results), tuple(sections), tuple(absent))


def _title(results: Results) -> str:
    gpus = _different(origin.gpu for origin in results.origins)
    return f"Penstock on {' and '.join(gpus)}" if gpus else "Penstock, measured"


def _subtitle(results: Results) -> str:
    """Model, number format, dates and commits: what a number means nothing without."""
    origins = results.origins
    main = main_decode(results)
    drawn = [serving.origin.model for serving in results.serving]
    models = _different([main.model if main else None, *drawn]) or _different(each.model for each in origins)
    dtypes = _different(origin.dtype for origin in origins)
    weights = ["random weights"] if any(origin.random_weights for origin in origins) else []
    days = sorted(_different(origin.time[:10] for origin in origins if origin.time))
    commits = _different(origin.commit for origin in origins if origin.time)
    dates = [days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"] if days else []
    code = [f"commit {', '.join(commits)}"] if commits else []
    return " · ".join([*models, *dtypes, *weights, *dates, *code])


def _different(texts: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text))


def _headlines(results: Results) -> tuple[Headline, ...]:
    found = []
    main_server = main_serving(results)
    levels = list(closed_levels(main_server).values()) if main_server else []
    if levels:
        level = max(levels, key=lambda each: each.tok_s)
        about = f"served in and out, {level.concurrency} requests at a time"
        found.append(Headline(short(level.tok_s), "tok/s", about))
    main = main_decode(results)
    if main:
        steps = main.steps
        found.append(
            Headline(short(steps[0].ms), "ms", f"a decode step at batch\N{NO-BREAK SPACE}{steps[0].batch}")
        )
        shares = [step for step in steps if step.of_floor]
        if shares:
            best = max(shares, key=lambda step: step.of_floor or 0.0)
            about = f"of the memory's floor at batch {best.batch}"
            found.append(Headline(f"{100 * (best.of_floor or 0.0):.1f}", "%", about))
    first = [(level, level.ttft) for level in levels if level.ttft]
    if first:
        level, spread = min(first, key=lambda pair: pair[1].p50)
        about = f"to the first token, median, {level.concurrency} at a time"
        found.append(Headline(short(spread.p50), "ms", about))
    _, projected = projection_of(results)
    if projected:
        total = short(sum(level.weighted for level in projected))
        found.append(Headline(total, "", "score of 8 GPUs, a projection"))
    return tuple(found)
