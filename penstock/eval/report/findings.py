"""Computes the page's content from results: which run is drawn, beside which others, and how.

A section is a mapping for its part of page.html, empty if its numbers are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.eval.report.charts import Bar, BarChart, LineChart, RangeChart, Series, percent, short
from penstock.eval.report.data import (
    Breakdown,
    GateRun,
    Goals,
    Latency,
    Level,
    OtherDecode,
    Results,
    Score,
    Serving,
    Step,
    Steps,
)
from penstock.eval.score import WEIGHTS, weighted_sum

NUM_GPUS = 8
NEEDED_LEVELS = sorted({max(1, concurrency // NUM_GPUS) for concurrency in WEIGHTS})
MAX_KERNELS = 6
Section = dict[str, Any]


def find(results: Results, others: Results) -> dict[str, Any]:
    server, (base, projected) = main_serving(results), projection_of(results)
    decode = main_decode(results)
    return {
        "results": results,
        "origins": results.origins,
        "models": _models(results, decode),
        "server": server,
        "busiest": max(server.closed.values(), key=_speed) if server else None,
        "soonest": _soonest(list(server.closed.values())) if server else None,
        "base": base,
        "projected": projected,
        "total": sum(level.weighted for level in projected),
        "num_gpus": NUM_GPUS,
        "needed_levels": NEEDED_LEVELS,
        "throughput": throughput(results, others),
        "score": score(results, others),
        "decode": decode_steps(results, others),
        "roofline": roofline(results),
        "waiting": waiting(results),
        "prefill": prefill(results, others),
        "kernels": kernels(results),
        "replies": replies(results),
        "correctness": correctness(results),
    }


def same_model(one: str | None, other: str | None) -> bool:
    """`Qwen/Qwen3.5-4B` is the model that a folder `Qwen3.5-4B` holds."""
    return bool(one and other) and (one or "").split("/")[-1] == (other or "").split("/")[-1]


def _models(results: Results, decode: MainDecode | None) -> list[str]:
    drawn = [decode.model if decode else None, *(each.model for each in results.all(Serving))]
    models = drawn if any(drawn) else [each.model for each in results.origins]
    return [model for model in dict.fromkeys(models) if model]


# Servers: throughput, the contest's score and its projection, waiting times.


@dataclass(frozen=True, slots=True)
class ProjectedLevel:
    """`num_busy` replicas with `each` concurrent requests, at one GPU's speed with as many."""

    concurrency: int
    weight: int
    num_busy: int
    each: int
    one_gpu_tok_s: float

    @property
    def tok_s(self) -> float:
        return self.num_busy * self.one_gpu_tok_s

    @property
    def weighted(self) -> float:
        return self.weight * self.tok_s


