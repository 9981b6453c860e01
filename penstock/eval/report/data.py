"""Result files as structs: one for each kind of measurement, decoded strictly from its JSON file.

A file names its kind in `bench` (`penstock bench`) or `benchmark` (`penstock eval`). A row without
its main numbers is dropped; a file of another kind is listed in `Results.unknown`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock.errors import PenstockError

PERCENTILES = ("p50", "p90", "p95", "p99", "max")
Count = Annotated[int, Meta(ge=0)]
Speed = Annotated[float, Meta(ge=0)]  # 0: every request failed
Positive = Annotated[float, Meta(gt=0)]  # drawn on a logarithmic axis, or divided by


class File(Struct, kw_only=True):
    """Where a file's numbers come from, as far as the file tells."""

    file: str = msgspec.field(default="", name="<file>")  # its name on disk, not in the JSON
    bench: str | None = None
    benchmark: str | None = None
    time: str | None = None
    commit: str | None = None
    version: str | None = None
    penstock: str | None = None
    gpu: str | None = None
    cpu: str | None = None
    torch: str | None = None
    python: str | None = None
    model: str | None = None
    dtype: str | None = None
    random_weights: bool | None = None
    hardware: str | None = None
    source: str | None = None  # who published it; None: measured here

    @property
    def kind(self) -> str:
        return self.bench or self.benchmark or ""


class Step(Struct):
    """A decode step or a prefill, as `penstock bench` or someone else timed it."""

    model: str | None = None
    batch: Count = 0
    context: Count | None = None
    ms: Positive | None = None
    tok_s: Positive | None = None
    floor_ms: Positive | None = None
    of_floor: Positive | None = None

    @property
    def time_ms(self) -> float:
        """0 if the row has no time; may be computed from a speed in tokens per second."""
        tokens = self.batch * (self.context or 1)
        return self.ms or (1e3 * tokens / self.tok_s if self.tok_s else 0.0)


class Kernel(Struct):
    name: str = ""
    us: Positive | None = None


class Breakdown(Struct):
    """What the GPU did in a step; `busy`: share of the step in which some kernel ran."""

    batch: Count = 0
    step_us: Positive | None = None
    busy: float | None = None
    kernels: list[Kernel] = []

    def __post_init__(self) -> None:
        named = [kernel for kernel in self.kernels if kernel.name and kernel.us]
        self.kernels = sorted(named, key=lambda kernel: -(kernel.us or 0.0))


class Steps(File, kw_only=True):
    """`penstock bench` step, engine or prefill."""

    sampled: bool | None = None
    deterministic: bool | None = None
    copy_gb_per_s: float | None = None
    rows: list[Step] = []
    breakdowns: list[Breakdown] = []

    def __post_init__(self) -> None:
        self.rows = [row for row in self.rows if row.batch and row.ms]
        for row in self.rows:
            row.model = row.model or self.model
        models = dict.fromkeys(row.model for row in self.rows if row.model)
        self.model = self.model or ", ".join(models) or None
        found = self.breakdowns
        self.breakdowns = [each for each in found if each.batch and each.step_us and each.kernels]


class Level(Struct):
    """One load on a server. `concurrency` 0 is open: at a rate, or all at once."""

    concurrency: Count = 0
    rate: float | None = None
    tok_s: Speed | None = None
    verified_tok_s: Speed | None = None
    requests: Count | None = None
    errors: Count | None = None
    failed: Count | None = None
    input_len: Count | None = None
    output_len: Count | None = None
    ttft_ms: dict[str, float | None] | None = None
    itl_ms: dict[str, float | None] | None = None

    @property
    def ttft(self) -> list[float]:
        return _whole(self.ttft_ms)

    @property
    def itl(self) -> list[float]:
        return _whole(self.itl_ms)

    @property
    def lengths(self) -> str:
        if self.input_len is None or self.output_len is None:
            return "–"
        return f"{self.input_len:,} + {self.output_len:,}"

    @property
    def load(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} at a time"
        if self.rate is not None:
            return f"{self.rate:g} a second"
        return f"{self.requests} at once" if self.requests else "all at once"


