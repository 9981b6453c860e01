"""What clients of a simulated fleet would see: goodput, percentiles, GPU utilization."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.eval.load_summary import Spread
from penstock.planning.engine import gap_of
from penstock.planning.node import NodeRun, Slo


@dataclass(slots=True)
class Outcome:
    """The outcome of a whole fleet. Times in seconds."""

    ttfts: list[float]
    tpots: list[float]
    gaps: Counter[int]
    num_kept: int = 0
    num_kept_tokens: int = 0
    num_refused: int = 0
    num_preemptions: int = 0
    num_output: int = 0
    num_input: int = 0
    num_cached: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0

    @classmethod
    def of(cls, runs: Iterable[NodeRun], slo: Slo) -> Outcome:
        total = cls([], [], Counter())
        for run in runs:
            for reply in run.replies:
                ttft_s, tpot_s = reply.ttft_s, reply.tpot_s
                total.ttfts.append(ttft_s)
                total.tpots.append(tpot_s)
                total.num_output += reply.num_generated
                total.num_input += len(reply.request.token_ids)
                total.num_cached += reply.num_cached
                if slo.is_kept(ttft_s, tpot_s):
                    total.num_kept += 1
                    total.num_kept_tokens += reply.num_generated
            total._add_counts(run)
        return total

    def _add_counts(self, run: Any) -> None:
        self.gaps.update(run.gaps)
        self.num_refused += run.num_refused
        self.num_preemptions += run.num_preemptions
        self.num_steps += run.num_steps
        self.busy_s += run.busy_s
        self.end_s = max(self.end_s, run.end_s)

    def add(self, other: Outcome) -> None:
        self.ttfts += other.ttfts
        self.tpots += other.tpots
        for name in ("num_kept", "num_kept_tokens", "num_output", "num_input", "num_cached"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._add_counts(other)

    @property
    def attainment(self) -> float:
        """Share of all requests that meet the SLO."""
        return self.num_kept / max(1, len(self.ttfts) + self.num_refused)

    def as_dict(self, num_engines: int) -> dict[str, Any]:
        """The result for this many engines, with durations in milliseconds like those of `bench
        serve`.
        """
        wall_s = max(self.end_s, 1e-9)
        return {
            "requests": len(self.ttfts),
            "refused": self.num_refused,
            "wall_s": round(wall_s, 3),
            "requests_s": round(len(self.ttfts) / wall_s, 3),
            "output_tok_s": round(self.num_output / wall_s, 1),
            "input_tok_s": round(self.num_input / wall_s, 1),
            "cached_tokens": self.num_cached,
            "goodput_requests_s": round(self.num_kept / wall_s, 3),
            "goodput_tok_s": round(self.num_kept_tokens / wall_s, 1),
            "attainment": round(self.attainment, 5),
            "ttft_ms": _in_ms(self.ttfts),
            "tpot_ms": _in_ms(self.tpots),
            "itl_ms": self._gap_percentiles(),
            "busy": round(self.busy_s / wall_s / num_engines, 4),
            "preemptions": self.num_preemptions,
            "steps": self.num_steps,
        }

    def _gap_percentiles(self) -> dict[str, float]:
        total, passed = self.gaps.total(), 0
        wanted = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
        found: dict[str, float] = {}
        for number, count in sorted(self.gaps.items()):
            passed += count
            for name, share in wanted.items():
                if name not in found and passed >= share * total:
                    found[name] = round(1e3 * gap_of(number), 3)
        return found


def _in_ms(seconds: Iterable[float]) -> dict[str, float]:
    spread = Spread.of(1e3 * value for value in seconds)
    return {} if spread is None else spread.as_dict()
