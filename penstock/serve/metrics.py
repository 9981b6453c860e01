"""What the server counts, and the text in which Prometheus reads it.

`Metrics` is what this process has seen of requests and tokens; queues, memory and the prefix cache are the
engine's and come as its `EngineStats`. Counting must cost a token next to nothing. Knows no HTTP.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from penstock.types import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
INTER_TOKEN_BOUNDS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)


class Histogram:
    """How many values fell below each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)  # the last: above every bound

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def cumulative_counts(self) -> list[int]:
        return list(accumulate(self._counts))


class Metrics:
    """Totals since the server started."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS)


class TokenTimer:
    """Counts the tokens of one reply and when they come: after the request, and after each other."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, asked_at: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._last_at = asked_at
        self._has_tokens = False

    def count(self, num_tokens: int) -> None:
        """Tokens that have just come, several at once or none."""
        if not num_tokens:
            return
        metrics = self._metrics
        now = time.monotonic()
        seconds, self._last_at = now - self._last_at, now
        metrics.num_generated_tokens += num_tokens
        if self._has_tokens:
            metrics.inter_token_s.observe(seconds / num_tokens, num_tokens)
        else:
            self._has_tokens = True
            metrics.num_prompt_tokens += self._num_prompt_tokens
            metrics.first_token_s.observe(seconds)


def render(metrics: Metrics, stats: EngineStats | None) -> str:
    """Prometheus' text format. Without stats the engine is starting, dead, or in a long step."""
    lines = [*_lines_of_server(metrics)]
    if stats is not None:
        lines += _lines_of_engine(stats)
    return "\n".join(lines) + "\n"


def _lines_of_server(metrics: Metrics) -> Iterator[str]:
    yield from _counter("prompt_tokens", "tokens of prompts that were read", metrics.num_prompt_tokens)
    yield from _counter("generated_tokens", "tokens that were generated", metrics.num_generated_tokens)
    yield from _histogram(
        "time_to_first_token_seconds", "from a request's arrival to its first token", metrics.first_token_s
    )
    yield from _histogram(
        "inter_token_seconds", "from one token of a reply to the next", metrics.inter_token_s
    )


def _lines_of_engine(stats: EngineStats) -> Iterator[str]:
    yield from _gauge("requests_waiting", "requests that have no row yet", stats.num_waiting)
    yield from _gauge("requests_running", "requests that have a row", stats.num_running)
    yield from _gauge("pages", "pages of keys and values", stats.num_pages)
    yield from _gauge("free_pages", "pages that are free or would be given back", stats.num_free_pages)
    yield from _gauge("slots", "slots of recurrent state", stats.num_slots)
    yield from _gauge("free_slots", "slots that are free or would be given back", stats.num_free_slots)
    yield from _counter("preemptions", "sequences that had to give up their row", stats.num_preemptions)
    outcomes = {name: n for name, n in stats.prefix.items() if name == "hit" or name.startswith("miss_")}
    samples = [f'penstock_prefix_lookups_total{{outcome="{name}"}} {n}' for name, n in outcomes.items()]
    yield from _family("prefix_lookups_total", "counter", "prompts looked up in the prefix cache", samples)
    for name, n in stats.prefix.items():
        if name not in outcomes:
            yield from _counter(f"prefix_{name}", f"{name.replace('_', ' ')} of the prefix cache", n)


def _gauge(name: str, meaning: str, value: int) -> Iterator[str]:
    return _family(name, "gauge", meaning, [f"penstock_{name} {value}"])


def _counter(name: str, meaning: str, value: int) -> Iterator[str]:
    return _family(f"{name}_total", "counter", meaning, [f"penstock_{name}_total {value}"])


def _histogram(name: str, meaning: str, histogram: Histogram) -> Iterator[str]:
    counts = histogram.cumulative_counts
    edges = [*map(repr, histogram.bounds), "+Inf"]
    samples = [f'penstock_{name}_bucket{{le="{edge}"}} {count}' for edge, count in zip(edges, counts)]
    samples += [f"penstock_{name}_sum {histogram.sum!r}", f"penstock_{name}_count {counts[-1]}"]
    return _family(name, "histogram", meaning, samples)


def _family(name: str, kind: str, meaning: str, samples: Iterable[str]) -> Iterator[str]:
    yield f"# HELP penstock_{name} {meaning.capitalize()}."
    yield f"# TYPE penstock_{name} {kind}"
    yield from samples
