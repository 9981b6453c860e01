"""Whether a faster server still answers as well: MMLU-Pro and IFEval on a sample, by lm-evaluation-harness.

    penstock eval quality --base-url URL --data FOLDER [--tasks mmlu_pro,ifeval --limit 100]

The folder holds mmlu_pro/*.jsonl and ifeval/*.jsonl; without it lm-eval fetches the sets. Ends with 0 when
every gate is passed. The sample of MMLU-Pro has no worked examples, so it is asked without any.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import setting
from penstock.errors import ConfigError, PenstockError
from penstock.eval.chat_requests import listed_model
from penstock.eval.correctness.run_correctness import NO_THINKING
from penstock.eval.lm_harness import Asking, Evaluation, LocalTask, evaluate, require_lm_eval
from penstock.eval.results import (
    Reporter,
    draw_seed,
    format_table,
    prepare_output,
    read_fields,
    require_at_least,
)
from penstock.http_client import HttpClient

ASK_FOR_A_LETTER = (
    "The following is a multiple choice question. Think step by step and then finish your answer with "
    '"the answer is (X)" where X is the correct letter choice.\n'
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One of lm-eval's tasks, the metric that is gated, and the share it needs."""

    source: str
    split: str
    metric: str
    gate: float
    packages: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)


KINDS: Mapping[str, Kind] = {
    "mmlu_pro": Kind(
        "mmlu_pro/_default_template_yaml",
        "test",
        "exact_match,custom-extract",
        0.621,
        changes={
            "num_fewshot": 0,
            "fewshot_split": None,
            "fewshot_config": None,
            "description": ASK_FOR_A_LETTER,
        },
    ),
    "ifeval": Kind(
        "ifeval/ifeval.yaml",
        "train",
        "prompt_level_strict_acc,none",
        0.814,
        packages=("langdetect", "immutabledict", "nltk"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySettings:
    """Which tasks are asked, and of whom."""

    base_url: str = setting("http://127.0.0.1:8000", "a running server")
    model: str = setting("", "name to send (default: the server's first model)")
    tasks: str = setting(",".join(KINDS), "which ones")
    data: str | None = setting(None, "a folder with mmlu_pro and ifeval (default: lm-eval fetches them)")
    limit: int = setting(100, "questions of a task")
    num_concurrent: int = setting(8, "requests at once")
    seed: int | None = setting(None, "sent with every request (default: drawn anew)")
    output: str | None = setting(None, "also write the last line to this file")
    max_tokens: int = setting(2048, "of a reply")
    timeout: float = setting(600.0, "seconds after which a request has failed")
    body: str = setting(NO_THINKING, f"fields for every request, as JSON (default: {NO_THINKING})")

    def __post_init__(self) -> None:
        require_at_least(1, limit=self.limit, num_concurrent=self.num_concurrent, max_tokens=self.max_tokens)
        for name in self.task_names:
            if name not in KINDS:
                raise ConfigError(f"--tasks has {name!r}", f"There are {', '.join(KINDS)}.")

    @property
    def task_names(self) -> list[str]:
        return [name.strip() for name in self.tasks.split(",")]


@dataclass(frozen=True, slots=True)
class Mark:
    name: str
    share: float
    gate: float
    num_asked: int
    num_without_reply: int
    metrics: Mapping[str, float]

    @property
    def has_passed(self) -> bool:
        return self.share >= self.gate

    def as_json(self) -> dict[str, Any]:
        return {
            "task": self.name,
            "share": round(self.share, 4),
            "gate": self.gate,
            "passed": self.has_passed,
            "asked": self.num_asked,
            "without_reply": self.num_without_reply,
            "metrics": dict(self.metrics),
        }


def run(settings: QualitySettings, reporter: Reporter) -> int:
    prepare_output(settings.output)
    body = read_fields("--body", settings.body)
    require_lm_eval([package for name in settings.task_names for package in KINDS[name].packages])
    tasks = {name: _local_task(name, settings.data) for name in settings.task_names}
    if "ifeval" in tasks:
        _require_sentence_splitter()
    model = settings.model or listed_model(HttpClient(settings.base_url, timeout_s=settings.timeout))
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
    start_s = time.monotonic()
    marks = [_mark(name, evaluate(task, asking)) for name, task in tasks.items()]
    rows = [
        [
            mark.name,
            str(mark.num_asked),
            str(mark.num_without_reply),
            f"{mark.share:.1%}",
            f"{mark.gate:.1%}",
            "PASSED" if mark.has_passed else "MISSED",
        ]
        for mark in marks
    ]
    print(format_table(["task", "asked", "without reply", "right", "gate", ""], rows))
    fields = {
        "benchmark": "quality",
        "passed": all(mark.has_passed for mark in marks),
        "tasks": [mark.as_json() for mark in marks],
        "model": model,
        "base_url": settings.base_url,
        "limit": settings.limit,
        "seed": settings.seed,
        "elapsed_s": round(time.monotonic() - start_s, 1),
    }
    reporter.deliver(fields, settings.output)
    return int(not fields["passed"])


def _local_task(name: str, folder: str | None) -> LocalTask:
    kind, data = KINDS[name], None
    if folder is not None:
        files = sorted((Path(folder).expanduser() / name).glob("*.jsonl"))
        if len(files) != 1:
            raise PenstockError(
                f"--data {folder} has no questions for {name}",
                f"There are {len(files)} .jsonl files in its folder {name}; one is needed.",
                f"Put the questions there, or leave {name} out of --tasks.",
            )
        data = files[0].resolve()
    return LocalTask(f"penstock_{name}", kind.source, kind.split, data, kind.changes)


def _require_sentence_splitter() -> None:
    """A part of nltk that does not come with it, and without which some instructions cannot be judged."""
    nltk = importlib.import_module("nltk")
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise PenstockError(
            "IFEval needs nltk's punkt_tab, which is not here",
            "It counts sentences with it.",
            "With a network: python -m nltk.downloader punkt_tab. Without: --tasks mmlu_pro.",
        ) from None


def _mark(name: str, found: Evaluation) -> Mark:
    kind = KINDS[name]
    return Mark(
        name,
        found.metrics.get(kind.metric, 0.0),
        kind.gate,
        found.num_asked,
        found.failures.total(),
        found.metrics,
    )
