"""The score of a server: verified tokens per second, weighted by level; 0 below the correctness
gate.

    penstock eval score --correctness F --throughput F [--baseline F]

Reads the files of the other measurements; contacts no server. Exits with 0 if there is a score and
with 1 if the gate was missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from penstock.config import setting
from penstock.errors import ConfigError
from penstock.eval.contest_files import read_correctness, read_throughput
from penstock.eval.correctness import GATE
from penstock.eval.results import Reporter, format_table, percent, prepare_output

WEIGHTS: Mapping[int, int] = {1: 1, 2: 1, 4: 2, 8: 2, 16: 4, 32: 4, 64: 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSettings:
    """Which results to combine."""

    correctness: str = setting("", "file from `eval correctness`")
    throughput: str = setting("", "file from `eval throughput`")
    baseline: str | None = setting(
        None, "throughput of another server (default: the baseline of the measurement)"
    )
    output: str | None = setting(None, "also write the last line to this file")

    def __post_init__(self) -> None:
        for name in ("correctness", "throughput"):
            if not getattr(self, name):
                raise ConfigError(
                    f"--{name} is missing", "A score needs the results of both measurements."
                )


def weighted_sum(levels: Mapping[int, float]) -> float:
    """A level that was not measured counts as 0."""
    return sum(weight * levels.get(level, 0.0) for level, weight in WEIGHTS.items())


def run(settings: ScoreSettings, reporter: Reporter) -> int:
    prepare_output(settings.output)
    correctness = read_correctness("--correctness", settings.correctness)
    throughput = read_throughput("--throughput", settings.throughput)
    levels, baseline = throughput.levels, throughput.baseline
    if settings.baseline:
        baseline = read_throughput("--baseline", settings.baseline).levels
    has_passed = correctness.flexible >= GATE
    speed, baseline_speed = weighted_sum(levels), weighted_sum(baseline)
    score = speed if has_passed else 0.0
    print(_format(levels, baseline, is_verified=throughput.is_verified))
    missing = [level for level in WEIGHTS if level not in levels]
    if missing:
        print(f"not measured, counted as 0: c = {', '.join(map(str, missing))}")
    if not throughput.is_verified:
        print("not verified: only the server counted these tokens; measure with --tokenizer FOLDER")
    verdict = "PASSED" if has_passed else "MISSED"
    share = f"{correctness.flexible:.1%} of {correctness.problems}"
    print(f"\ncorrectness  {share}, gate {GATE:.1%}: {verdict}")
    print(
        f"score        {score:,.0f}"
        + ("" if has_passed else f", not {speed:,.0f}: the gate was missed")
    )
    if baseline_speed:
        print(
            f"baseline     {baseline_speed:,.0f}; the score is {percent(score, baseline_speed)} of "
            "it"
        )
    fields = {
        "benchmark": "score",
        "score": round(score, 1),
        "passed": has_passed,
        "verified": throughput.is_verified,
        "correctness": {**asdict(correctness), "gate": GATE},
        "levels": [
            {
                "concurrency": level,
                "weight": weight,
                "tok_s": levels.get(level),
                "verified_tok_s": levels.get(level) if throughput.is_verified else None,
                "baseline_tok_s": baseline.get(level),
            }
            for level, weight in WEIGHTS.items()
        ],
        "baseline_score": round(baseline_speed, 1) or None,
    }
    reporter.deliver(fields, settings.output)
    return int(not has_passed)


def _format(
    levels: Mapping[int, float], baseline: Mapping[int, float], *, is_verified: bool
) -> str:
    rows = []
    for level, weight in WEIGHTS.items():
        speed = levels.get(level)
        rows.append(
            [
                str(level),
                str(weight),
                "-" if speed is None else f"{speed:,.1f}",
                "-" if speed is None else f"{weight * speed:,.0f}",
                f"{baseline[level]:,.1f}" if level in baseline else "-",
                percent(speed, baseline.get(level)),
            ]
        )
    return format_table(
        [
            "at a time",
            "weight",
            "verified tok/s" if is_verified else "tok/s",
            "weighted",
            "baseline tok/s",
            "of baseline",
        ],
        rows,
    )
