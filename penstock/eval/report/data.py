"""Results as plain dataclasses: one class for each kind of measurement, filled from its JSON file.

A file says what it is by `bench` (`penstock bench`) or `benchmark` (`penstock eval`). A row without the
numbers it is about is left out; a file of a kind that is not drawn is named in `Results.unknown`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.eval.report.fields import Fields


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a file's numbers come from, as far as the file says."""

    file: str
    time: str | None
    commit: str | None
    version: str | None
    gpu: str | None
    cpu: str | None
    torch: str | None
    python: str | None
    model: str | None
    dtype: str | None
    random_weights: bool | None


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step or a prefill, as `penstock bench` timed it."""

    model: str | None
    batch: int
    context: int | None
    ms: float
    spread: float | None
    tok_s: float | None
    floor_ms: float | None
    of_floor: float | None


@dataclass(frozen=True, slots=True)
class Breakdown:
    """What the GPU did in a step: microseconds by kernel, longest first."""

    batch: int
    step_us: float
    busy: float | None  # share of the step in which some kernel ran
    kernel_us: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class StepBench:
    origin: Origin
    kind: str  # step, engine or prefill
    is_sampled: bool
    is_deterministic: bool
    copy_gb_per_s: float | None
    steps: tuple[Step, ...]
    breakdowns: tuple[Breakdown, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds, from the median to the slowest."""

    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Level:
    """One load on a server. `concurrency` 0 is open: at a rate, or all at once."""

    concurrency: int
    rate: float | None
    tok_s: float
    output_tok_s: float | None
    num_requests: int | None
    num_failed: int | None
    input_len: int | None
    output_len: int | None
    ttft: Spread | None
    itl: Spread | None


@dataclass(frozen=True, slots=True)
class Serving:
    """Levels of one server: `penstock bench serve`, `penstock eval throughput`, or somebody's table."""

    origin: Origin
    name: str  # of the server
    hardware: str | None
    source: str | None  # who published it; None: measured here
    is_judged: bool  # tokens counted again by `penstock eval throughput`
    score: float | None  # only where the levels do not give it
    levels: tuple[Level, ...]
    failed: tuple[int, ...]  # levels, by concurrency, of which no token came back


@dataclass(frozen=True, slots=True)
class Gate:
    name: str
    share: float
    needed: float | None
    has_passed: bool | None
    num_right: int | None
    num_asked: int | None


@dataclass(frozen=True, slots=True)
class GateRun:
    """Shares of right answers: `penstock eval gates`, `correctness` or `quality`."""

    origin: Origin
    kind: str
    source: str | None
    gates: tuple[Gate, ...]


