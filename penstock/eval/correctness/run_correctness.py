"""Whether a server's model is still right: GSM8K-CoT against a gate of 87.5 %, greedy and without thinking.

    penstock eval correctness --base-url URL [--limit 200 --num-concurrent 8 --output F --seed N]

Problems that had no reply count as wrong. Ends with 0 when the gate is passed and with 1 when it is not; the
summary is written in either case.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from penstock.config import setting
from penstock.errors import ConfigError
from penstock.eval.chat_requests import listed_model
from penstock.eval.contest_files import Correctness, contest_correctness, read_correctness
from penstock.eval.correctness.embedded import ask_embedded
from penstock.eval.correctness.grading import GATE, Grades
from penstock.eval.correctness.gsm8k import ask_gsm8k
from penstock.eval.endpoint import Endpoint
from penstock.eval.lm_harness import Asking, require_data, require_lm_eval
from penstock.eval.results import (
    Reporter,
    draw_seed,
    output_file,
    percent,
    prepare_output,
    read_fields,
    require_at_least,
    require_limit,
)
from penstock.http_client import HttpClient
from penstock.progress import Phase, timed

EMBEDDED_SEED = 1234
PROBLEMS = ("gsm8k", "embedded")
NO_THINKING = '{"chat_template_kwargs": {"enable_thinking": false}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectnessSettings:
    """Which problems are asked, and of whom."""

    base_url: str = setting("http://127.0.0.1:8000", "a running server")
    model: str = setting("", "name to send (default: the server's first model)")
    limit: float = setting(
        200, "problems to ask, as a count or a fraction: 0.1 (default: 200; quality: 100 of each task)"
    )
    num_concurrent: int = setting(8, "requests at once")
    seed: int | None = setting(
        None, "of problems and prompts (default: drawn anew, and reported; embedded: 1234; gates: 0)"
    )
    output: str | None = setting(None, "also write the last line to this file")
    output_dir: str | None = setting(None, "folder for it instead: correctness.json or throughput.json")
    baseline: str | None = setting(None, "results of another server, to be compared with")
    problems: str = setting(
        "gsm8k", "which ones; embedded are made up here, for the tiny model", choices=PROBLEMS
    )
    data: str | None = setting(
        None,
        "GSM8K's test.jsonl; quality: a folder of mmlu_pro, ifeval, gpqa_diamond (default: lm-eval fetches)",
    )
    max_tokens: int = setting(1024, "of a reply (default: 1024; quality: 512, GPQA-Diamond 12288)")
    timeout: float = setting(300.0, "seconds after which a request has failed")
    body: str = setting(NO_THINKING, f"fields for every request, as JSON (default: {NO_THINKING})")

    def __post_init__(self) -> None:
        require_limit(self.limit)
        require_at_least(1, num_concurrent=self.num_concurrent, max_tokens=self.max_tokens)
        if self.problems not in PROBLEMS:
            raise ConfigError(f"--problems is {self.problems!r}", f"It must be one of {', '.join(PROBLEMS)}.")
        if self.problems == "embedded" and self.data:
            raise ConfigError("--data and --problems embedded are both given", "Those come from no file.")
        if self.problems == "embedded" and self.limit < 1:
            raise ConfigError(
                f"--limit is {self.limit}", "Problems that are made up have no whole to take from."
            )


def run(settings: CorrectnessSettings, reporter: Reporter) -> int:
    output = output_file(settings.output, settings.output_dir, "correctness.json")
    prepare_output(output)
    baseline = read_correctness("--baseline", settings.baseline) if settings.baseline else None
    if settings.seed is None:  # made-up problems are the tiny model's smoke test, the same every day
        seed = EMBEDDED_SEED if settings.problems == "embedded" else draw_seed(None)
        settings = replace(settings, seed=seed)
    print(f"seed {settings.seed}", flush=True)
    body = read_fields("--body", settings.body)
    data = require_data("--data", settings.data, "GSM8K's test.jsonl")
    if settings.problems == "gsm8k":
        require_lm_eval()
    model = settings.model or listed_model(HttpClient(settings.base_url, timeout_s=settings.timeout))
    start_s = time.monotonic()
    if settings.problems == "embedded":
        grades = _ask_embedded(settings, model, reporter)
    else:
        asking = Asking(
            settings.base_url,
            model,
            settings.limit,
            settings.num_concurrent,
            draw_seed(settings.seed),
            settings.timeout,
            settings.max_tokens,
            body,
        )
        grades = ask_gsm8k(data, asking)
    print(describe(grades, baseline))
    reporter.deliver(_summary(settings, model, grades, baseline, time.monotonic() - start_s), output)
    return int(not grades.has_passed)


def _ask_embedded(settings: CorrectnessSettings, model: str, reporter: Reporter) -> Grades:
    endpoint, num_problems = Endpoint(settings.base_url, model), int(settings.limit)
    with reporter.bars() as phases, timed("problems", phases) as report:
        return ask_embedded(
            endpoint,
            num_problems,
            draw_seed(settings.seed),
            settings.num_concurrent,
            lambda number: report(
                Phase("problems", f"{number} of {num_problems} asked", number / num_problems)
            ),
        )


def describe(grades: Grades, baseline: Correctness | None = None) -> str:
    shots = f", {grades.num_fewshot}-shot" if grades.num_fewshot else ""
    lines = [
        f"{grades.problems}{shots}: {grades.num_asked} asked",
        f"  flexible exact match  {grades.flexible:7.1%}  ({grades.num_flexible} right)",
        f"  strict exact match    {grades.strict:7.1%}  ({grades.num_strict} right)",
    ]
    for message, count in grades.errors.most_common(5):
        lines.append(f"  {count} without a reply: {message}")
    if baseline is not None:
        share = percent(grades.flexible, baseline.flexible)
        lines.append(
            f"  baseline              {baseline.flexible:7.1%}  ({share} of it; {baseline.problems})"
        )
    verdict = "PASSED" if grades.has_passed else "MISSED"
    lines.append(f"  gate                  {GATE:7.1%}  {verdict}")
    return "\n".join(lines)


def _summary(
    settings: CorrectnessSettings,
    model: str,
    grades: Grades,
    baseline: Correctness | None,
    elapsed_s: float,
) -> dict[str, Any]:
    return {
        "benchmark": "correctness",
        **grades.as_json(),
        **(contest_correctness(grades.flexible, grades.strict) if grades.problems == "gsm8k" else {}),
        **({"baseline_exact_match": baseline.flexible} if baseline is not None else {}),
        "model": model,
        "base_url": settings.base_url,
        "limit": settings.limit,
        "num_concurrent": settings.num_concurrent,
        "seed": settings.seed,
        "temperature": 0,
        "top_p": 1,
        "max_tokens": settings.max_tokens,
        "elapsed_s": round(elapsed_s, 1),
    }
