"""What the server counts, in Prometheus' text format.

`Metrics` counts what this process sees of requests and tokens; queues, memory and the prefix cache
belong to the engines and come with each replica's report. Counting must cost a token next to
nothing. Knows no HTTP.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from penstock.serve.replica import ReplicaReport
from penstock.types import DraftStats, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MISSED = "missed_tokens_"  # prefix of an engine's counters of missed tokens; the reason follows

FIRST_TOKEN_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
INTER_TOKEN_BOUNDS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)

REPLY_BOUNDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
LENGTH_BOUNDS = tuple(float(2**power) for power in range(0, 21, 2))


class Histogram:
    """How many values were below each bound, and their sum."""

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
        self.num_answers: Counter[int] = Counter()  # by status
        self.num_loops = 0
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS)
        self.num_replies: Counter[str] = Counter()  # ended ones, by finish reason
        self.reply_s = Histogram(REPLY_BOUNDS)
        self.token_s = Histogram(INTER_TOKEN_BOUNDS)  # a reply's mean time between tokens
        self.prompt_lengths = Histogram(LENGTH_BOUNDS)
        self.reply_lengths = Histogram(LENGTH_BOUNDS)


class TokenTimer:
    """Counts the tokens of one reply, and measures the times to the first and between tokens."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, asked_at: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._asked_at = self._last_at = asked_at
        self._first_at = 0.0
        self._num_tokens = 0
        self._has_ended = False

    def count(self, num_tokens: int) -> None:
        """Counts new tokens, several at once or none."""
        if not num_tokens:
            return
        metrics = self._metrics
        now = time.monotonic()
        seconds, self._last_at = now - self._last_at, now
        metrics.num_generated_tokens += num_tokens
        if self._num_tokens:
            metrics.inter_token_s.observe(seconds / num_tokens, num_tokens)
        else:
            self._first_at = now
            metrics.num_prompt_tokens += self._num_prompt_tokens
            metrics.first_token_s.observe(seconds)
        self._num_tokens += num_tokens

    def end(self, why: str) -> None:
        """The reply has ended; only the first reason counts."""
        if self._has_ended:
            return
        self._has_ended = True
        metrics = self._metrics
        metrics.num_replies[why] += 1
        metrics.reply_s.observe(time.monotonic() - self._asked_at)
        metrics.prompt_lengths.observe(self._num_prompt_tokens)
        metrics.reply_lengths.observe(self._num_tokens)
        if self._num_tokens > 1:
            metrics.token_s.observe((self._last_at - self._first_at) / (self._num_tokens - 1))

    def count_loop(self) -> None:
        self._metrics.num_loops += 1


def render(metrics: Metrics, replicas: Sequence[ReplicaReport], num_moves: int) -> str:
    """Prometheus' text format. A replica without stats is starting, dead, or in a long step."""
    lines = [*_lines_of_server(metrics), *_lines_of_replicas(replicas, num_moves)]
    lines += _lines_of_engines(
        {report.replica: report.stats for report in replicas if report.stats}
    )
    return "\n".join(lines) + "\n"


def _lines_of_server(metrics: Metrics) -> Iterator[str]:
    answers = [
        f'penstock_answers_total{{status="{status}"}} {n}'
        for status, n in metrics.num_answers.items()
    ]
    yield from _family("answers_total", "counter", "requests that were answered", answers)
    yield from _counter("prompt_tokens", "prompt tokens", metrics.num_prompt_tokens)
    yield from _counter("generated_tokens", "generated tokens", metrics.num_generated_tokens)
    yield from _counter("loops", "replies that the loop guard ended", metrics.num_loops)
    yield from _histogram(
        "time_to_first_token_seconds",
        "from a request's arrival to its first token",
        metrics.first_token_s,
    )
    yield from _histogram(
        "inter_token_seconds", "from one token of a reply to the next", metrics.inter_token_s
    )


def _lines_of_replicas(replicas: Sequence[ReplicaReport], num_moves: int) -> Iterator[str]:
    up = {report.replica: int(report.state in ("ready", "leaving")) for report in replicas}
    restarts = {report.replica: report.restarts for report in replicas}
    yield from _per_replica("replica_up", "gauge", "whether the engine can serve", up)
    yield from _per_replica("replica_restarts_total", "counter", "restarts of the engine", restarts)
    yield from _counter("moved_requests", "requests that moved to another engine", num_moves)


def _lines_of_engines(stats: Mapping[int, EngineStats]) -> Iterator[str]:
    for name, kind, meaning, attribute in _ENGINE_NUMBERS:
        numbers = {replica: getattr(one, attribute) for replica, one in stats.items()}
        yield from _per_replica(name, kind, meaning, numbers)
    lookups = [
        f'penstock_prefix_lookups_total{{replica="{replica}",outcome="{outcome}"}} {n}'
        for replica, one in stats.items()
        for outcome, n in one.prefix.items()
        if _is_outcome(outcome)
    ]
    yield from _family(
        "prefix_lookups_total", "counter", "prompts looked up in the prefix cache", lookups
    )
    missed = [
        f'penstock_prefix_missed_tokens_total{{replica="{replica}",'
        f'reason="{name.removeprefix(MISSED)}"}} {n}'
        for replica, one in stats.items()
        for name, n in one.prefix.items()
        if name.startswith(MISSED)
    ]
    meaning = "prompt tokens that had to be computed, and why"
    yield from _family("prefix_missed_tokens_total", "counter", meaning, missed)
    yield from _lines_of_drafts(
        {replica: one.drafts for replica, one in stats.items() if one.drafts}
    )
    names = dict.fromkeys(name for one in stats.values() for name in one.prefix)
    others = [name for name in names if not (_is_outcome(name) or name.startswith(MISSED))]
    for name in others:
        meaning = f"{name.replace('_', ' ')} of the prefix cache"
        numbers = {replica: one.prefix[name] for replica, one in stats.items()}
        yield from _per_replica(f"prefix_{name}_total", "counter", meaning, numbers)
    yield from _lines_of_experts(stats)


