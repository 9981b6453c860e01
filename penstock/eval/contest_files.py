"""Result files in the throughput contest's own format: written beside our keys, and read instead of
them.

Its throughput file is {"results": [{"concurrency", "throughput_tok_per_sec", ...}]}, its
correctness file {"task", "accuracy", "full_results"}. Knows keys, not how a number was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError
from penstock.eval.results import read_results

TASK = "gsm8k_cot"
FLEXIBLE, STRICT = "exact_match,flexible-extract", "exact_match,strict-match"


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second by concurrency; `is_verified` if all of them were recounted."""

    levels: Mapping[int, float]
    is_verified: bool
    baseline: Mapping[int, float]  # of the server it was compared with


@dataclass(frozen=True, slots=True)
class Correctness:
    flexible: float
    strict: float | None
    problems: str


def contest_level(level: Mapping[str, Any]) -> dict[str, Any]:
    """One of our levels, as `LevelResult.as_json` has it, under the contest's keys."""
    checks = level["spot_checks"]
    return {
        "concurrency": level["concurrency"],
        "throughput_tok_per_sec": level["tok_s"],
        "total_tokens": level["prompt_tokens"] + level["completion_tokens"],
        "total_prompt_tokens": level["prompt_tokens"],
        "total_completion_tokens": level["completion_tokens"],
        "reported_prompt_tokens": level["claimed_prompt_tokens"],
        "reported_completion_tokens": level["claimed_completion_tokens"],
        "successful_requests": level["ok"],
        "failed_requests": level["failed"],
        "wall_time_sec": level["wall_s"],
        "token_discrepancy": level["discrepancies"] > 0,
        "spot_checks_passed": checks["right"],
        "spot_checks_total": checks["right"] + len(checks["wrong"]),
    }


def contest_correctness(flexible: float, strict: float) -> dict[str, Any]:
    """For GSM8K only: the contest has no other problems."""
    return {
        "task": TASK,
        "accuracy": flexible,
        "full_results": {FLEXIBLE: flexible, STRICT: strict},
    }


def read_throughput(flag: str, path: str) -> Throughput:
    fields = read_results(flag, path)
    try:
        if "levels" in fields:
            return _read_levels(fields)
        rows = [row for row in fields["results"] if "concurrency" in row]
        levels = {int(row["concurrency"]): float(row["throughput_tok_per_sec"]) for row in rows}
        # The contest's harness always recounts.
        return Throughput(levels, is_verified=True, baseline={})
    except (LookupError, TypeError, ValueError) as error:
        raise PenstockError(
            f"{flag} {path} has no throughput",
            f"{type(error).__name__}: {error}.",
            'It must have {"levels": [{"concurrency": 1, "verified_tok_s": 984.0}, ...]} or, in '
            'the contest\'s format, {"results": [{"concurrency": 1, "throughput_tok_per_sec": '
            "984.0}, ...]}.",
        ) from error


def _read_levels(fields: Mapping[str, Any]) -> Throughput:
    rows: Sequence[Mapping[str, Any]] = fields["levels"]
    verified = [row for row in rows if row.get("verified_tok_s") is not None]
    levels = {
        int(row["concurrency"]): float(row["verified_tok_s"] if row in verified else row["tok_s"])
        for row in rows
    }
    baseline = {
        int(row["concurrency"]): row["baseline_tok_s"] for row in rows if row.get("baseline_tok_s")
    }
    # Older files have `recounted` only at the top level.
    return Throughput(
        levels, len(verified) == len(rows) and fields.get("recounted") is not False, baseline
    )


def read_correctness(flag: str, path: str) -> Correctness:
    fields = read_results(flag, path)
    try:
        if "exact_match" in fields:
            matches = fields["exact_match"]
            problems = str(fields.get("problems", "unknown problems"))
            return Correctness(float(matches["flexible"]), matches.get("strict"), problems)
        details = fields.get("full_results") or {}
        # The contest's `accuracy` is whichever match came first; the gate is on the flexible one.
        flexible = details.get(FLEXIBLE, fields["accuracy"])
        return Correctness(
            float(flexible), details.get(STRICT), str(fields.get("task", "unknown problems"))
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PenstockError(
            f"{flag} {path} has no share of right answers",
            f"{type(error).__name__}: {error}.",
            'It must have {"exact_match": {"flexible": 0.915}} or, in the contest\'s format, '
            '{"accuracy": 0.915}.',
        ) from error
