"""Correctness of a server's model: GSM8K-CoT against a gate of 87.5 %, greedy and without thinking.

    penstock eval correctness --base-url URL [--limit 200 --num-concurrent 8 --output F --seed N]

Problems without a reply count as wrong. Exits with 0 if the gate is passed and with 1 if not; the
summary is written in either case.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.config import require_choice, setting
from penstock.errors import ConfigError, PenstockError
from penstock.eval import held_out
from penstock.eval.chat_requests import NO_THINKING, listed_model
from penstock.eval.contest_files import Correctness, contest_correctness, read_correctness
from penstock.eval.conversation import Conversation, FinalNumber
from penstock.eval.endpoint import Endpoint
from penstock.eval.lm_harness import Asking, LocalTask, evaluate, require_data, require_lm_eval
from penstock.eval.reply import Reply
from penstock.eval.results import (
    Reporter,
    ServerSettings,
    draw_seed,
    output_file,
    percent,
    prepare_output,
    read_fields,
    require_at_least,
    require_limit,
)
from penstock.eval.spot_checks import ends_with_number
from penstock.http_client import HttpClient
from penstock.progress import Phase, timed

GATE = 0.875  # share of exact matches; below it a server's speed does not count
MAX_WRONG_KEPT = 20
EMBEDDED_SEED = 1234
PROBLEMS = ("gsm8k", "embedded")
NUM_FEWSHOT = 8
FLEXIBLE, STRICT = "flexible-extract", "strict-match"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectnessSettings(ServerSettings):
    """Which problems to run, and on which server."""

    limit: float = setting(
        200,
        "problems to run, as a count or a fraction: 0.1 (default: 200; quality: 100 per task)",
    )
    num_concurrent: int = setting(8, "concurrent requests")
    seed: int | None = setting(
        None,
        "seed for problems and prompts (default: random, and reported; embedded: 1234; gates: 0)",
    )
    output_dir: str | None = setting(
        None, "folder to write correctness.json or throughput.json to, instead of --output"
    )
    baseline: str | None = setting(None, "results of another server, to compare with")
    problems: str = setting(
        "gsm8k", "which problems; embedded: generated ones, for the tiny model", choices=PROBLEMS
    )
    data: str | None = setting(
        None,
        "GSM8K's test.jsonl; quality: a folder with mmlu_pro, ifeval, gpqa_diamond (default: "
        "lm-eval downloads)",
    )
    max_tokens: int = setting(
        1024, "most tokens per reply (default: 1024; quality: 512, GPQA-Diamond 12288)"
    )
    timeout: float = setting(300.0, "seconds until a request fails")
    body: str = setting(
        NO_THINKING, f"extra fields of every request, as JSON (default: {NO_THINKING})"
    )

    def __post_init__(self) -> None:
        require_limit(self.limit)
        require_at_least(1, num_concurrent=self.num_concurrent, max_tokens=self.max_tokens)
        require_choice("--problems", self.problems, PROBLEMS)
        if self.problems == "embedded" and self.data:
            raise ConfigError(
                "--data and --problems embedded are both set", "Embedded problems use no file."
            )
        if self.problems == "embedded" and self.limit < 1:
            raise ConfigError(
                f"--limit is {self.limit}", "Generated problems have no total for a fraction."
            )


def run(settings: CorrectnessSettings, reporter: Reporter) -> int:
    output = output_file(settings.output, settings.output_dir, "correctness.json")
    prepare_output(output)
    baseline = read_correctness("--baseline", settings.baseline) if settings.baseline else None
    is_embedded = settings.problems == "embedded"
    # Generated problems are a smoke test of the tiny model, with a fixed seed.
    seed = EMBEDDED_SEED if is_embedded and settings.seed is None else draw_seed(settings.seed)
    print(f"seed {seed}", flush=True)
    body = read_fields("--body", settings.body)
    data = require_data("--data", settings.data, "GSM8K's test.jsonl")
    if not is_embedded:
        require_lm_eval()
    model = settings.model or listed_model(
        HttpClient(settings.base_url, timeout_s=settings.timeout)
    )
    start_s = time.monotonic()
    if is_embedded:
        grades = ask_embedded(settings, model, seed, reporter)
    else:
        most = settings.max_tokens
        asking = Asking.of(settings, model, settings.limit, seed, max_tokens=most, body=body)
        grades = ask_gsm8k(data, asking)
    print(describe(grades, baseline))
    fields = {
        "benchmark": "correctness",
        **grades.as_json(),
        **({} if is_embedded else contest_correctness(grades.flexible, grades.strict)),
        **({"baseline_exact_match": baseline.flexible} if baseline is not None else {}),
        "model": model,
        "base_url": settings.base_url,
        "limit": settings.limit,
        "num_concurrent": settings.num_concurrent,
        "seed": seed,
        "temperature": 0,
        "top_p": 1,
        "max_tokens": settings.max_tokens,
        "elapsed_s": round(time.monotonic() - start_s, 1),
    }
    reporter.deliver(fields, output)
    return int(not grades.has_passed)


@dataclass(slots=True)
class Grades:
    """`num_flexible`: right in any format of the number; `num_strict`: in the requested one."""

    problems: str
    num_asked: int
    num_flexible: int
    num_strict: int
    num_fewshot: int = 0
    # Requests without a reply; they count as wrong.
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, str]] = field(default_factory=list)
    judge: str = "penstock"

    @property
    def flexible(self) -> float:
        return self.num_flexible / max(1, self.num_asked)

    @property
    def strict(self) -> float:
        return self.num_strict / max(1, self.num_asked)

    @property
    def has_passed(self) -> bool:
        return self.num_asked > 0 and self.flexible >= GATE

    def keep_wrong(self, question: str, wanted: str, got: str) -> None:
        if len(self.wrong) < MAX_WRONG_KEPT:
            self.wrong.append({"question": question[-300:], "wanted": wanted, "got": got[:300]})

    def as_json(self) -> dict[str, Any]:
        return {
            "problems": self.problems,
            "judge": self.judge,
            "num_fewshot": self.num_fewshot,
            "asked": self.num_asked,
            "without_reply": self.errors.total(),
            "error_messages": dict(self.errors.most_common(10)),
            "exact_match": {"flexible": round(self.flexible, 4), "strict": round(self.strict, 4)},
            "gate": GATE,
            "passed": self.has_passed,
            "wrong": self.wrong,
        }


def ask_gsm8k(data: Path | None, asking: Asking) -> Grades:
    """GSM8K-CoT, 8-shot, asked and graded by lm-eval: from the file, or as it downloads it."""
    task = LocalTask(
        "penstock_gsm8k_cot", "gsm8k/gsm8k-cot.yaml", "test", data, {"num_fewshot": NUM_FEWSHOT}
    )
    found = evaluate([task], asking)
    by_filter = {
        name: [sample for sample in found.samples if sample["filter"] == name]
        for name in (FLEXIBLE, STRICT)
    }
    grades = Grades(
        problems="gsm8k",
        num_asked=found.num_asked,
        num_flexible=round(sum(sample["exact_match"] for sample in by_filter[FLEXIBLE])),
        num_strict=round(sum(sample["exact_match"] for sample in by_filter[STRICT])),
        num_fewshot=NUM_FEWSHOT,
        errors=found.failures,
        judge=f"lm-eval {found.lm_eval_version}",
    )
    for sample in by_filter[FLEXIBLE]:
        if not sample["exact_match"]:
            grades.keep_wrong(
                sample["doc"]["question"], str(sample["target"]), str(sample["resps"][0][0])
            )
    return grades


def ask_embedded(
    settings: CorrectnessSettings, model: str, seed: int, reporter: Reporter
) -> Grades:
    """Word problems held out from the embedded model's training: no file or package needed."""
    endpoint = Endpoint(settings.base_url, model)
    asked = held_out.take("word_problems", int(settings.limit), seed)
    problems = [replace(problem, enable_thinking=False) for problem in asked]
    grades = Grades("embedded", len(problems), 0, 0)

    def ask(problem: Conversation) -> Reply | PenstockError:
        try:
            return endpoint.ask(problem)
        except PenstockError as error:
            return error

    with (
        ThreadPoolExecutor(max_workers=settings.num_concurrent) as pool,
        reporter.bars() as phases,
        timed("problems", phases) as report,
    ):
        for number, (problem, reply) in enumerate(zip(problems, pool.map(ask, problems)), 1):
            _grade(grades, problem, reply)
            report(Phase("problems", f"{number} of {len(problems)} asked", number / len(problems)))
    return grades


def _grade(grades: Grades, problem: Conversation, reply: Reply | PenstockError) -> None:
    check = problem.check
    assert isinstance(check, FinalNumber)
    if isinstance(reply, PenstockError):
        grades.errors[f"{reply.what} {reply.why}".strip()] += 1
        return
    is_strict = check.accepts(reply)
    is_flexible = is_strict or ends_with_number(reply.content, check.value)
    grades.num_strict += is_strict
    grades.num_flexible += is_flexible
    if not is_flexible:
        grades.keep_wrong(problem.messages[-2]["content"], str(check.value), reply.content)


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
            f"  baseline              {baseline.flexible:7.1%}  ({share} of it; "
            f"{baseline.problems})"
        )
    verdict = "PASSED" if grades.has_passed else "MISSED"
    lines.append(f"  gate                  {GATE:7.1%}  {verdict}")
    return "\n".join(lines)
