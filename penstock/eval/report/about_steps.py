"""What the page says of single steps: decode beside floor, goal and others, roofline, prefill, kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.eval.report.chart import (
    Absent,
    Bar,
    BarChart,
    LineChart,
    Mark,
    Role,
    Section,
    Series,
    Table,
    percent,
    short,
)
from penstock.eval.report.data import Breakdown, Goals, OtherDecode, Results, Step, StepBench

MAX_KERNELS = 6


def same_model(one: str | None, other: str | None) -> bool:
    """`Qwen/Qwen3.5-4B` is the model that a folder `Qwen3.5-4B` holds."""
    return bool(one and other) and (one or "").split("/")[-1] == (other or "").split("/")[-1]


@dataclass(frozen=True, slots=True)
class MainDecode:
    """What the charts are about: the greedy steps of one model at one context, by batch."""

    bench: StepBench
    model: str | None
    context: int | None
    steps: tuple[Step, ...]


def main_decode(results: Results) -> MainDecode | None:
    """Of all runs the one with the most batch sizes."""
    found = []
    for bench in results.steps:
        if bench.kind == "step" and not bench.is_sampled and not bench.is_deterministic:
            for model, context in dict.fromkeys((step.model, step.context) for step in bench.steps):
                steps = [step for step in bench.steps if (step.model, step.context) == (model, context)]
                by_batch = tuple(sorted(steps, key=lambda step: step.batch))
                found.append(MainDecode(bench, model, context, by_batch))
    return max(found, key=lambda decode: len(decode.steps), default=None)


def goals_for(model: str | None, gpu: str | None, others: Results) -> Goals | None:
    fitting = (goals for goals in others.goals if same_model(goals.model, model) and goals.gpu == gpu)
    return next(fitting, None)


def decode_section(results: Results, others: Results) -> Section | Absent:
    title = "Decode"
    main = main_decode(results)
    if main is None:
        return Absent(title, "No file of `penstock bench step` has a greedy step.")
    bench, steps = main.bench, main.steps
    goals = goals_for(main.model, bench.origin.gpu, others)
    goal_ms = goals.decode_ms if goals else {}
    rivals = [other for other in others.decodes if same_model(other.model, main.model) and other.ms]
    first, last = steps[0], steps[-1]
    about = (
        f"Milliseconds of one decode step by batch. {short(first.ms)} ms at batch {first.batch}, "
        f"{short(last.ms)} ms at batch {last.batch}."
    )
    series = _decode_series(steps, goal_ms) + [_rival_series(rival.name, rival.ms) for rival in rivals]
    chart = LineChart(
        "decode",
        "A decode step by batch",
        about,
        "requests in the step",
        "ms, lower is better",
        tuple(series),
    )
    tables = [_decode_table(main, goal_ms), *_rival_tables(rivals), *_other_runs(results, main)]
    met = [step for step in steps if step.batch in goal_ms and step.ms <= goal_ms[step.batch]]
    verdict = f" The goal is met at {len(met)} of {len(goal_ms)} batch sizes." if goal_ms else ""
    lead = (
        f"One request gets a token every {short(first.ms)} ms; {last.batch} together take "
        f"{short(last.ms)} ms a step ({bench.origin.file}).{verdict}"
    )
    if len(steps) == 1:
        lead = f"A step of {first.batch} takes {short(first.ms)} ms ({bench.origin.file}).{verdict}"
    copy = f" ({short(bench.copy_gb_per_s)} GB/s)" if bench.copy_gb_per_s else ""
    floor = (
        f"The floor is the fewest bytes a step can move, at the speed of a large copy in the same run{copy}."
    )
    notes = [f"{rival.name} ({rival.hardware}): {rival.how}." for rival in rivals if rival.how]
    return Section("decode", title, lead, (chart, *tables), (floor, *notes))


def _decode_table(main: MainDecode, goal_ms: dict[int, float]) -> Table:
    columns = ["batch", "ms", "floor ms", *(["goal ms"] if goal_ms else []), "of floor", "tok/s"]
    rows = [
        (
            str(step.batch),
            short(step.ms),
            _or_dash(step.floor_ms),
            *([_or_dash(goal_ms.get(step.batch))] if goal_ms else []),
            percent(step.of_floor) if step.of_floor else "–",
            _or_dash(step.tok_s),
        )
        for step in main.steps
    ]
    context = f", {main.context:,} tokens of context" if main.context else ""
    caption = f"Greedy steps{context}, median of repeats ({main.bench.origin.file})"
    return Table(caption, tuple(columns), tuple(rows))


def _decode_series(steps: Sequence[Step], goal_ms: dict[int, float]) -> list[Series]:
    found = [Series("Penstock", "", tuple((step.batch, step.ms) for step in steps), Role.OURS)]
    floor = tuple((float(step.batch), step.floor_ms) for step in steps if step.floor_ms)
    goal = tuple((float(step.batch), goal_ms[step.batch]) for step in steps if step.batch in goal_ms)
    if goal:
        found.insert(0, Series("goal", "", goal, Role.GOAL))
    if floor:
        found.insert(0, Series("memory's floor", "", floor, Role.BOUND))
    return found


def _rival_series(name: str, times: dict[int, float]) -> Series:
    return Series(name, "", tuple(sorted((float(batch), ms) for batch, ms in times.items())), Role.OTHER)


def _rival_tables(rivals: Sequence[OtherDecode]) -> list[Table]:
    if not rivals:
        return []
    batches = sorted({batch for rival in rivals for batch in rival.ms})
    rows = [
        (str(batch), *(short(rival.ms[batch]) if batch in rival.ms else "–" for rival in rivals))
        for batch in batches
    ]
    return [Table("Others, ms a step", ("batch", *(rival.name for rival in rivals)), tuple(rows))]


def _other_runs(results: Results, main: MainDecode) -> list[Table]:
    rows = []
    for bench in results.steps:
        shown = main.steps if bench is main.bench else ()
        for step in bench.steps:
            if bench.kind == "prefill" or step in shown:
                continue
            model = "" if step.model == main.model else f"{step.model or 'another model'}, "
            row = (
                model + _kind_in_words(bench),
                str(step.batch),
                f"{step.context:,}" if step.context is not None else "–",
                short(step.ms),
                _or_dash(step.floor_ms),
                percent(step.of_floor) if step.of_floor else "–",
            )
            rows.append(row)
    columns = ("step", "batch", "context", "ms", "floor ms", "of floor")
    return [Table("Other decode runs", columns, tuple(rows))] if rows else []


def _kind_in_words(bench: StepBench) -> str:
    if bench.kind == "engine":
        return "through the engine"
    return "deterministic" if bench.is_deterministic else "sampled" if bench.is_sampled else "greedy"


def roofline_section(results: Results) -> Section | Absent:
    title = "Share of the roofline"
    main = main_decode(results)
    steps = [step for step in main.steps if step.of_floor] if main else []
    if main is None or not steps:
        return Absent(title, "No greedy step of `penstock bench step` has `of_floor`.")
    best = max(steps, key=lambda step: step.of_floor or 0.0)
    bars = tuple(
        Bar(f"batch {step.batch}", step.of_floor or 0.0, percent(step.of_floor or 0.0)) for step in steps
    )
    about = "Floor over measured time of a decode step: 100 % would move no byte twice and wait for nothing."
    chart = BarChart(
        "roofline", "Share of the memory's speed that a step uses", about, bars, "full width: the floor", 1.0
    )
    share, file = percent(best.of_floor or 0.0), main.bench.origin.file
    lead = f"At batch {best.batch} a step runs at {share} of what the memory allows ({file})."
    return Section("roofline", title, lead, (chart,))


def prefill_section(results: Results, others: Results) -> Section | Absent:
    title = "Prefill"
    benches = [bench for bench in results.steps if bench.kind == "prefill"]
    pairs = [(bench, step) for bench in benches for step in bench.steps if step.tok_s and step.context]
    if not pairs:
        return Absent(title, "No file of `penstock bench prefill` has a row.")
    bars, rows = [], []
    for bench, step in pairs:
        goals = goals_for(step.model, bench.origin.gpu, others)
        goal_ms = goals.prefill_ms.get((step.batch, step.context or 0)) if goals else None
        marks = [Mark(1e3 * step.batch * (step.context or 0) / goal_ms, Role.GOAL)] if goal_ms else []
        prompts = f"{step.batch} × {step.context:,}"
        bars.append(Bar(prompts, step.tok_s or 0.0, f"{short(step.tok_s or 0.0)} tok/s", marks=tuple(marks)))
        share = percent(step.of_floor) if step.of_floor else "–"
        row = (
            prompts,
            short(step.ms),
            _or_dash(goal_ms),
            _or_dash(step.floor_ms),
            share,
            _or_dash(step.tok_s),
        )
        rows.append(row)
    source, fastest = max(pairs, key=lambda pair: pair[1].tok_s or 0.0)
    about = "Prompt tokens a second by number and length of the prompts in one pass."
    has_goals = any(bar.marks for bar in bars)
    chart = BarChart(
        "prefill", "Prompt tokens a second", about, tuple(bars), "line: the goal" if has_goals else ""
    )
    columns = ("prompts", "ms", "goal ms", "floor ms", "of floor", "tok/s")
    files = ", ".join(bench.origin.file for bench in benches)
    lead = (
        f"{fastest.batch} × {fastest.context:,} tokens go through at {short(fastest.tok_s or 0.0)} "
        f"tokens a second ({source.origin.file})."
    )
    return Section("prefill", title, lead, (chart, Table(f"Whole passes ({files})", columns, tuple(rows))))


def kernels_section(results: Results) -> Section | Absent:
    title = "Inside a step"
    found = [breakdown for bench in results.steps for breakdown in bench.breakdowns]
    if not found:
        return Absent(title, "No file of `penstock bench engine` has a breakdown by kernel.")
    lead = " ".join(filter(None, map(_busy_in_words, results.steps))) or "What the GPU does in a step."
    return Section(
        "kernels",
        title,
        lead,
        tuple(_kernel_chart(each) for each in found),
        (
            "Microseconds a step by kernel; kernels overlap where one may start before its predecessor has "
            "ended, so they may add up to more than the step.",
        ),
    )


def _busy_in_words(bench: StepBench) -> str:
    shares = [
        f"{percent(each.busy)} of the time at batch {each.batch}"
        for each in bench.breakdowns
        if each.busy is not None
    ]
    return f"The GPU is at work {' and '.join(shares)} ({bench.origin.file})." if shares else ""


def _kernel_chart(breakdown: Breakdown) -> BarChart:
    named = [
        (name.strip("_").removesuffix("_kernel").replace("_", " "), us) for name, us in breakdown.kernel_us
    ]
    shown, rest = named[:MAX_KERNELS], named[MAX_KERNELS:]
    bars = [Bar(name, us, f"{short(us)} µs") for name, us in shown]
    if rest:
        total = sum(us for _, us in rest)
        bars.append(Bar(f"{len(rest)} others", total, f"{short(total)} µs", Role.OTHER))
    step = f"{short(breakdown.step_us)} µs"
    return BarChart(
        f"kernels-{breakdown.batch}",
        f"Batch {breakdown.batch}: kernels of a step of {step}",
        f"Microseconds by kernel in a decode step of {step} at batch {breakdown.batch}.",
        tuple(bars),
    )


def _or_dash(number: float | None) -> str:
    return "–" if number is None else short(number)
