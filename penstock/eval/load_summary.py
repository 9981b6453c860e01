"""The summary of a load: rates, latencies with their percentiles, lengths, and failures.

Rates and latencies include only replies without an error; the summary lists the errors. Durations
are in milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.eval.load import LoadResult

MAX_MESSAGES = 10


def percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile of ascending values, interpolated between the two nearest."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of one quantity, in its own unit."""

    min: float
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
        return cls(ordered[0], math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])

    def as_dict(self) -> dict[str, float]:
        return {
            name: round(getattr(self, name), 3)
            for name in ("mean", "p50", "p90", "p95", "p99", "max")
        }


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts as the server reports them, compared with the requested ones."""

    total: int
    min: int
    max: int
    num_off: int  # replies whose count differs from the requested one

    @classmethod
    def of(cls, counted: Sequence[int], asked: Sequence[int | None]) -> Lengths:
        num_off = sum(wanted not in (got, None) for got, wanted in zip(counted, asked, strict=True))
        return cls(sum(counted), min(counted, default=0), max(counted, default=0), num_off)

    def as_dict(self) -> dict[str, int]:
        return {"total": self.total, "min": self.min, "max": self.max, "off": self.num_off}


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """One level of a load."""

    num_requests: int
    errors: Counter[str]  # messages, and how often each occurred
    wall_s: float
    prompt: Lengths
    completion: Lengths
    num_cached_tokens: int  # prompt tokens found in the server's prefix cache
    num_events: int  # with text
    ttft: Spread | None
    itl: Spread | None  # gaps between events with text
    tpot: Spread | None  # each reply's mean time per token after the first
    e2e: Spread | None
    max_lag_ms: float
    client_cpu: float

    @property
    def num_errors(self) -> int:
        return self.errors.total()

    @property
    def num_ok(self) -> int:
        return self.num_requests - self.num_errors

    @property
    def tok_s(self) -> float:
        """Prompt and completion tokens per second."""
        return (self.prompt.total + self.completion.total) / self.wall_s

    @property
    def output_tok_s(self) -> float:
        return self.completion.total / self.wall_s

    @property
    def requests_s(self) -> float:
        return self.num_ok / self.wall_s

    @property
    def tokens_per_event(self) -> float | None:
        """1 if every token has its own event: only then is a gap the time of one token."""
        return round(self.completion.total / self.num_events, 3) if self.num_events else None

    def as_dict(self) -> dict[str, Any]:
        spreads = {
            "ttft_ms": self.ttft,
            "itl_ms": self.itl,
            "tpot_ms": self.tpot,
            "e2e_ms": self.e2e,
        }
        return {
            "requests": self.num_requests,
            "ok": self.num_ok,
            "errors": self.num_errors,
            "error_messages": dict(self.errors.most_common(MAX_MESSAGES)),
            "wall_s": round(self.wall_s, 4),
            "tok_s": round(self.tok_s, 2),
            "output_tok_s": round(self.output_tok_s, 2),
            "requests_s": round(self.requests_s, 4),
            **{name: spread.as_dict() if spread else None for name, spread in spreads.items()},
            "prompt_tokens": self.prompt.as_dict(),
            "completion_tokens": self.completion.as_dict(),
            "cached_tokens": self.num_cached_tokens,
            "tokens_per_event": self.tokens_per_event,
            "max_lag_ms": round(self.max_lag_ms, 2),
            "client_cpu": round(self.client_cpu, 3),
        }


def summarise(result: LoadResult) -> LoadSummary:
    good = [(request, reply) for request, reply in result.pairs if not reply.error]
    replies = [reply for _, reply in good]
    prompts = [reply.num_prompt_tokens for reply in replies]
    completions = [reply.num_completion_tokens for reply in replies]
    return LoadSummary(
        num_requests=len(result.replies),
        errors=Counter(reply.error for reply in result.replies if reply.error),
        wall_s=max(result.wall_s, 1e-9),
        prompt=Lengths.of(prompts, [request.num_prompt_tokens for request, _ in good]),
        completion=Lengths.of(completions, [request.max_tokens for request, _ in good]),
        num_cached_tokens=sum(reply.num_cached_tokens for reply in replies),
        num_events=sum(len(reply.token_times_s) for reply in replies),
        ttft=_spread_ms(reply.ttft_s for reply in replies),
        itl=_spread_ms(gap for reply in replies for gap in reply.gaps_s),
        tpot=_spread_ms(reply.tpot_s for reply in replies),
        e2e=_spread_ms(reply.e2e_s for reply in replies),
        max_lag_ms=result.max_lag_s * 1e3,
        client_cpu=result.client_cpu,
    )


def _spread_ms(seconds: Iterable[float | None]) -> Spread | None:
    return Spread.of(value * 1e3 for value in seconds if value is not None)