@dataclass(frozen=True, slots=True)
class ReplyTime:
    """The time of one whole reply, as `penstock eval latency` found it."""

    num_prompt_tokens: int
    num_reply_tokens: int
    median_ms: float
    p90_ms: float | None
    published_ms: float | None
    speed_up: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    origin: Origin
    replies: tuple[ReplyTime, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """What `penstock eval score` made of correctness and throughput."""

    origin: Origin
    score: float
    baseline_score: float | None
    has_passed: bool | None


@dataclass(frozen=True, slots=True)
class OtherDecode:
    """Milliseconds a decode step of another program, by batch."""

    name: str
    model: str | None
    hardware: str | None
    how: str | None
    ms: dict[int, float]


@dataclass(frozen=True, slots=True)
class Goals:
    """What a model should reach on a GPU: milliseconds by batch, and by (batch, context) for prefill."""

    model: str | None
    gpu: str | None
    decode_ms: dict[int, float]
    prefill_ms: dict[tuple[int, int], float]
    score: float | None


@dataclass(slots=True)
class Results:
    """Everything that was found, files in the order of their names."""

    steps: list[StepBench] = field(default_factory=list)
    serving: list[Serving] = field(default_factory=list)
    gates: list[GateRun] = field(default_factory=list)
    latency: list[Latency] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    decodes: list[OtherDecode] = field(default_factory=list)
    goals: list[Goals] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def origins(self) -> list[Origin]:
        found: list[StepBench | Serving | GateRun | Latency | Score] = [*self.steps, *self.serving]
        found += [*self.gates, *self.latency, *self.scores]
        return sorted((each.origin for each in found), key=lambda origin: origin.file)


def read_all(paths: Iterable[str], flag: str) -> Results:
    """Files, and the JSON files of folders with those below them."""
    results = Results()
    for path in paths:
        for file in _json_files(Path(path).expanduser(), flag):
            _add(results, Fields.read(file), file)
    return results


def _json_files(path: Path, flag: str) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.json"))
    if path.is_file():
        return [path]
    raise PenstockError(
        f"{flag} {path} is not there",
        "It is neither a file nor a folder.",
        "Name what `penstock bench --json` or `penstock eval --output` wrote, or the folder of it.",
    )


def _add(results: Results, fields: Fields, file: Path) -> None:
    origin = _read_origin(fields, file)
    match fields.text("bench") or fields.text("benchmark"):
        case "step" | "engine" | "prefill" as kind:
            results.steps.append(_read_steps(fields, origin, kind))
        case "serve":
            results.serving.append(_read_serve(fields, origin))
        case "throughput":
            results.serving.append(_read_throughput(fields, origin))
        case "gates" | "correctness" | "quality" as kind:
            results.gates.append(GateRun(origin, kind, fields.text("source"), _read_gates(fields, kind)))
        case "latency":
            results.latency.append(Latency(origin, _read_replies(fields)))
        case "score":
            score = fields.number("score")
            if score is not None:
                against, has_passed = fields.positive("baseline_score"), fields.claim("passed")
                results.scores.append(Score(origin, score, against, has_passed))
        case "decode":
            results.decodes.append(_read_other_decode(fields, origin))
        case "goals":
            results.goals.append(_read_goals(fields))
        case _:
            results.unknown.append(file.name)


def _read_origin(fields: Fields, file: Path) -> Origin:
    return Origin(
        file=file.name,
        time=fields.text("time"),
        commit=fields.text("commit"),
        version=fields.text("version") or fields.text("penstock"),
        gpu=fields.text("gpu"),
        cpu=fields.text("cpu"),
        torch=fields.text("torch"),
        python=fields.text("python"),
        model=fields.text("model"),
        dtype=fields.text("dtype"),
        random_weights=fields.claim("random_weights"),
    )


def _read_steps(fields: Fields, origin: Origin, kind: str) -> StepBench:
    steps = []
    for row in fields.rows("rows"):
        batch, ms = row.count("batch"), row.positive("ms")
        if batch and ms:
            measured = [row.number(name) for name in ("spread", "tok_s")]
            floor = [row.positive(name) for name in ("floor_ms", "of_floor")]
            model = row.text("model") or origin.model
            steps.append(Step(model, batch, row.count("context"), ms, *measured, *floor))
    models = dict.fromkeys(step.model for step in steps if step.model)
    return StepBench(
        origin=origin if origin.model else replace(origin, model=", ".join(models) or None),
        kind=kind,
        is_sampled=bool(fields.claim("sampled")),
        is_deterministic=bool(fields.claim("deterministic")),
        copy_gb_per_s=fields.number("copy_gb_per_s"),
        steps=tuple(steps),
        breakdowns=_read_breakdowns(fields),
    )


def _read_breakdowns(fields: Fields) -> tuple[Breakdown, ...]:
    breakdowns = []
    for row in fields.rows("breakdowns"):
        batch, step_us = row.count("batch"), row.positive("step_us")
        named = [(kernel.text("name"), kernel.positive("us")) for kernel in row.rows("kernels")]
        kernels = sorted(((name, us) for name, us in named if name and us), key=lambda each: -each[1])
        if batch and step_us and kernels:
            breakdowns.append(Breakdown(batch, step_us, row.number("busy"), tuple(kernels)))
    return tuple(breakdowns)


def _read_spread(row: Fields, name: str) -> Spread | None:
    """A spread is drawn whole or not at all."""
    fields = row.fields(name)
    if fields is None:
        return None
    values = [fields.number(percentile) for percentile in ("p50", "p90", "p95", "p99", "max")]
    known = [value for value in values if value is not None]
    return Spread(*known) if len(known) == len(values) else None


def _read_serve(fields: Fields, origin: Origin) -> Serving:
    levels, failed = [], []
    for row in fields.rows("rows"):
        concurrency, tok_s = row.count("concurrency") or 0, row.number("tok_s")
        if tok_s == 0:
            failed.append(concurrency)
        elif tok_s:
            level = Level(
                concurrency=concurrency,
                rate=row.number("rate"),
                tok_s=tok_s,
                output_tok_s=row.number("output_tok_s"),
                num_requests=row.count("requests"),
                num_failed=row.count("errors"),
                input_len=row.count("input_len") or fields.count("input_len"),
                output_len=row.count("output_len") or fields.count("output_len"),
                ttft=_read_spread(row, "ttft_ms"),
                itl=_read_spread(row, "itl_ms"),
            )
            levels.append(level)
    gpu = origin.gpu
    hardware = f"{_count_replicas(fields)} x {gpu}" if gpu else fields.text("hardware")
    return Serving(origin, "Penstock", hardware, None, False, None, tuple(levels), tuple(failed))


def _count_replicas(fields: Fields) -> int:
    """Of the server that the benchmark started, by its flags: a text, or a list of words."""
    flags = fields.values.get("server_flags") or []
    words = flags.split() if isinstance(flags, str) else [str(word) for word in flags]
    for word, following in itertools.pairwise(words):
        if word == "--replicas" and following.isdecimal():
            return int(following)
        if word == "--gpus":
            return len(following.split(","))
    return 1


def _read_throughput(fields: Fields, origin: Origin) -> Serving:
    levels, failed = [], []
    for row in fields.rows("levels"):
        concurrency, tok_s = row.count("concurrency"), row.number("verified_tok_s")
        if tok_s is None:
            tok_s = row.number("tok_s")
        if concurrency and tok_s == 0:
            failed.append(concurrency)
        elif concurrency and tok_s:
            level = Level(
                concurrency=concurrency,
                rate=None,
                tok_s=tok_s,
                output_tok_s=None,
                num_requests=row.count("requests"),
                num_failed=row.count("failed"),
                input_len=fields.count("input_tokens"),
                output_len=fields.count("max_tokens"),
                ttft=_read_spread(row, "ttft_ms"),
                itl=None,
            )
            levels.append(level)
    source = fields.text("source")
    server = fields.text("label") or (fields.text("server") or "").partition(",")[0]
    name = server or (origin.file if source else "Penstock")
    return Serving(
        origin=origin,
        name=name,
        hardware=fields.text("hardware"),
        source=source,
        is_judged=source is None and fields.claim("recounted") is not False,
        score=fields.number("score"),
        levels=tuple(levels),
        failed=tuple(failed),
    )


def _read_gates(fields: Fields, kind: str) -> tuple[Gate, ...]:
    found: list[tuple[str, float | None, Fields]] = []
    if kind == "gates":
        details = fields.fields("details")
        rows = [] if details is None else list(details.named())
        found = [(name.replace("_", " "), row.number("share"), row) for name, row in rows]
    elif kind == "quality":
        found = [(row.text("task") or "task", row.number("share"), row) for row in fields.rows("tasks")]
    else:
        matches = fields.fields("exact_match")
        share = None if matches is None else matches.number("flexible")
        found = [(f"{fields.text('problems') or 'problems'}, flexible match", share, fields)]
    return tuple(
        Gate(
            name,
            share,
            row.number("threshold") or row.number("gate"),
            row.claim("passed"),
            row.count("right"),
            row.count("asked"),
        )
        for name, share, row in found
        if share is not None
    )


def _read_replies(fields: Fields) -> tuple[ReplyTime, ...]:
    replies = []
    for row in fields.rows("sizes"):
        prompt, reply = row.count("prompt_tokens"), row.count("reply_tokens")
        median = row.positive("median_ms")
        if prompt and reply and median:
            others = [row.positive(name) for name in ("p90_ms", "published_ms", "speed_up")]
            replies.append(ReplyTime(prompt, reply, median, *others))
    return tuple(replies)


def _read_other_decode(fields: Fields, origin: Origin) -> OtherDecode:
    times = {}
    for row in fields.rows("rows"):
        batch, ms, tok_s = row.count("batch"), row.positive("ms"), row.positive("tok_s")
        if batch and ms:
            times[batch] = ms
        elif batch and tok_s:
            times[batch] = 1e3 * batch / tok_s
    name = fields.text("server") or origin.file
    return OtherDecode(name, origin.model, fields.text("hardware"), fields.text("how"), times)


def _read_goals(fields: Fields) -> Goals:
    decode, prefill = {}, {}
    for row in fields.rows("decode"):
        batch, ms = row.count("batch"), row.positive("ms")
        if batch and ms:
            decode[batch] = ms
    for row in fields.rows("prefill"):
        batch, context, ms = row.count("batch"), row.count("context"), row.positive("ms")
        tok_s = row.positive("tok_s")
        if batch and context and (ms or tok_s):
            prefill[batch, context] = ms or 1e3 * batch * context / (tok_s or 1.0)
    return Goals(fields.text("model"), fields.text("gpu"), decode, prefill, fields.positive("score"))
