"""What the page says of servers: throughput beside others, waiting times, the score and its projection."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.eval.report.about_steps import same_model
from penstock.eval.report.chart import (
    Absent,
    Bar,
    BarChart,
    LineChart,
    Mark,
    Range,
    RangeChart,
    Role,
    Section,
    Series,
    Table,
    short,
)
from penstock.eval.report.data import Level, Results, Serving, Spread
from penstock.eval.report.projection import NUM_GPUS, ProjectedLevel, needed_levels, project
from penstock.eval.score import WEIGHTS, weighted_sum

PERCENTILES = ("p50", "p90", "p95", "p99", "max")
SHORTEST_MS = 0.01  # where a time of 0, of tokens that came together, is drawn
EARLY_ENDS = (
    "The published replies could end early, which counts more prompt tokens a second; how long ours were is "
    "in the table."
)


def closed_levels(serving: Serving) -> dict[int, Level]:
    """Levels of so many requests at a time, without those at a rate or all at once."""
    found: dict[int, Level] = {}
    for level in serving.levels:
        if level.concurrency and level.rate is None:
            found.setdefault(level.concurrency, level)
    return dict(sorted(found.items()))


def speeds(serving: Serving) -> dict[int, float]:
    return {concurrency: level.tok_s for concurrency, level in closed_levels(serving).items()}


def rivals_of(ours: Sequence[Serving], others: Results) -> list[Serving]:
    """Published servers of the same model, the one with most levels first."""
    models = [serving.origin.model for serving in ours]
    fitting = [
        other
        for other in others.serving
        if speeds(other) and any(same_model(other.origin.model, model) for model in models)
    ]
    return sorted(fitting, key=lambda other: -len(other.levels))


def main_serving(results: Results) -> Serving | None:
    """The one run that every sentence about a server is taken from: what the score is projected from."""
    base, _ = projection_of(results)
    return base or next((serving for serving in results.serving if speeds(serving)), None)


def throughput_section(results: Results, others: Results) -> Section | Absent:
    title = "Throughput"
    ours = [serving for serving in results.serving if speeds(serving)]
    main = main_serving(results)
    if main is None:
        why = "No file of `penstock bench serve` or `penstock eval throughput` has a level."
        return Absent(title, why)
    rivals = rivals_of(ours, others)
    series = [
        *(_series(rival, Role.OTHER if index else Role.RIVAL) for index, rival in enumerate(rivals)),
        *(_series(serving, Role.OURS) for serving in ours),
    ]
    base, projected = projection_of(results)
    if base is not None and projected:
        points = tuple((float(level.concurrency), level.tok_s) for level in projected)
        note = f"{NUM_GPUS} GPUs, projected"
        series.append(Series(base.name, note, points, Role.OURS, is_dashed=True))
    about = "; ".join(
        f"{each.name}, {each.note}: {short(each.points[-1][1])} tokens a second "
        f"with {each.points[-1][0]:g} at a time"
        for each in series
    )
    label = "tokens a second, prompts and replies"
    chart = LineChart(
        "throughput", "Throughput by requests at a time", about, "requests at a time", label, tuple(series)
    )
    busiest = max(closed_levels(main).values(), key=lambda level: level.tok_s)
    lead = (
        f"{_hardware(main) or 'The server'} gives {short(busiest.tok_s)} tokens a second, prompts and "
        f"replies together, with {busiest.concurrency} requests at a time ({main.origin.file})."
    )
    notes = [f"{rival.name} ({_hardware(rival)}): {rival.source}." for rival in rivals if rival.source]
    if rivals and any(level.output_len for serving in ours for level in serving.levels):
        notes.append(EARLY_ENDS)
    if any(serving.is_judged for serving in ours):
        notes.append("Judged: by `penstock eval throughput`, which counts tokens again.")
    notes += [
        f"{serving.origin.file}: nothing came through with {level} at a time."
        for serving in ours
        for level in serving.failed
    ]
    return Section("throughput", title, lead, (chart, _throughput_table(series, ours)), tuple(notes))


def _series(serving: Serving, role: Role) -> Series:
    points = tuple((float(concurrency), tok_s) for concurrency, tok_s in speeds(serving).items())
    note = ", ".join(part for part in (_hardware(serving), "judged" if serving.is_judged else "") if part)
    return Series(serving.name, note, points, role)


def _hardware(serving: Serving) -> str:
    """`8 x NVIDIA H200` as `8 × H200`, which no line break takes apart."""
    return (
        (serving.hardware or "")
        .replace("NVIDIA ", "")
        .replace(" x ", " × ")
        .replace(" ", "\N{NO-BREAK SPACE}")
    )


def _throughput_table(series: Sequence[Series], ours: Sequence[Serving]) -> Table:
    order = sorted(series, key=lambda each: each.role is not Role.OURS)
    concurrencies = sorted({x for each in series for x, _ in each.points})
    lengths = {c: _lengths(level) for serving in ours for c, level in closed_levels(serving).items()}
    rows = []
    for concurrency in concurrencies:
        cells = [dict(each.points).get(concurrency) for each in order]
        row = [f"{concurrency:g}", *("–" if cell is None else short(cell) for cell in cells)]
        rows.append((*row, lengths.get(int(concurrency), "–")))
    names = [f"{each.name}, {each.note}" if each.note else each.name for each in order]
    return Table("Tokens a second", ("at a time", *names, "our tokens"), tuple(rows))


def _lengths(level: Level) -> str:
    if level.input_len is None or level.output_len is None:
        return "–"
    return f"{level.input_len:,} + {level.output_len:,}"


def _load_names(levels: Sequence[tuple[str, Level]]) -> list[str]:
    """Files and lengths are said where they differ, the lengths once below the charts where they do not."""
    has_files = len({file for file, _ in levels}) > 1
    has_lengths = len({_lengths(level) for _, level in levels}) > 1
    return [
        ", ".join(
            (_load_name(level), *([_lengths(level)] if has_lengths else []), *([file] if has_files else []))
        )
        for file, level in levels
    ]


def _load_name(level: Level) -> str:
    if level.concurrency:
        return f"{level.concurrency} at a time"
    if level.rate is not None:
        return f"{level.rate:g} a second"
    return f"{level.num_requests} at once" if level.num_requests else "all at once"


def waiting_section(results: Results) -> Section | Absent:
    title = "Waiting"
    timed = [serving for serving in results.serving if _timed_levels(serving)]
    if not timed:
        return Absent(title, "No level of `penstock bench serve` has percentiles of TTFT or ITL.")
    pairs = [(serving.origin.file, level) for serving in timed for level in _timed_levels(serving)]
    names, levels = _load_names(pairs), [level for _, level in pairs]
    first = [(name, level.ttft) for name, level in zip(names, levels) if level.ttft]
    between = [(name, level.itl) for name, level in zip(names, levels) if level.itl]
    parts: list[RangeChart | Table] = []
    if first:
        parts += _spread_parts("ttft", "Time to the first token, ms", first)
    if between:
        parts += _spread_parts("itl", "Time between tokens, ms", between)
    notes = ["Dot: the median. Ticks: p90 and p95. Ring: p99. Thin line: to the slowest."]
    if len({_lengths(level) for level in levels}) == 1 and levels[0].input_len and levels[0].output_len:
        notes.append(f"Prompts of {levels[0].input_len:,} tokens, replies of {levels[0].output_len:,}.")
    if failed := sum(level.num_failed or 0 for level in levels):
        notes.append(f"{failed:,} requests failed; only replies without an error are timed.")
    main = main_serving(results)
    source = main if main in timed else timed[0]
    return Section("waiting", title, _waiting_lead(source), tuple(parts), tuple(notes))


def _timed_levels(serving: Serving) -> list[Level]:
    return [level for level in serving.levels if level.ttft or level.itl]


def _waiting_lead(serving: Serving) -> str:
    sentences = []
    levels, file = _timed_levels(serving), serving.origin.file
    first = [(level, level.ttft) for level in levels if level.ttft]
    between = [(level, level.itl) for level in levels if level.itl]
    if first:
        level, spread = min(first, key=lambda pair: pair[1].p50)
        sentences.append(
            f"With {_load_name(level)} the first token comes after {short(spread.p50)} ms ({file})."
        )
    if between:
        level, spread = max(between, key=lambda pair: pair[0].concurrency)
        sentences.append(
            f"With {_load_name(level)} the others follow every {short(spread.p50)} ms, "
            f"99 of 100 within {short(spread.p99)} ms ({file})."
        )
    return " ".join(sentences)


def _spread_parts(slug: str, title: str, spreads: Sequence[tuple[str, Spread]]) -> list[RangeChart | Table]:
    ranges = tuple(
        Range(
            name,
            f"{short(spread.p50)} · p99 {short(spread.p99)}",
            *(max(SHORTEST_MS, getattr(spread, percentile)) for percentile in PERCENTILES),
        )
        for name, spread in spreads
    )
    rows = tuple(
        (name, *(short(getattr(spread, percentile)) for percentile in PERCENTILES))
        for name, spread in spreads
    )
    about = f"{title}: from the median to the slowest, by load."
    return [RangeChart(slug, title, about, "ms", ranges), Table(title, ("load", *PERCENTILES), rows)]


def projection_of(results: Results) -> tuple[Serving | None, list[ProjectedLevel]]:
    """From what one GPU was measured at; recounted tokens are better than the server's own count."""
    single = [
        serving
        for serving in results.serving
        if serving.source is None and (serving.hardware or "").startswith("1 x ")
    ]
    for serving in sorted(single, key=lambda each: not each.is_judged):
        if projected := project(speeds(serving)):
            return serving, projected
    return None, []