def _whole(spread: Mapping[str, float | None] | None) -> list[float]:
    """All five percentiles, or none if one is missing."""
    found = [(spread or {}).get(name) for name in PERCENTILES]
    return [] if None in found else [value for value in found if value is not None]


class Serving(File, kw_only=True):
    """`rows` of `penstock bench serve`; `levels` of `penstock eval throughput` or published."""

    rows: list[Level] = []
    levels: list[Level] = []
    server: str | None = None
    label: str | None = None
    server_flags: str | list[str] | None = None
    input_len: Count | None = None
    output_len: Count | None = None
    input_tokens: Count | None = None
    max_tokens: Count | None = None
    recounted: bool | None = None
    score: float | None = None  # only if it does not follow from the levels

    def __post_init__(self) -> None:
        is_bench = self.kind == "serve"
        self.rows = self.rows if is_bench else [each for each in self.levels if each.concurrency]
        for level in self.rows:
            if level.verified_tok_s is not None:
                level.tok_s = level.verified_tok_s
            level.input_len = level.input_len or self.input_len or self.input_tokens
            level.output_len = level.output_len or self.output_len or self.max_tokens
        self.levels = [level for level in self.rows if level.tok_s]
        if is_bench and self.gpu:
            self.hardware = f"{self._count_replicas()} x {self.gpu}"

    def _count_replicas(self) -> int:
        flags = self.server_flags or []
        for word, value in itertools.pairwise(flags.split() if isinstance(flags, str) else flags):
            if word == "--replicas" and value.isdecimal():
                return int(value)
            if word == "--gpus":
                return len(value.split(","))
        return 1

    @property
    def name(self) -> str:
        if self.kind == "serve":
            return "Penstock"
        server = self.label or (self.server or "").partition(",")[0]
        return server or (self.file if self.source else "Penstock")

    @property
    def machine(self) -> str:
        """`8 x NVIDIA H200` as `8 × H200`, with no-break spaces."""
        words = (self.hardware or "").replace("NVIDIA ", "").replace(" x ", " × ")
        return words.replace(" ", "\N{NO-BREAK SPACE}")

    @property
    def is_judged(self) -> bool:
        """Whether `penstock eval throughput` recounted the tokens."""
        return self.kind == "throughput" and self.source is None and self.recounted is not False

    @property
    def note(self) -> str:
        return ", ".join(filter(None, (self.machine, "judged" * self.is_judged))) or self.file

    @property
    def failed(self) -> list[int]:
        return [level.concurrency for level in self.rows if level.tok_s == 0]

    @property
    def closed(self) -> dict[int, Level]:
        """Levels by concurrency, without those at a rate or all at once."""
        found: dict[int, Level] = {}
        for level in self.levels:
            if level.concurrency and level.rate is None:
                found.setdefault(level.concurrency, level)
        return dict(sorted(found.items()))

    @property
    def speeds(self) -> dict[int, float]:
        return {concurrency: level.tok_s or 0.0 for concurrency, level in self.closed.items()}

    @property
    def timed(self) -> list[Level]:
        return [level for level in self.levels if level.ttft or level.itl]


class Gate(Struct):
    task: str = "task"
    share: float | None = None
    threshold: float | None = None
    gate: float | None = None
    passed: bool | None = None
    right: Count | None = None
    asked: Count | None = None

    @property
    def needed(self) -> float | None:
        return self.threshold or self.gate


class Match(Struct):
    flexible: float | None = None


