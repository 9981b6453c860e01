"""What the page says of answers: gates of correctness, whole replies, and where all numbers come from."""

from __future__ import annotations

from penstock.eval.report.chart import Absent, Bar, BarChart, Mark, Role, Section, Table, percent, short
from penstock.eval.report.data import Gate, GateRun, Origin, Results


def correctness_section(results: Results) -> Section | Absent:
    title = "Correctness"
    runs = [run for run in results.gates if run.gates]
    if not runs:
        why = "No file of `penstock eval gates`, `correctness` or `quality` is among the results."
        return Absent(title, why)
    bars = [_bar(gate, _prefix(run, runs)) for run in runs for gate in run.gates]
    rows = [
        (
            gate.name,
            run.origin.model or "–",
            percent(gate.share),
            percent(gate.needed) if gate.needed is not None else "reported",
            f"{gate.num_right:,} of {gate.num_asked:,}"
            if gate.num_right is not None and gate.num_asked
            else "–",
            _verdict(gate),
        )
        for run in runs
        for gate in run.gates
    ]
    lead = " ".join(filter(None, map(_gates_in_words, runs))) or "What was asked is reported, not gated."
    about = "Share of right answers by gate, beside the share that is needed."
    chart = BarChart("correctness", "Right answers", about, tuple(bars), "line: what is needed", 1.0)
    columns = ("gate", "model", "right", "needed", "counted", "")
    notes = tuple(f"{run.origin.model}, {run.kind}: {run.origin.file}." for run in runs)
    return Section("correctness", title, lead, (chart, Table("Gates", columns, tuple(rows))), notes)


def _gates_in_words(run: GateRun) -> str:
    """A sentence for each run: another run's gates are other problems, also where they have the same name."""
    verdicts = [gate.has_passed for gate in run.gates if gate.has_passed is not None]
    model = f" by {run.origin.model}" if run.origin.model else ""
    if len(verdicts) == 1:
        done = "passed" if verdicts[0] else "missed"
        return f"The gate of {run.kind} is {done}{model} ({run.origin.file})."
    if not verdicts:
        return ""
    return f"{sum(verdicts)} of {len(verdicts)} gates are passed{model} ({run.origin.file})."


def _prefix(run: GateRun, runs: list[GateRun]) -> str:
    return f"{run.kind}: " if len({each.kind for each in runs}) > 1 else ""


def _bar(gate: Gate, prefix: str) -> Bar:
    marks = (Mark(gate.needed, Role.GOAL),) if gate.needed is not None else ()
    return Bar(f"{prefix}{gate.name}", gate.share, percent(gate.share), marks=marks)


def _verdict(gate: Gate) -> str:
    return {True: "passed", False: "MISSED", None: ""}[gate.has_passed]


def replies_section(results: Results) -> Section | Absent:
    title = "Whole replies"
    found = [(latency.origin.file, reply) for latency in results.latency for reply in latency.replies]
    if not found:
        return Absent(title, "No file of `penstock eval latency` is among the results.")
    bars, rows = [], []
    for _, reply in found:
        size = f"{reply.num_prompt_tokens:,} + {reply.num_reply_tokens:,}"
        marks = (Mark(reply.published_ms, Role.RIVAL),) if reply.published_ms else ()
        bars.append(Bar(f"{size} tokens", reply.median_ms, f"{short(reply.median_ms)} ms", marks=marks))
        numbers = (reply.median_ms, reply.p90_ms, reply.published_ms, reply.speed_up)
        rows.append((size, *("–" if number is None else short(number) for number in numbers)))
    file, fastest = min(found, key=lambda pair: pair[1].median_ms)
    lead = (
        f"A reply of {fastest.num_reply_tokens:,} tokens to {fastest.num_prompt_tokens:,} takes "
        f"{short(fastest.median_ms)} ms, one client alone ({file})."
    )
    about = "Milliseconds of one whole reply to one client, by tokens of prompt and reply."
    has_marks = any(bar.marks for bar in bars)
    chart = BarChart(
        "replies", "Milliseconds of a reply", about, tuple(bars), "line: published" if has_marks else ""
    )
    columns = ("prompt + reply", "median ms", "p90 ms", "published ms", "speed-up")
    return Section("replies", title, lead, (chart, Table("One request at a time", columns, tuple(rows))))


def origin_section(results: Results) -> Section:
    """Every number has a birth certificate: this is where the page keeps them."""
    columns = ("file", "measured", "commit", "GPU", "model", "version", "torch", "Python", "CPU")
    rows = tuple(_origin_row(origin) for origin in results.origins)
    notes = []
    if any(origin.random_weights for origin in results.origins):
        notes.append(
            "Weights are random where a speed was measured: no byte and no operation is saved by that, and "
            "answers mean nothing."
        )
    if results.unknown:
        notes.append(f"In the folder and not drawn: {', '.join(results.unknown)}.")
    lead = "What was measured when, by which code, on what."
    return Section("origin", "Origin", lead, (Table("Files", columns, rows),), tuple(notes))


def _origin_row(origin: Origin) -> tuple[str, ...]:
    when = (origin.time or "–").replace("T", " ").removesuffix("+00:00")
    commit, _, more = (origin.commit or "").partition(" ")  # `a4b1c39 and changes` is `a4b1c39+`
    cells = (
        commit + ("+" if more else ""),
        origin.gpu,
        origin.model,
        origin.version,
        origin.torch,
        origin.python,
        origin.cpu,
    )
    return (origin.file, when, *(cell or "–" for cell in cells))
