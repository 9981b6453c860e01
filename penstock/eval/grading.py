"""What every kind of problem comes down to: how many were asked, and how many were right in two senses."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
GATE = 0.875  # of the answers, exactly matched; below it a server's speed counts for nothing
MAX_WRONG_KEPT = 20


def ends_with_number(text: str, value: int) -> bool:
    """Whether the last number in a text is this one, however people may have written it."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return bool(numbers) and float(numbers[-1].replace(",", "")) == value


@dataclass(slots=True)
class Grades:
    """`num_flexible` are right however the number is written, `num_strict` in the form asked for."""

    problems: str
    num_asked: int
    num_flexible: int
    num_strict: int
    num_fewshot: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # requests without a reply; they count as wrong
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