class GateRun(File, kw_only=True):
    """`penstock eval` gates, correctness or quality; `gates` are those with a share."""

    details: dict[str, Gate | None] = {}
    tasks: list[Gate] = []
    problems: str | None = None
    exact_match: Match | None = None
    gate: float | None = None
    passed: bool | None = None
    right: Count | None = None
    asked: Count | None = None

    @property
    def gates(self) -> list[Gate]:
        for name, gate in self.details.items():
            if gate is not None:
                gate.task = name.replace("_", " ")
        found = [*filter(None, self.details.values()), *self.tasks]
        if self.kind == "correctness":
            share = self.exact_match.flexible if self.exact_match else None
            name = f"{self.problems or 'problems'}, flexible match"
            found = [Gate(name, share, None, self.gate, self.passed, self.right, self.asked)]
        return [gate for gate in found if gate.share is not None]


class Reply(Struct):
    """The time of one whole reply."""

    prompt_tokens: Count = 0
    reply_tokens: Count = 0
    median_ms: Positive | None = None
    p90_ms: Positive | None = None
    published_ms: Positive | None = None
    speed_up: Positive | None = None

    @property
    def size(self) -> str:
        return f"{self.prompt_tokens:,} + {self.reply_tokens:,}"


class Latency(File, kw_only=True):
    sizes: list[Reply] = []

    def __post_init__(self) -> None:
        found = self.sizes
        self.sizes = [
            each for each in found if each.prompt_tokens and each.reply_tokens and each.median_ms
        ]


class Score(File, kw_only=True):
    score: float | None = None


class OtherDecode(File, kw_only=True):
    """Decode steps of another program."""

    server: str | None = None
    how: str | None = None
    rows: list[Step] = []

    @property
    def name(self) -> str:
        return self.server or self.file

    @property
    def ms(self) -> dict[int, float]:
        return {row.batch: row.time_ms for row in self.rows if row.batch and row.time_ms}


class Goals(File, kw_only=True):
    """What a model should reach on a GPU."""

    decode: list[Step] = []
    prefill: list[Step] = []
    score: Positive | None = None


KINDS: Mapping[str, type[File]] = {
    **dict.fromkeys(("step", "engine", "prefill"), Steps),
    **dict.fromkeys(("serve", "throughput"), Serving),
    **dict.fromkeys(("gates", "correctness", "quality"), GateRun),
    "latency": Latency,
    "score": Score,
    "decode": OtherDecode,
    "goals": Goals,
}
FileType = TypeVar("FileType", bound=File)


@dataclass(slots=True)
class Results:
    """All files that were found, folder by folder, sorted by name."""

    files: list[File] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def all(self, kind: type[FileType]) -> list[FileType]:
        return [file for file in self.files if isinstance(file, kind)]

    @property
    def origins(self) -> list[File]:
        """The files with our own measurements."""
        found = [file for file in self.files if not isinstance(file, OtherDecode | Goals)]
        return sorted(found, key=lambda file: file.file)


def read_all(paths: Iterable[str], flag: str) -> Results:
    """Reads files, and all JSON files in and below folders."""
    results = Results()
    for path in paths:
        for file in _json_files(Path(path).expanduser(), flag):
            found = _read(file)
            if found is None:
                results.unknown.append(file.name)
            else:
                found.file = file.name
                results.files.append(found)
    return results


def _json_files(path: Path, flag: str) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.json"))
    if path.is_file():
        return [path]
    raise PenstockError(
        f"{flag} {path} does not exist",
        "It is neither a file nor a folder.",
        "Use a file of `penstock bench --json` or `penstock eval --output`, or its folder.",
    )


class _Named(Struct):
    bench: str | None = None
    benchmark: str | None = None


def _read(path: Path) -> File | None:
    """None for a file of a kind that the page does not show."""
    try:
        text = path.read_bytes()
        named = msgspec.json.decode(text, type=_Named)
        kind = KINDS.get(named.bench or named.benchmark or "")
        return msgspec.json.decode(text, type=kind) if kind else None
    except (OSError, UnicodeError, msgspec.MsgspecError) as error:
        raise PenstockError(
            f"{path} is not a result file",
            f"{type(error).__name__}: {error}.",
            "Measure it again, or move it out of the folder.",
        ) from error
