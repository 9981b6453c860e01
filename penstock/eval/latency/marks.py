"""What a quality task comes to: the share that was right, beside the gate and how it was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Mark:
    """`note` says how the asking differed from the contest's, where it did."""

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
