"""Measures the performance goals of one H200, and says which are met.

    python scripts/measure_goals.py OUT [--only drafts,prefill] [--seconds 1400] [--tokenizer DIR]

Benchmarks run one after the other, each in its own process, so that a failure does not affect the
others. One that would not end within `--seconds` is skipped. After each, OUT has goals.json and
copies of the tables of results/h200 with the new rows, each with its commit; OUT may be
results/h200 itself. Run scripts/gpu_tests.py first: a fast kernel may be a wrong one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.commands.provenance import gpu_name, provenance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/h200"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound for one number: the best of all rows that have these fields."""

    fields: Mapping[str, Any]
    name: str  # of the number
    limit: float
    is_least: bool = False  # the number should be at least the limit; otherwise, at most

    def best(self, rows: list[Row]) -> float | None:
        found = [row[self.name] for row in rows if self.fields.items() <= row.items()]
        numbers = [number for number in found if number is not None]
        return (max if self.is_least else min)(numbers, default=None)

    def judge(self, rows: list[Row]) -> Row:
        best = self.best(rows)
        is_met = best is not None and (best >= self.limit if self.is_least else best <= self.limit)
        which = " ".join(f"{name} {value}" for name, value in self.fields.items())
        sign = ">=" if self.is_least else "<="
        return {"goal": f"{which}: {self.name} {sign} {self.limit}", "best": best, "is_met": is_met}


@dataclass(frozen=True, slots=True)
class Table:
    """Where rows are kept: a file of results/h200, or a part of one."""

    file: str
    keys: tuple[str, ...]  # a new row replaces the one with the same values
    part: str | None = None
    shared: Mapping[str, str] = field(default_factory=dict)  # from a report: its names by the rows'

    def put(self, folder: Path, rows: list[Row]) -> None:
        path = folder / self.file
        source = path if path.exists() else RESULTS / self.file
        values = json.loads(source.read_text())
        table = values if self.part is None else values[self.part]
        new = {self._key(row): row for row in rows}
        kept = [new.pop(self._key(row), row) for row in table["rows"]]
        table["rows"] = [*kept, *new.values()]
        path.write_text(json.dumps(values, indent=1) + "\n")

    def _key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in self.keys)


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    flags: str  # of `penstock bench`
    seconds: float  # that it takes, from its start
    goals: tuple[Goal, ...]
    table: Table
    fields: Row = field(default_factory=dict)  # that rows get besides their own
    before: str = ""  # a script and its arguments

    def run(self, tokenizer: Path | None) -> list[Row]:
        if self.before:
            subprocess.run([sys.executable, *shlex.split(self.before)], cwd=ROOT, check=True)
        words = shlex.split(self.flags)
        if tokenizer is not None and words[0] == "serve":
            words += ["--tokenizer", str(tokenizer)]
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", "penstock", "bench", *words, "--json", file.name]
            subprocess.run(command, cwd=ROOT, check=True)
            found: Row = json.loads(Path(file.name).read_text())
        own = {**self.fields, **{ours: found[name] for ours, name in self.table.shared.items()}}
        if tokenizer is not None and words[0] == "serve":
            own["tokenizer"] = tokenizer.name
        return [{**row, **own} for row in found["rows"]]


STEPS = Table("quantized.json", ("model", "scheme", "batch", "context"))
PREFILLS = Table("quantized.json", ("model", "scheme", "batch", "context"), "prefill")
SERVED = Table("quantized.json", ("model", "scheme", "requests", "flags", "commit"), "served")
DRAFTS = Table("latency.json", ("model", "scheme", "batch", "context", "drafts"))
SHARES = Table("parallel.json", ("model", "scheme", "tp", "batch", "context"))
ENGINE = ("layers", "slots", "experts", "gpu_gb")
SPEEDS = {"copy": "copy", "fetch": "fetch", "compute": "compute", "disk": "read"}
OFFLOADED = Table(
    "offload.json",
    ("case",),
    shared={
        **{name: name for name in ENGINE},
        **{f"{ours}_gb_per_s": f"{name}_gb_per_s" for ours, name in SPEEDS.items()},
    },
)