def project(one_gpu: dict[int, float]) -> list[ProjectedLevel]:
    """The contest's levels on eight GPUs, by arithmetic; empty if one GPU misses a level.

    Replicas share nothing: c concurrent requests put c/N on each of N GPUs, and fewer requests than
    GPUs leave some idle. The router is assumed to cost nothing.
    """
    if any(level not in one_gpu for level in NEEDED_LEVELS):
        return []
    each = {concurrency: max(1, concurrency // NUM_GPUS) for concurrency in WEIGHTS}
    return [
        ProjectedLevel(c, weight, min(c, NUM_GPUS), each[c], one_gpu[each[c]])
        for c, weight in WEIGHTS.items()
    ]


def projection_of(results: Results) -> tuple[Serving | None, list[ProjectedLevel]]:
    """From a run on one GPU; recounted tokens are better than the server's own count."""
    single = [
        serving
        for serving in results.all(Serving)
        if serving.source is None and (serving.hardware or "").startswith("1 x ")
    ]
    for serving in sorted(single, key=lambda each: not each.is_judged):
        if projected := project(serving.speeds):
            return serving, projected
    return None, []


def main_serving(results: Results) -> Serving | None:
    """The run that all sentences about a server use, the score included."""
    base, _ = projection_of(results)
    return base or next((serving for serving in results.all(Serving) if serving.speeds), None)


def rivals_of(results: Results, others: Results) -> list[Serving]:
    """Published servers of the same model, the one with the most levels first."""
    models = [serving.model for serving in results.all(Serving)]
    fitting = [
        other
        for other in others.all(Serving)
        if other.speeds and any(same_model(other.model, model) for model in models)
    ]
    return sorted(fitting, key=lambda other: -len(other.levels))


def _speed(level: Level) -> float:
    return level.tok_s or 0.0


def _soonest(levels: Sequence[Level]) -> Level | None:
    timed = [level for level in levels if level.ttft]
    return min(timed, key=lambda level: level.ttft[0], default=None)


def throughput(results: Results, others: Results) -> Section:
    ours = [serving for serving in results.all(Serving) if serving.speeds]
    if not ours:
        return {}
    rivals = rivals_of(results, others)
    roles = {id(rival): "other" if index else "rival" for index, rival in enumerate(rivals)}
    series = [
        Series(each.name, each.note, tuple(each.speeds.items()), roles.get(id(each), "ours"))
        for each in (*rivals, *ours)
    ]
    base, projected = projection_of(results)
    if base:
        points = tuple((level.concurrency, level.tok_s) for level in projected)
        series.append(Series(base.name, f"{NUM_GPUS} GPUs, projected", points, "ours", True))
    ends = [(each.label, each.points[-1]) for each in series]
    about = "; ".join(
        f"{label}: {short(y)} tokens a second with {x:g} at a time" for label, (x, y) in ends
    )
    title, y_label = "Throughput by requests at a time", "tokens a second, prompts and replies"
    chart = LineChart("throughput", title, about, "requests at a time", y_label, tuple(series))
    order = sorted(series, key=lambda each: each.role != "ours")
    lengths = {c: level.lengths for serving in ours for c, level in serving.closed.items()}
    rows = [
        [f"{x:g}", *(short(dict(each.points).get(x)) for each in order), lengths.get(int(x), "–")]
        for x in chart.x_values
    ]
    columns = ["at a time", *(each.label for each in order), "our tokens"]
    has_lengths = any(level.output_len for serving in ours for level in serving.levels)
    found = {"ours": ours, "rivals": rivals, "early_ends": bool(rivals) and has_lengths}
    return {"chart": chart, "columns": columns, "rows": rows, **found}


def score(results: Results, others: Results) -> Section:
    base, projected = projection_of(results)
    measured = [each.score for each in results.all(Score) if each.score is not None]
    if base is None and not measured:
        return {}
    goal = next((goals.score for goals in others.all(Goals) if goals.score), None)
    bars = [Bar("Penstock, measured", each, short(each), mark=goal) for each in measured]
    if base:
        total = sum(level.weighted for level in projected)
        label = f"Penstock, {NUM_GPUS} GPUs, a projection"
        bars.append(Bar(label, total, short(total), mark=goal, is_dashed=True))
    rivals = rivals_of(results, others)
    scores = [rival.score or weighted_sum(rival.speeds) for rival in rivals]
    for index, (rival, each) in enumerate(zip(rivals, scores)):
        role = "other" if index else "rival"
        bars.append(Bar(f"{rival.name}, {rival.machine}", each, short(each), role))
    levels, weights = (", ".join(map(str, each)) for each in (WEIGHTS, WEIGHTS.values()))
    about = f"Tokens per second at {levels} concurrent requests, weighted {weights} and summed."
    key = f"line: the goal, {short(goal)}" if goal else ""
    chart = BarChart("score", "Weighted score", about, tuple(bars), key)
    return {"chart": chart, "rivals": list(zip(rivals, scores))}


def waiting(results: Results) -> Section:
    runs = [serving for serving in results.all(Serving) if serving.timed]
    if not runs:
        return {}
    main = main_serving(results)
    source = main if main in runs else runs[0]
    levels = [level for run in runs for level in run.timed]
    names = [level.load for level in levels]
    if len({level.lengths for level in levels}) > 1:
        names = [f"{name}, {level.lengths}" for name, level in zip(names, levels)]
    if len({run.file for run in runs}) > 1:
        files = [run.file for run in runs for _ in run.timed]
        names = [f"{name}, {file}" for name, file in zip(names, files)]
    charts = [
        _range_chart("ttft", "Time to first token, ms", names, [level.ttft for level in levels]),
        _range_chart("itl", "Inter-token latency, ms", names, [level.itl for level in levels]),
    ]
    return {
        "charts": [chart for chart in charts if chart.ranges],
        "file": source.file,
        "first": _soonest(source.timed),
        "between": max(
            (level for level in source.timed if level.itl),
            key=lambda each: each.concurrency,
            default=None,
        ),
        "lengths": levels[0] if len({level.lengths for level in levels}) == 1 else None,
        "num_failed": sum(level.errors or level.failed or 0 for level in levels),
    }


def _range_chart(slug: str, title: str, names: list[str], spreads: list[list[float]]) -> RangeChart:
    ranges = tuple((name, spread) for name, spread in zip(names, spreads) if spread)
    return RangeChart(slug, title, f"{title}: from the median to the slowest, by load.", ranges)


# Single steps: decode beside floor, goal and others, prefill, kernels.


@dataclass(frozen=True, slots=True)
class MainDecode:
    """The greedy steps of one model at one context, by batch."""

    bench: Steps
    model: str | None
    context: int | None
    steps: list[Step]


def main_decode(results: Results) -> MainDecode | None:
    """The run with the most batch sizes."""
    found = []
    for bench in results.all(Steps):
        if bench.kind == "step" and not bench.sampled and not bench.deterministic:
            for model, context in dict.fromkeys((step.model, step.context) for step in bench.rows):
                steps = [
                    step for step in bench.rows if (step.model, step.context) == (model, context)
                ]
                found.append(
                    MainDecode(bench, model, context, sorted(steps, key=lambda each: each.batch))
                )
    return max(found, key=lambda decode: len(decode.steps), default=None)


def _goals(model: str | None, gpu: str | None, others: Results) -> Goals:
    fitting = (
        each for each in others.all(Goals) if same_model(each.model, model) and each.gpu == gpu
    )
    return next(fitting, Goals())


def decode_steps(results: Results, others: Results) -> Section:
    main = main_decode(results)
    if main is None:
        return {}
    steps, first, last = main.steps, main.steps[0], main.steps[-1]
    goals = {
        goal.batch: goal.ms for goal in _goals(main.model, main.bench.gpu, others).decode if goal.ms
    }
    rivals = [
        each for each in others.all(OtherDecode) if same_model(each.model, main.model) and each.ms
    ]
    lines = {
        ("memory's floor", "bound"): [
            (step.batch, step.floor_ms) for step in steps if step.floor_ms
        ],
        ("goal", "goal"): [
            (step.batch, goals[step.batch]) for step in steps if step.batch in goals
        ],
        ("Penstock", "ours"): [(step.batch, step.ms or 0.0) for step in steps],
    }
    series = [
        Series(name, "", tuple(points), role) for (name, role), points in lines.items() if points
    ]
    series += [Series(rival.name, "", tuple(sorted(rival.ms.items())), "other") for rival in rivals]
    about = (
        f"Milliseconds of one decode step by batch. {short(first.ms)} ms at batch {first.batch}, "
        f"{short(last.ms)} ms at batch {last.batch}."
    )
    x_label, y_label = "requests in the step", "ms, lower is better"
    return {
        "chart": LineChart(
            "decode", "A decode step by batch", about, x_label, y_label, tuple(series)
        ),
        "main": main,
        "goals": goals,
        "num_met": sum((step.ms or 0.0) <= goals.get(step.batch, 0.0) for step in steps),
        "rivals": rivals,
        "columns": ["batch", *(rival.name for rival in rivals)],
        "rows": [
            [batch, *(short(rival.ms.get(batch)) for rival in rivals)]
            for batch in sorted({batch for rival in rivals for batch in rival.ms})
        ],
        "others": [
            (bench, step)
            for bench in results.all(Steps)
            for step in bench.rows
            if bench.kind != "prefill" and not any(step is shown for shown in steps)
        ],
    }


def roofline(results: Results) -> Section:
    main = main_decode(results)
    steps = [(step, step.of_floor) for step in main.steps if step.of_floor] if main else []
    if main is None or not steps:
        return {}
    bars = tuple(Bar(f"batch {step.batch}", share, percent(share)) for step, share in steps)
    title = "Share of the memory's speed that a step uses"
    about = "Floor over measured time of a decode step: 100 % moves no byte twice and never waits."
    chart = BarChart("roofline", title, about, bars, "full width: the floor", 1.0)
    best, _ = max(steps, key=lambda pair: pair[1])
    return {"chart": chart, "best": best, "file": main.bench.file}


def prefill(results: Results, others: Results) -> Section:
    benches = [bench for bench in results.all(Steps) if bench.kind == "prefill"]
    rows, bars = [], []
    for bench in benches:
        for step in bench.rows:
            if step.tok_s and step.context:
                goals = _goals(step.model, bench.gpu, others).prefill
                same = [
                    each
                    for each in goals
                    if (each.batch, each.context) == (step.batch, step.context)
                ]
                goal_ms = next((goal.time_ms for goal in same if goal.time_ms), None)
                mark = 1e3 * step.batch * step.context / goal_ms if goal_ms else None
                label = f"{step.batch} × {step.context:,}"
                bars.append(Bar(label, step.tok_s, f"{short(step.tok_s)} tok/s", mark=mark))
                rows.append((label, step, goal_ms, bench.file))
    if not rows:
        return {}
    key = "line: the goal" if any(bar.mark for bar in bars) else ""
    about = "Prompt tokens a second by number and length of the prompts in one pass."
    chart = BarChart("prefill", "Prompt tokens a second", about, tuple(bars), key)
    fastest = max(rows, key=lambda row: row[1].tok_s or 0.0)
    return {
        "chart": chart,
        "rows": rows,
        "fastest": fastest,
        "files": [each.file for each in benches],
    }


def kernels(results: Results) -> Section:
    benches = [bench for bench in results.all(Steps) if bench.breakdowns]
    found = [breakdown for bench in benches for breakdown in bench.breakdowns]
    charts: dict[str, BarChart] = {}
    for each in found:
        slug = f"kernels-{each.batch}"
        slug += f"-{len(charts) + 1}" if slug in charts else ""  # another file has this batch
        charts[slug] = _kernel_chart(slug, each)
    return {"charts": list(charts.values()), "benches": benches} if found else {}


def _kernel_chart(slug: str, breakdown: Breakdown) -> BarChart:
    shown, rest = breakdown.kernels[:MAX_KERNELS], breakdown.kernels[MAX_KERNELS:]
    names = [each.name.strip("_").removesuffix("_kernel").replace("_", " ") for each in shown]
    bars = [Bar(name, each.us or 0.0, f"{short(each.us)} µs") for name, each in zip(names, shown)]
    if rest:
        total = sum(each.us or 0.0 for each in rest)
        bars.append(Bar(f"{len(rest)} others", total, f"{short(total)} µs", "other"))
    batch, step = breakdown.batch, f"a step of {short(breakdown.step_us)} µs"
    about = f"Microseconds by kernel in {step} at batch {batch}."
    return BarChart(slug, f"Batch {batch}: kernels of {step}", about, tuple(bars))


# Answers: whole replies, and gates of correctness.


def replies(results: Results) -> Section:
    found = [(reply, run.file) for run in results.all(Latency) for reply in run.sizes]
    if not found:
        return {}
    bars = tuple(
        Bar(f"{reply.size} tokens", ms, f"{short(ms)} ms", mark=reply.published_ms)
        for reply, _ in found
        if (ms := reply.median_ms)
    )
    key = "line: published" if any(bar.mark for bar in bars) else ""
    about = "Milliseconds of one whole reply to one client, by tokens of prompt and reply."
    chart = BarChart("replies", "Milliseconds of a reply", about, bars, key, mark_role="rival")
    return {
        "chart": chart,
        "found": found,
        "fastest": min(found, key=lambda pair: pair[0].median_ms or 0.0),
    }


def correctness(results: Results) -> Section:
    runs = [run for run in results.all(GateRun) if run.gates]
    if not runs:
        return {}
    has_kinds = len({run.kind for run in runs}) > 1
    bars = tuple(
        Bar(
            f"{run.kind}: {gate.task}" if has_kinds else gate.task,
            share,
            percent(share),
            mark=gate.needed,
        )
        for run in runs
        for gate in run.gates
        if (share := gate.share) is not None
    )
    about = "Share of right answers by gate, beside the share that is needed."
    chart = BarChart("correctness", "Right answers", about, bars, "line: what is needed", 1.0)
    verdicts = [[gate.passed for gate in run.gates if gate.passed is not None] for run in runs]
    return {"chart": chart, "runs": runs, "verdicts": list(zip(runs, verdicts))}
