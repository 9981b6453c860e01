"""lm-evaluation-harness for any server: its tasks, with questions from a local file, over HTTP.

Prompts, examples, filters and metrics are lm-eval's own, so that scores can be compared; only the
source of questions is ours. lm-eval stops at the first request that fails permanently; here such a
request counts as an empty reply, and its error is kept. lm_eval is imported on first use: it is an
optional package.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError

INSTALL = "lm-eval[api]>=0.4.13"
NEEDED = ("lm_eval", "aiohttp", "requests", "tenacity")
MAX_TRIES = 3
MAX_IN_A_ROW = 16  # consecutive permanent failures, after which the rest is not sent
MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class LocalTask:
    """One of lm-eval's tasks; `source`: its YAML below lm_eval/tasks; `data`: its questions."""

    name: str
    source: str
    split: str
    data: Path | None  # None: whatever lm-eval downloads
    changes: Mapping[str, Any] = field(default_factory=dict)
    examples: Path | None = None  # worked examples, from the validation split

    def write(self, folder: Path, tasks: Path) -> None:
        """Writes the task as a YAML file (JSON is a subset) that includes lm-eval's."""
        fields: dict[str, Any] = {
            "include": str(tasks / self.source),
            "task": self.name,
            **self.changes,
        }
        if self.data is not None:
            files = {self.split: self.data}
            if self.examples is not None:
                files = _with_equal_columns({**files, "validation": self.examples}, folder)
            fields |= {
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {
                    "data_files": {split: str(file) for split, file in files.items()},
                    "cache_dir": str(folder / "datasets"),
                },
            }
        (folder / f"{self.name}.yaml").write_text(json.dumps(fields), encoding="utf-8")


def read_lines(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _with_equal_columns(files: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Copies in which every row has every column: splits of a data set must have the same ones."""
    rows = {split: read_lines(file) for split, file in files.items()}
    columns = {name: None for split in rows.values() for row in split for name in row}
    copies = {}
    for split, each in rows.items():
        copies[split] = folder / f"{split}.jsonl"
        lines = [json.dumps({name: row.get(name, "") for name in columns}) for row in each]
        copies[split].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return copies


@dataclass(frozen=True, slots=True)
class Asking:
    """Which server, how many questions, and the fields of every request."""

    base_url: str
    model: str
    limit: float  # a count, or below 1 a fraction of the questions
    num_concurrent: int
    seed: int
    timeout_s: float
    max_tokens: int
    body: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Any, model: str, limit: float, seed: int, **more: Any) -> Asking:
        """Takes the server and the time limit from a measurement's settings."""
        server, concurrent = settings.base_url, settings.num_concurrent
        return cls(server, model, limit, concurrent, seed, settings.timeout, **more)


@dataclass(slots=True)
class Evaluation:
    """`metrics` by lm-eval's names, `samples` as it keeps them, and requests without a reply."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]  # with their task's name
    failures: Counter[str]
    lm_eval_version: str

    @property
    def num_asked(self) -> int:
        return len({(sample["task"], sample["doc_id"]) for sample in self.samples})


def require_lm_eval(extra: Sequence[str] = ()) -> None:
    missing = [name for name in (*NEEDED, *extra) if importlib.util.find_spec(name) is None]
    if missing:
        others = "".join(f" {name}" for name in extra)
        raise PenstockError(
            "lm-evaluation-harness is not installed",
            f"{sys.executable} does not find {', '.join(missing)}.",
            f"Install it: {sys.executable} -m pip install '{INSTALL}'{others}",
        )


def require_data(flag: str, data: str | None, wanted: str) -> Path | None:
    if data is None:
        return None
    file = Path(data).expanduser()
    if not file.is_file():
        raise PenstockError(
            f"{flag} {data} is not a file", f"It must be {wanted}, one JSON object per line."
        )
    return file.resolve()


def evaluate(tasks: Sequence[LocalTask], asking: Asking) -> Evaluation:
    """Runs all questions. Raises only if they cannot be sent, never because of the replies."""
    if all(task.data is not None for task in tasks):
        # Nothing is downloaded, so nothing should wait for the hub.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import lm_eval
    import lm_eval.tasks

    model = _tolerant_model(asking)
    with tempfile.TemporaryDirectory(prefix="penstock-eval-") as folder:
        for task in tasks:
            task.write(Path(folder), Path(lm_eval.tasks.__file__).parent)
        try:
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=[task.name for task in tasks],
                task_manager=lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False),
                limit=asking.limit,
                apply_chat_template=True,
                fewshot_as_multiturn=True,
                gen_kwargs={
                    "temperature": 0,
                    "top_p": 1.0,
                    "max_gen_toks": asking.max_tokens,
                    **asking.body,
                },
                bootstrap_iters=0,
                random_seed=asking.seed,
                numpy_random_seed=asking.seed,
                torch_random_seed=asking.seed,
                fewshot_random_seed=asking.seed,
            )
        except OSError as error:  # also raised when a data set cannot be downloaded
            raise PenstockError(
                f"lm-eval cannot read the questions of {', '.join(task.name for task in tasks)}",
                f"{type(error).__name__}: {str(error)[:MAX_MESSAGE_CHARS]}.",
                "Without a network, use --data.",
            ) from error
    samples = [
        {**sample, "task": task.name} for task in tasks for sample in found["samples"][task.name]
    ]
    return Evaluation(
        metrics=_mean_metrics(
            [(found["results"][task.name], len(found["samples"][task.name])) for task in tasks]
        ),
        samples=samples,
        failures=model.failures,
        lm_eval_version=lm_eval.__version__,
    )


def _mean_metrics(results: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, float]:
    """The mean over all questions: a task's weight is its number of questions, as in lm-eval."""
    total = max(1, sum(count for _, count in results))
    sums: dict[str, float] = defaultdict(float)
    for metrics, count in results:
        for name, value in metrics.items():
            if "," in name and isinstance(value, int | float):
                sums[name] += float(value) * count
    return {name: value / total for name, value in sums.items()}


def _tolerant_model(asking: Asking) -> Any:
    from lm_eval.models.openai_completions import LocalChatCompletion

    class TolerantChat(LocalChatCompletion):
        """local-chat-completions, but a request that fails three times gets an empty reply."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.failures: Counter[str] = Counter()
            self._tries: Counter[Any] = Counter()
            self._num_in_a_row = 0

        async def amodel_call(self, session: Any, sem: Any, messages: Any, **options: Any) -> Any:
            if self._num_in_a_row >= MAX_IN_A_ROW:
                return [self._give_up(RuntimeError("not sent: the requests before it had failed"))]
            try:
                replies = await super().amodel_call(session, sem, messages, **options)
            except Exception as error:  # from aiohttp, asyncio or JSON: the server failed
                self._tries[messages[0]] += 1
                if self._tries[messages[0]] < MAX_TRIES:
                    raise
                return [self._give_up(error)]
            self._num_in_a_row = 0
            return replies

        def _give_up(self, error: Exception) -> str:
            self.failures[f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]] += 1
            self._num_in_a_row += 1
            return ""

    return TolerantChat(
        model=asking.model,
        base_url=asking.base_url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions",
        # With one request at a time, lm-eval uses another code path with fewer retries.
        num_concurrent=max(2, asking.num_concurrent),
        max_retries=MAX_TRIES,
        timeout=int(asking.timeout_s),
        seed=asking.seed,
    )
