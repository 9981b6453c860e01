"""What the server counts, in Prometheus' text format.

`Metrics` counts what this process sees of requests and tokens; queues, memory and the prefix cache
belong to the engines and come with each replica's report. Counting must cost a token next to
nothing. Knows no HTTP.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from penstock.serve.replica import ReplicaReport
from penstock.types import DraftStats, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MISSED = "missed_tokens_"  # prefix of an engine's counters of missed tokens; the reason follows

FIRST_TOKEN_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
INTER_TOKEN_BOUNDS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)

REPLY_BOUNDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
LENGTH_BOUNDS = tuple(float(2**power) for power in range(0, 21, 2))
FINISHED = ("stop", "length", "abort", "error")  # vLLM's reasons
NO_LABELS: Mapping[str, object] = {}


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
    stats = {report.replica: report.stats for report in replicas if report.stats}
    families = [
        *_of_server(metrics),
        *_of_replicas(replicas, num_moves),
        *_of_engines(stats),
        *_of_drafts({replica: one.drafts for replica, one in stats.items() if one.drafts}),
        *_of_prefixes(stats),
        *_of_experts({replica: one.experts for replica, one in stats.items() if one.experts}),
    ]
    return "".join(family.text("penstock_") for family in families)


def render_vllm_names(metrics: Metrics, replicas: Sequence[ReplicaReport], model_name: str) -> str:
    """The same metrics by vLLM's names, so that dashboards made for vLLM work. Contains only
    metrics with the same meaning: what vLLM counts and Penstock does not is left out.

    Each has its model's name as a label; an engine's metrics also have the engine's number.
    """
    model = {"model_name": model_name}
    numbers = {one.replica: _vllm_numbers(one.stats) for one in replicas if one.stats}
    families = []
    for name, (kind, meaning) in _VLLM_NUMBERS.items():
        samples = [("", {**model, "engine": key}, own[name]) for key, own in numbers.items()]
        families.append(Family(name, kind, meaning, samples))
    totals = {
        "prompt_tokens_total": metrics.num_prompt_tokens,
        "generation_tokens_total": metrics.num_generated_tokens,
    }
    for name, total in totals.items():
        meaning = f"penstock_{name.replace('generation', 'generated')}"
        families.append(Family(name, "counter", meaning, [("", model, total)]))
    ended = [("", {**model, "finished_reason": w}, metrics.num_replies[w]) for w in FINISHED]
    meaning = "replies that ended, by finish reason"
    families.append(Family("request_success_total", "counter", meaning, ended))
    for name, (attribute, meaning) in _VLLM_HISTOGRAMS.items():
        families.append(_histogram(name, meaning, getattr(metrics, attribute), model))
    return "".join(family.text("vllm:") for family in families)


class Family(NamedTuple):
    """A metric; each sample has a suffix of the name, labels and a value."""

    name: str
    kind: str
    meaning: str
    samples: Sequence[tuple[str, Mapping[str, object], float]]

    def text(self, prefix: str) -> str:
        name = prefix + self.name
        lines = [f"# HELP {name} {self.meaning}.", f"# TYPE {name} {self.kind}"]
        for suffix, labels, value in self.samples:
            pairs = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels.items())
            lines.append(f"{name}{suffix}{f'{{{pairs}}}' if pairs else ''} {value!r}")
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _of_server(metrics: Metrics) -> Iterator[Family]:
    answers = [("", {"status": status}, n) for status, n in metrics.num_answers.items()]
    yield Family("answers_total", "counter", "Requests that were answered", answers)
    yield _counter("prompt_tokens", "Prompt tokens", metrics.num_prompt_tokens)
    yield _counter("generated_tokens", "Generated tokens", metrics.num_generated_tokens)
    yield _counter("loops", "Replies that the loop guard ended", metrics.num_loops)
    meaning = "From a request's arrival to its first token"
    yield _histogram("time_to_first_token_seconds", meaning, metrics.first_token_s)
    meaning = "From one token of a reply to the next"
    yield _histogram("inter_token_seconds", meaning, metrics.inter_token_s)


def _of_replicas(replicas: Sequence[ReplicaReport], num_moves: int) -> Iterator[Family]:
    up = {report.replica: int(report.state in ("ready", "leaving")) for report in replicas}
    restarts = {report.replica: report.restarts for report in replicas}
    yield _per_replica("replica_up", "gauge", "Whether the engine can serve", up)
    yield _per_replica("replica_restarts_total", "counter", "Restarts of the engine", restarts)
    yield _counter("moved_requests", "Requests that moved to another engine", num_moves)


def _of_engines(stats: Mapping[int, EngineStats]) -> Iterator[Family]:
    for name, kind, meaning, attribute in _ENGINE_NUMBERS:
        numbers = {replica: getattr(one, attribute) for replica, one in stats.items()}
        yield _per_replica(name, kind, meaning, numbers)
    parts = [(replica, name, n) for replica, one in stats.items() for name, n in one.prefix.items()]
    lookups = [
        ("", {"replica": replica, "outcome": name}, n)
        for replica, name, n in parts
        if _is_outcome(name)
    ]
    meaning = "Prompts looked up in the prefix cache"
    yield Family("prefix_lookups_total", "counter", meaning, lookups)
    missed = [
        ("", {"replica": replica, "reason": name.removeprefix(MISSED)}, n)
        for replica, name, n in parts
        if name.startswith(MISSED)
    ]
    meaning = "Prompt tokens that had to be computed, and why"
    yield Family("prefix_missed_tokens_total", "counter", meaning, missed)


def _of_prefixes(stats: Mapping[int, EngineStats]) -> Iterator[Family]:
    for name in dict.fromkeys(name for one in stats.values() for name in one.prefix):
        if not (_is_outcome(name) or name.startswith(MISSED)):
            meaning = f"{name.replace('_', ' ').capitalize()} of the prefix cache"
            numbers = {replica: one.prefix[name] for replica, one in stats.items()}
            yield _per_replica(f"prefix_{name}_total", "counter", meaning, numbers)


def _of_drafts(drafts: Mapping[int, DraftStats]) -> Iterator[Family]:
    """Only for engines that may draft."""
    if not drafts:
        return
    for name, kind, meaning, attribute in _DRAFT_NUMBERS:
        numbers = {replica: getattr(one, attribute) for replica, one in drafts.items()}
        yield _per_replica(name, kind, meaning, numbers)
    for name, meaning, attribute in (
        ("drafted_tokens_total", "Tokens that were drafted", "num_drafted"),
        ("accepted_tokens_total", "Drafted tokens that were accepted", "num_accepted"),
    ):
        samples = [
            ("", {"replica": r, "drafter": n.drafter, "place": n.place}, getattr(n, attribute))
            for r, one in drafts.items()
            for n in one.counts
        ]
        yield Family(name, "counter", meaning, samples)


def _of_experts(experts: Mapping[int, Mapping[str, int]]) -> Iterator[Family]:
    """Only for engines whose device does not hold all experts."""
    if not experts:
        return
    for name, meaning in _EXPERT_NUMBERS:
        numbers = {replica: one.get(name, 0) for replica, one in experts.items()}
        yield _per_replica(f"expert_{name}_total", "counter", meaning, numbers)
    waits = {replica: one["wait_us"] / 1e6 for replica, one in experts.items()}
    meaning = "Time that steps waited for experts"
    yield _per_replica("expert_wait_seconds_total", "counter", meaning, waits)


_DRAFT_NUMBERS = (
    ("decodes_total", "counter", "Decodes: one request in one step", "num_decodes"),
    ("decoded_tokens_total", "counter", "Tokens that decodes generated", "num_tokens"),
    ("draft_saved_seconds", "gauge", "Measured time that drafts saved", "saved_s"),
)
_EXPERT_NUMBERS = (
    ("hits", "Experts of a step that were on the device"),
    ("misses", "Experts of a step that were not on the device"),
    ("fetched_bytes", "Bytes of experts that were copied to the device"),
    ("computed_bytes", "Bytes of experts that the CPU computed"),
    ("ram_hits", "Fetched experts that were in RAM"),
    ("disk_reads", "Fetched experts that were read from files"),
    ("disk_bytes", "Bytes of experts that were read from files"),
)
_ENGINE_NUMBERS = (
    ("requests_waiting", "gauge", "Requests that have no row yet", "num_waiting"),
    ("requests_running", "gauge", "Requests that have a row", "num_running"),
    ("pages", "gauge", "Pages of the KV cache", "num_pages"),
    ("kv_tokens", "gauge", "Tokens that fit into the KV cache", "num_kv_tokens"),
    ("free_pages", "gauge", "Pages that are free or can be evicted", "num_free_pages"),
    ("slots", "gauge", "Slots of recurrent state", "num_slots"),
    ("free_slots", "gauge", "Slots that are free or can be evicted", "num_free_slots"),
    ("checkpoints", "gauge", "State checkpoints in the prefix cache", "num_checkpoints"),
    ("memory_used_bytes", "gauge", "Device memory in use", "memory_used"),
    ("memory_bytes", "gauge", "Device memory", "memory_total"),
    ("sessions", "gauge", "Sessions that the prefix cache keeps", "num_sessions"),
    ("session_bytes", "gauge", "Bytes of cache that sessions keep", "session_bytes"),
    ("preemptions_total", "counter", "Preempted sequences", "num_preemptions"),
)
_VLLM_NUMBERS = {
    "num_requests_running": ("gauge", "penstock_requests_running"),
    "num_requests_waiting": ("gauge", "penstock_requests_waiting"),
    "kv_cache_usage_perc": ("gauge", "the fraction of penstock_pages in use, 0 to 1"),
    "gpu_cache_usage_perc": ("gauge", "the older name of vllm:kv_cache_usage_perc"),
    "num_preemptions_total": ("counter", "penstock_preemptions_total"),
    "prefix_cache_queries_total": ("counter", "prompt tokens, cached or computed"),
    "prefix_cache_hits_total": ("counter", "penstock_prefix_tokens_reused_total"),
}
_VLLM_HISTOGRAMS = {  # the attribute of `Metrics`, and its meaning
    "time_to_first_token_seconds": ("first_token_s", "penstock_time_to_first_token_seconds"),
    "inter_token_latency_seconds": ("inter_token_s", "penstock_inter_token_seconds"),
    "time_per_output_token_seconds": ("inter_token_s", "penstock_inter_token_seconds"),
    "request_time_per_output_token_seconds": ("token_s", "mean time between a reply's tokens"),
    "e2e_request_latency_seconds": ("reply_s", "from a request's arrival to its reply's end"),
    "request_prompt_tokens": ("prompt_lengths", "tokens per prompt"),
    "request_generation_tokens": ("reply_lengths", "tokens per reply"),
}


def _vllm_numbers(stats: EngineStats) -> dict[str, float]:
    num_pages = stats.num_pages - 1  # one is reserved
    usage = 1 - stats.num_free_pages / num_pages if num_pages > 0 else 0.0
    num_reused = stats.prefix.get("tokens_reused", 0)
    num_missed = sum(n for name, n in stats.prefix.items() if name.startswith(MISSED))
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": usage,
        "gpu_cache_usage_perc": usage,
        "num_preemptions_total": stats.num_preemptions,
        "prefix_cache_queries_total": num_reused + num_missed,
        "prefix_cache_hits_total": num_reused,
    }


def _is_outcome(name: str) -> bool:
    return name == "hit" or name.startswith("miss_")


def _per_replica(name: str, kind: str, meaning: str, numbers: Mapping[int, float]) -> Family:
    samples = [("", {"replica": replica}, number) for replica, number in numbers.items()]
    return Family(name, kind, meaning, samples)


def _counter(name: str, meaning: str, value: int) -> Family:
    return Family(f"{name}_total", "counter", meaning, [("", {}, value)])


def _histogram(
    name: str, meaning: str, histogram: Histogram, labels: Mapping[str, object] = NO_LABELS
) -> Family:
    counts, edges = histogram.cumulative_counts, [*map(repr, histogram.bounds), "+Inf"]
    samples: list[tuple[str, Mapping[str, object], float]] = [
        ("_bucket", {**labels, "le": edge}, count) for edge, count in zip(edges, counts)
    ]
    samples += [("_sum", labels, histogram.sum), ("_count", labels, counts[-1])]
    return Family(name, "histogram", meaning, samples)
