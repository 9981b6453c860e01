"""GSM8K-CoT, 8-shot, as lm-evaluation-harness asks and grades it."""

from __future__ import annotations

from pathlib import Path

from penstock.eval.correctness.grading import Grades
from penstock.eval.lm_harness import Asking, LocalTask, evaluate

TASK = "penstock_gsm8k_cot"
NUM_FEWSHOT = 8
FLEXIBLE, STRICT = "flexible-extract", "strict-match"


def ask_gsm8k(data: Path | None, asking: Asking) -> Grades:
    """Asks the first problems of the file, or of the set that lm-eval fetches."""
    task = LocalTask(TASK, "gsm8k/gsm8k-cot.yaml", "test", data, {"num_fewshot": NUM_FEWSHOT})
    found = evaluate(task, asking)
    by_filter = {
        name: [sample for sample in found.samples if sample["filter"] == name] for name in (FLEXIBLE, STRICT)
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
            grades.keep_wrong(sample["doc"]["question"], str(sample["target"]), str(sample["resps"][0][0]))
    return grades