A3B, SMALL, HUGE = "Qwen3.5-35B-A3B", "Qwen3.5-4B", "Qwen3.5-397B-A17B"
A3B_6GB = "35B-A3B int4 6GB batch 1"
A10B_24GB, A10B_24GB_8 = "122B-A10B int4 24GB batch 1", "122B-A10B int4 24GB batch 8"
A17B_RAM = "397B-A17B int4 RAM projected"
A17B_DISK = "397B-A17B int4 64GB RAM + disk projected"
GGUF = "/dev/shm/penstock-goals.gguf"
ALL_BATCHES = (1, 2, 4, 8, 16, 32, 64)
ACCEPTANCE = "--acceptance 0.85,0.75,0.65"


def steps(model: str, scheme: str, limits: dict[int, float], seconds: float) -> Benchmark:
    batches = ",".join(map(str, limits))
    return Benchmark(
        f"steps {model} {scheme}",
        f"step -m {model} --random-weights --quantization {scheme} --context 1536 "
        f"--batch {batches}",
        seconds,
        tuple(Goal({"batch": batch}, "ms", limit) for batch, limit in limits.items()),
        STEPS,
        {"model": model, "scheme": scheme},
    )


def drafts(model: str, scheme: str, limit: float, seconds: float) -> Benchmark:
    quantization = "none" if scheme == "bf16" else scheme
    return Benchmark(
        f"drafts {model} {scheme}",
        f"step -m {model} --random-weights --quantization {quantization} --context 1536 --batch 1 "
        f"--drafts 1,2,3 {ACCEPTANCE}",
        seconds,
        (Goal({"batch": 1}, "ms_per_token", limit), Goal({"batch": 1}, "ms_per_draft", 0.30)),
        DRAFTS,
    )


def served(requests: int, lengths: tuple[int, int], flags: str, goal: Goal) -> Benchmark:
    return Benchmark(
        f"served {requests}",
        f"serve -m {A3B} --random-weights --quantization fp8 --concurrency 0 --requests {requests} "
        f"--input-len {lengths[0]} --output-len {lengths[1]} --max-queue 2000 {flags}",
        100,
        (goal,),
        SERVED,
        {
            "model": A3B,
            "scheme": "fp8",
            "input_len": lengths[0],
            "output_len": lengths[1],
            "flags": flags,
        },
    )


def share(model: str, limit: float) -> Benchmark:
    return Benchmark(
        f"ranks {model}",
        f"step -m {model} --random-weights --tp 8 --context 1536 --batch 1",
        60,
        (Goal({"batch": 1}, "projected_ms", limit),),
        SHARES,
        {"model": model, "scheme": "bf16", "goal_ms": limit},
    )


def offloaded(cases: tuple[str, ...], seconds: float, *goals: Goal) -> Benchmark:
    flags = " ".join(f"--case {shlex.quote(case)}" for case in cases)
    return Benchmark(f"offload {cases[0]}", f"offload {flags}", seconds, goals, OFFLOADED)


def speed(case: str, limit: float, name: str = "tok_s") -> Goal:
    return Goal({"case": case}, name, limit, is_least=True)


