"""MMLU-Pro and IFEval as in the contest, by lm-evaluation-harness: shots, limits, metrics, gates.

MMLU-Pro's five worked examples are of a question's own subject and come from its validation set:
offline, `validation.jsonl` beside the questions. Without that file there are no examples, and the
result has a note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.eval.lm_harness import Asking, LocalTask, evaluate, read_lines

EXAMPLES = "validation.jsonl"
ASK_FOR_A_LETTER = (
    "The following is a multiple choice question. Think step by step and then finish your answer "
    "with "
    '"the answer is (X)" where X is the correct letter choice.\n'
)
WITHOUT_EXAMPLES: Mapping[str, Any] = {
    "num_fewshot": 0,
    "fewshot_split": None,
    "fewshot_config": None,
    "description": ASK_FOR_A_LETTER,
}
SUBJECTS = (
    *("biology", "business", "chemistry", "computer science", "economics", "engineering", "health"),
    *("history", "law", "math", "other", "philosophy", "physics", "psychology"),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """The gated metric by lm-eval's name, the share it needs, and how questions are asked."""

    metric: str
    gate: float
    num_fewshot: int
    max_tokens: int = 512
    packages: tuple[str, ...] = ()


KINDS: Mapping[str, Kind] = {
    "mmlu_pro": Kind("exact_match,custom-extract", 0.621, num_fewshot=5),
    "ifeval": Kind(
        "inst_level_strict_acc,none",
        0.814,
        num_fewshot=0,
        packages=("langdetect", "immutabledict", "nltk"),
    ),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """The result of a task: the share of right answers, the gate, and how questions were asked.

    `note`: how the questions differed from the contest's, if they did.
    """

    name: str
    metric: str
    share: float
    gate: float
    num_asked: int
    num_without_reply: int
    num_fewshot: int
    max_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def has_passed(self) -> bool:
        return self.num_asked > 0 and self.share >= self.gate

    def as_json(self) -> dict[str, Any]:
        return {
            "task": self.name,
            "metric": self.metric,
            "share": round(self.share, 4),
            "gate": self.gate,
            "passed": self.has_passed,
            "asked": self.num_asked,
            "without_reply": self.num_without_reply,
            "num_fewshot": self.num_fewshot,
            "max_tokens": self.max_tokens,
            "metrics": dict(self.metrics),
            "note": self.note or None,
        }


def ask_task(name: str, questions: Path | None, asking: Asking) -> Mark:
    """`questions` is a local file; None: the data set that lm-eval downloads."""
    kind, note = KINDS[name], ""
    if name == "ifeval":
        tasks = [LocalTask("penstock_ifeval", "ifeval/ifeval.yaml", "train", questions)]
    elif questions is not None and not (questions.parent / EXAMPLES).is_file():
        tasks = [mmlu_without_examples(questions)]
        note = f"without worked examples: {questions.parent} has no {EXAMPLES}"
    else:
        tasks = mmlu_by_subject(questions)
    num_fewshot = 0 if note else kind.num_fewshot
    limit = asking.limit if asking.limit < 1 else math.ceil(asking.limit / len(tasks))
    found = evaluate(tasks, replace(asking, limit=limit))
    if kind.metric not in found.metrics:
        raise PenstockError(
            f"lm-eval reports no {kind.metric} for {name}",
            f"It reports {', '.join(found.metrics) or 'nothing'}.",
            "Install the version in docs/harness.md.",
        )
    return Mark(
        name=name,
        metric=kind.metric,
        share=found.metrics[kind.metric],
        gate=kind.gate,
        num_asked=found.num_asked,
        num_without_reply=found.failures.total(),
        num_fewshot=num_fewshot,
        max_tokens=asking.max_tokens,
        metrics=found.metrics,
        note=note,
    )


def mmlu_without_examples(questions: Path) -> LocalTask:
    source = "mmlu_pro/_default_template_yaml"
    return LocalTask("penstock_mmlu_pro", source, "test", questions, changes=WITHOUT_EXAMPLES)


def mmlu_by_subject(questions: Path | None) -> list[LocalTask]:
    """A task for each subject with questions: lm-eval takes worked examples from the same task."""
    subjects: Sequence[str] = SUBJECTS
    examples = None
    if questions is not None:
        held = {row.get("category") for row in read_lines(questions)}
        subjects = [subject for subject in SUBJECTS if subject in held]
        examples = questions.parent / EXAMPLES
        if not subjects:
            raise PenstockError(
                f"{questions} has no question of MMLU-Pro",
                "None of its lines has a subject of MMLU-Pro as its category.",
                f"The subjects are {', '.join(SUBJECTS)}.",
            )
    names = [subject.replace(" ", "_") for subject in subjects]
    return [
        LocalTask(
            f"penstock_mmlu_pro_{name}",
            f"mmlu_pro/mmlu_pro_{name}.yaml",
            "test",
            questions,
            examples=examples,
        )
        for name in names
    ]