def _lines_of_drafts(drafts: Mapping[int, DraftStats]) -> Iterator[str]:
    """Only of engines that may draft."""
    if not drafts:
        return
    for name, kind, meaning, attribute in _DRAFT_NUMBERS:
        numbers = {replica: getattr(one, attribute) for replica, one in drafts.items()}
        yield from _per_replica(name, kind, meaning, numbers)
    for name, meaning, attribute in (
        ("drafted_tokens_total", "tokens that were drafted", "num_drafted"),
        ("accepted_tokens_total", "drafts that were right", "num_accepted"),
    ):
        samples = [
            f'penstock_{name}{{replica="{replica}",drafter="{count.drafter}",'
            f'place="{count.place}"}} {getattr(count, attribute)}'
            for replica, one in drafts.items()
            for count in one.counts
        ]
        yield from _family(name, "counter", meaning, samples)


_DRAFT_NUMBERS = (
    ("decodes_total", "counter", "decodes: one request in one step", "num_decodes"),
    ("decoded_tokens_total", "counter", "tokens that decodes brought", "num_tokens"),
    ("draft_saved_seconds", "gauge", "time that drafts saved, as measured", "saved_s"),
)


def _lines_of_experts(stats: Mapping[int, EngineStats]) -> Iterator[str]:
    """Only of engines whose device does not hold all experts."""
    some = {replica: one.experts for replica, one in stats.items() if one.experts}
    if not some:
        return
    for name, meaning in _EXPERT_NUMBERS:
        numbers = {replica: one.get(name, 0) for replica, one in some.items()}
        yield from _per_replica(f"expert_{name}_total", "counter", meaning, numbers)
    waits = {replica: one["wait_us"] / 1e6 for replica, one in some.items()}
    meaning = "time that steps waited for experts"
    yield from _per_replica("expert_wait_seconds_total", "counter", meaning, waits)


_EXPERT_NUMBERS = (
    ("hits", "experts of a step that were on the device"),
    ("misses", "experts of a step that were not on the device"),
    ("fetched_bytes", "bytes of experts that were copied to the device"),
    ("computed_bytes", "bytes of experts that the CPU multiplied with"),
    ("ram_hits", "fetched experts that were in RAM"),
    ("disk_reads", "fetched experts that were read from files"),
    ("disk_bytes", "bytes of experts that were read from files"),
)
_ENGINE_NUMBERS = (
    ("requests_waiting", "gauge", "requests that have no row yet", "num_waiting"),
    ("requests_running", "gauge", "requests that have a row", "num_running"),
    ("pages", "gauge", "pages of keys and values", "num_pages"),
    ("kv_tokens", "gauge", "tokens whose keys and values fit", "num_kv_tokens"),
    ("free_pages", "gauge", "pages that are free or can be evicted", "num_free_pages"),
    ("slots", "gauge", "slots of recurrent state", "num_slots"),
    ("free_slots", "gauge", "slots that are free or can be evicted", "num_free_slots"),
    ("checkpoints", "gauge", "states that prompts may continue from", "num_checkpoints"),
    ("memory_used_bytes", "gauge", "memory of the device in use", "memory_used"),
    ("memory_bytes", "gauge", "memory of the device", "memory_total"),
    ("sessions", "gauge", "conversations that the prefix cache keeps", "num_sessions"),
    ("session_bytes", "gauge", "bytes of the cache that they keep", "session_bytes"),
    ("preemptions_total", "counter", "preempted sequences", "num_preemptions"),
)


def _is_outcome(name: str) -> bool:
    return name == "hit" or name.startswith("miss_")


def _per_replica(name: str, kind: str, meaning: str, numbers: Mapping[int, float]) -> Iterator[str]:
    samples = [
        f'penstock_{name}{{replica="{replica}"}} {number}' for replica, number in numbers.items()
    ]
    return _family(name, kind, meaning, samples)


def _counter(name: str, meaning: str, value: int) -> Iterator[str]:
    return _family(f"{name}_total", "counter", meaning, [f"penstock_{name}_total {value}"])


def _histogram(name: str, meaning: str, histogram: Histogram) -> Iterator[str]:
    counts = histogram.cumulative_counts
    edges = [*map(repr, histogram.bounds), "+Inf"]
    samples = [
        f'penstock_{name}_bucket{{le="{edge}"}} {count}' for edge, count in zip(edges, counts)
    ]
    samples += [f"penstock_{name}_sum {histogram.sum!r}", f"penstock_{name}_count {counts[-1]}"]
    return _family(name, "histogram", meaning, samples)


def _family(name: str, kind: str, meaning: str, samples: Iterable[str]) -> Iterator[str]:
    yield f"# HELP penstock_{name} {meaning.capitalize()}."
    yield f"# TYPE penstock_{name} {kind}"
    yield from samples