BENCHMARKS = [
    drafts(A3B, "int4", 0.72, 70),
    drafts(A3B, "fp8", 0.90, 70),
    drafts(A3B, "bf16", 1.45, 70),
    drafts(SMALL, "int4", 0.55, 50),
    drafts(SMALL, "bf16", 1.1, 50),
    steps(A3B, "int4", dict(zip(ALL_BATCHES, (0.90, 1.1, 1.6, 2.3, 3.5, 5.2, 7.6))), 70),
    steps(A3B, "fp8", dict(zip(ALL_BATCHES, (1.15, 1.45, 2.1, 3.2, 5.0, 7.7, 11.0))), 70),
    steps(SMALL, "int4", {1: 0.95}, 40),
    steps(SMALL, "fp8", {1: 1.4}, 40),
    Benchmark(
        "prefill",
        f"prefill -m {A3B} --random-weights --quantization fp8 --context 1024 --batch 1,8",
        70,
        (Goal({"batch": 1}, "ms", 18.0), Goal({"batch": 8}, "ms", 70.0)),
        PREFILLS,
        {"model": A3B, "scheme": "fp8"},
    ),
    Benchmark(
        "drafts of batches",
        f"step -m {A3B} --random-weights --context 1536 --batch 8,32,64 --drafts 1 {ACCEPTANCE}",
        80,
        tuple(
            Goal({"batch": batch, "drafts": 1}, "times_plain", limit, is_least=True)
            for batch, limit in ((8, 1.1), (32, 1.25), (64, 1.35))
        ),
        DRAFTS,
    ),
    Benchmark(
        "steps q4_k",
        f"step -m {GGUF} --context 1536 --batch 1,8",
        90,
        (Goal({"batch": 1}, "ms", 1.2),),
        STEPS,
        {"model": A3B, "scheme": "q4_k", "file": "of scripts/make_random_gguf.py"},
        before=f"scripts/make_random_gguf.py {A3B} -o {GGUF}",
    ),
    served(
        *(1000, (1024, 128), "--max-rows 1000 --max-model-len 4096"),
        Goal({}, "tok_s", 60_000, is_least=True),
    ),
    served(
        *(200, (1000, 2000), "--max-rows 256 --max-model-len 4096"),
        Goal({}, "output_tok_s", 9_500, is_least=True),
    ),
    share(A3B, 1.2),
    share(HUGE, 4.0),
    offloaded((A3B_6GB,), 60, speed(A3B_6GB, 0.70, "of_floor")),
    offloaded(
        (A10B_24GB, A10B_24GB_8),
        120,
        speed(A10B_24GB, 35.0),
        speed(A10B_24GB, 2500.0, "prompt_tok_s"),
        speed(A10B_24GB_8, 120.0),
    ),
    offloaded((A17B_RAM,), 90, speed(A17B_RAM, 20.0)),
    offloaded((A17B_DISK,), 120, speed(A17B_DISK, 5.35)),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for goals.json and tables with new rows")
    parser.add_argument(
        "--only", default="", help="benchmarks whose names have one of these, with commas"
    )
    parser.add_argument("--seconds", type=float, default=1400.0, help="in which all must end")
    parser.add_argument("--tokenizer", type=Path, help="folder of Qwen3.5's, for served loads")
    parser.add_argument("--commit", help="where there is no git to ask")
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    names = flags.only.split(",")
    wanted = [one for one in BENCHMARKS if any(name in one.name for name in names)]
    if not wanted:
        known = ", ".join(one.name for one in BENCHMARKS)
        parser.error(f"--only {flags.only} names no benchmark; there are {known}")
    origin = {**provenance(), "gpu": gpu_name()}  # before OUT may differ from the commit
    origin["commit"] = flags.commit or origin["commit"]
    started, judged, missing = time.monotonic(), [], []
    for one in wanted:
        left = flags.seconds - (time.monotonic() - started)
        if left < one.seconds:
            missing.append(f"{one.name}: skipped, {left:.0f} s left of {one.seconds:.0f}")
        else:
            try:
                rows = one.run(flags.tokenizer)
            except (subprocess.CalledProcessError, OSError, ValueError, KeyError) as error:
                missing.append(f"{one.name}: failed, {error}")
                continue
            finally:
                Path(GGUF).unlink(missing_ok=True)
            rows = [{**row, "commit": origin["commit"]} for row in rows]
            one.table.put(flags.out, rows)
            judged += [{"benchmark": one.name, **goal.judge(rows)} for goal in one.goals]
        summary = {
            "what": "performance goals, as scripts/measure_goals.py found them",
            **origin,
            "seconds": round(time.monotonic() - started, 1),
            "rows": judged,
            "missing": missing,
        }
        (flags.out / "goals.json").write_text(json.dumps(summary, indent=1) + "\n")
    for row in judged:
        verdict = "met   " if row["is_met"] else "MISSED"
        print(f"{verdict}  {row['benchmark']}: {row['goal']}: {row['best']}")
    for line in missing:
        print(f"MISSED  {line}")
    return int(bool(missing) or not all(row["is_met"] for row in judged))


if __name__ == "__main__":
    sys.exit(main())