def score_section(results: Results, others: Results) -> Section | Absent:
    title = "The contest's score"
    base, projected = projection_of(results)
    measured = results.scores
    if base is None and not measured:
        levels = ", ".join(map(str, needed_levels()))
        why = (
            f"A projection needs `1 x` some GPU at {levels} requests at a time in one file; a measured score "
            "comes from `penstock eval score`."
        )
        return Absent(title, why)
    goal = next((goals.score for goals in others.goals if goals.score), None)
    marks = (Mark(goal, Role.GOAL),) if goal else ()
    bars = [Bar("Penstock, measured", each.score, short(each.score), marks=marks) for each in measured]
    if base is not None:
        total = sum(level.weighted for level in projected)
        label = f"Penstock, {NUM_GPUS} GPUs, a projection"
        bars.append(Bar(label, total, short(total), marks=marks, is_dashed=True))
    rivals = rivals_of(results.serving, others)
    for index, rival in enumerate(rivals):
        score = rival.score or weighted_sum(speeds(rival))
        role = Role.OTHER if index else Role.RIVAL
        bars.append(Bar(f"{rival.name}, {_hardware(rival)}", score, short(score), role))
    weights = ", ".join(map(str, WEIGHTS.values()))
    about = f"Tokens a second at {', '.join(map(str, WEIGHTS))} at a time, weighted {weights} and added up."
    key = f"line: the goal, {short(goal)}" if goal else ""
    chart = BarChart("score", "Weighted score", about, tuple(bars), key)
    parts: list[BarChart | Table] = [chart]
    lead = about
    notes = []
    if base is not None:
        parts.append(_projection_table(projected))
        lead = f"Projected from one GPU ({base.origin.file}), not measured on {NUM_GPUS}: {short(total)}."
        if rivals:
            baseline = rivals[0].score or weighted_sum(speeds(rivals[0]))
            lead += f" That is {short(total / baseline)} times the {short(baseline)} of {rivals[0].name}."
        notes = [
            about,
            f"The arithmetic: with a model on each of {NUM_GPUS} GPUs, c requests at a time are c/{NUM_GPUS} "
            f"on each, and below {NUM_GPUS} requests some GPUs are idle. One GPU's speed with that many "
            f"({base.origin.file}), times the GPUs at work, times the weight. A router in front is taken to "
            "cost nothing, and correctness to have passed its gate.",
        ]
        if not base.is_judged:
            notes.append(EARLY_ENDS)
    return Section("score", title, lead, tuple(parts), tuple(notes))


def _projection_table(projected: Sequence[ProjectedLevel]) -> Table:
    rows = [
        (
            str(level.concurrency),
            f"{level.num_busy} × {level.each}",
            short(level.one_gpu_tok_s),
            short(level.tok_s),
            str(level.weight),
            short(level.weighted),
        )
        for level in projected
    ]
    total = sum(level.weighted for level in projected)
    rows.append(("sum", "", "", "", "", short(total)))
    columns = ("at a time", "GPUs × each", "one GPU tok/s", "together", "weight", "weighted")
    return Table("Projection", columns, tuple(rows))
