"""Quality of a server's answers: MMLU-Pro, IFEval and GPQA-Diamond, asked as in the contest.

    penstock eval quality --base-url URL --data FOLDER [--tasks mmlu_pro,ifeval --limit 100]

The folder has mmlu_pro/*.jsonl (with validation.jsonl for worked examples), ifeval/*.jsonl and
gpqa_diamond/*.jsonl; without it lm-eval fetches the first two. Exits with 0 if every gate is
passed.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config import setting
from penstock.errors import ConfigError, PenstockError
from penstock.eval import gpqa
from penstock.eval.chat_requests import NO_THINKING, listed_model
from penstock.eval.harness_tasks import EXAMPLES, KINDS, Mark, ask_task
from penstock.eval.lm_harness import Asking, require_lm_eval
from penstock.eval.results import (
    Reporter,
    ServerSettings,
    draw_seed,
    format_table,
    prepare_output,
    read_fields,
    require_at_least,
    require_limit,
)
from penstock.http_client import HttpClient

TASKS = (*KINDS, gpqa.NAME)
# IFEval's instructions that are graded with nltk's splitting into sentences and words.
SPLITTING = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
LIMIT, LIMIT_VARIABLE = 100.0, "QUALITY_LIMIT"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySettings(ServerSettings):
    """Which tasks to run, and on which server."""

    tasks: str | None = setting(
        None, f"tasks among {','.join(TASKS)} (default: those with questions)"
    )
    data: str | None = setting(
        None, "a folder with mmlu_pro, ifeval, gpqa_diamond (default: lm-eval downloads)"
    )
    limit: float | None = setting(
        None, "questions per task, or a fraction (default: QUALITY_LIMIT or 100)"
    )
    num_concurrent: int = setting(8, "concurrent requests")
    seed: int | None = setting(None, "seed of every request (default: random)")
    max_tokens: int | None = setting(
        None, "most tokens per reply (default: 512; GPQA-Diamond: 12288)"
    )
    timeout: float = setting(600.0, "seconds until a request fails")
    body: str | None = setting(
        None, "extra fields of every request, as JSON (default: thinking only for GPQA-Diamond)"
    )

    def __post_init__(self) -> None:
        require_at_least(1, num_concurrent=self.num_concurrent, max_tokens=self.max_tokens)
        if self.limit is not None:
            require_limit(self.limit)
        for name in self.task_names or ():
            if name not in TASKS:
                raise ConfigError(f"--tasks has {name!r}", f"The tasks are {', '.join(TASKS)}.")

    @property
    def task_names(self) -> list[str] | None:
        return None if self.tasks is None else [name.strip() for name in self.tasks.split(",")]


def run(settings: QualitySettings, reporter: Reporter) -> int:
    prepare_output(settings.output)
    limit, seed = _limit(settings), draw_seed(settings.seed)
    body = None if settings.body is None else read_fields("--body", settings.body)
    files, not_asked = _find_questions(settings)
    if any(name in KINDS for name in files):
        require_lm_eval(
            [package for name in files if name in KINDS for package in KINDS[name].packages]
        )
    if "ifeval" in files and _splits_sentences(files["ifeval"]):
        _require_sentence_splitter()
    model = settings.model or listed_model(
        HttpClient(settings.base_url, timeout_s=settings.timeout)
    )
    asking = Asking.of(settings, model, limit, seed, max_tokens=0, body=body or {})
    print(f"seed {seed}; {limit:g}{' of the' if limit < 1 else ''} questions per task")
    for name, why in not_asked.items():
        print(f"skipped: {name}, {why}")
    start_s = time.monotonic()
    marks = [_ask(name, file, asking, settings, reporter) for name, file in files.items()]
    print(format_marks(marks))
    fields = {
        "benchmark": "quality",
        "passed": all(mark.has_passed for mark in marks),
        "tasks": [mark.as_json() for mark in marks],
        "not_asked": not_asked,
        "model": model,
        "base_url": settings.base_url,
        "limit": limit,
        "seed": seed,
        "elapsed_s": round(time.monotonic() - start_s, 1),
    }
    reporter.deliver(fields, settings.output)
    return int(not fields["passed"])


def _limit(settings: QualitySettings) -> float:
    if settings.limit is not None:
        return settings.limit
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        limit = float(text) if text else LIMIT
        require_limit(limit)
    except (ValueError, ConfigError):
        raise ConfigError(
            f"{LIMIT_VARIABLE} is {text!r}",
            "It must be a whole number, 1 or more, or a fraction below 1: 200 or 0.1.",
            "Correct or unset it; --limit would override it.",
        ) from None
    return limit


def _find_questions(settings: QualitySettings) -> tuple[dict[str, Path | None], dict[str, str]]:
    """The tasks to run with their files, and why the others are skipped."""
    files: dict[str, Path | None] = {}
    not_asked: dict[str, str] = {}
    for name in settings.task_names or TASKS:
        try:
            files[name] = _questions_of(name, settings.data)
        except PenstockError as error:
            if settings.task_names is not None:
                raise
            not_asked[name] = f"{error.what}"
    if not files:
        raise PenstockError(
            f"--data {settings.data} has no questions",
            f"{'; '.join(not_asked.values())}.",
            "Put a .jsonl file into one of those folders.",
        )
    return files, not_asked


def _questions_of(name: str, folder: str | None) -> Path | None:
    if folder is None:
        if name != gpqa.NAME:
            return None
        raise PenstockError(
            "GPQA-Diamond needs --data",
            "Its authors give it only to people who promise not to publish it, so it is never "
            "downloaded.",
            f"Put it into FOLDER/{gpqa.NAME}/test.jsonl and use --data FOLDER, or remove it from "
            "--tasks.",
        )
    files = [
        file
        for file in sorted((Path(folder).expanduser() / name).glob("*.jsonl"))
        if file.name != EXAMPLES
    ]
    if len(files) != 1:
        raise PenstockError(
            f"--data {folder} has no questions for {name}",
            f"Its folder {name} has {len(files)} .jsonl files besides {EXAMPLES}; exactly one is "
            "needed.",
            f"Put the questions there, or remove {name} from --tasks.",
        )
    return files[0].resolve()


def _ask(
    name: str, file: Path | None, asking: Asking, settings: QualitySettings, reporter: Reporter
) -> Mark:
    if name in KINDS:
        body: Mapping[str, Any] = (
            asking.body if settings.body is not None else read_fields("--body", NO_THINKING)
        )
        max_tokens = settings.max_tokens or KINDS[name].max_tokens
        return ask_task(name, file, replace(asking, body=body, max_tokens=max_tokens))
    assert file is not None
    max_tokens = settings.max_tokens or gpqa.MAX_TOKENS
    body = asking.body if settings.body is not None else gpqa.thinking(max_tokens)
    return gpqa.ask_gpqa(file, replace(asking, body=body, max_tokens=max_tokens), reporter.bars)


def format_marks(marks: Sequence[Mark]) -> str:
    rows = [
        [
            mark.name,
            str(mark.num_fewshot),
            f"{mark.max_tokens:,}",
            str(mark.num_asked),
            str(mark.num_without_reply),
            f"{mark.share:.1%}",
            f"{mark.gate:.1%}",
            "PASSED" if mark.has_passed else "MISSED",
        ]
        for mark in marks
    ]
    columns = ["task", "shots", "tokens", "asked", "without reply", "right", "gate", ""]
    notes = [f"{mark.name}: {mark.note}" for mark in marks if mark.note]
    return "\n".join([format_table(columns, rows), *notes])


def _splits_sentences(file: Path | None) -> bool:
    """Whether grading a question of the file, or of lm-eval's data set, needs nltk's splitting."""
    if file is None:
        return True
    text = file.read_text(encoding="utf-8")
    return any(f'"{instruction}"' in text for instruction in SPLITTING)


def _require_sentence_splitter() -> None:
    """nltk installs without its punkt_tab, which grading some instructions needs."""
    nltk = importlib.import_module("nltk")
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise PenstockError(
            "IFEval needs nltk's punkt_tab, which is not installed",
            "Grading uses it to count sentences.",
            "With a network: python -m nltk.downloader punkt_tab. Without: --tasks "
            "mmlu_pro,gpqa_diamond.",
        ) from None
