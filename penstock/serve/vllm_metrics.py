"""The same metrics by vLLM's names, so that dashboards made for vLLM work. Only metrics that mean
the same: what vLLM counts and we do not is left out.

Each has its model's name as a label; an engine's metrics also have the engine's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.serve.metrics import MISSED, Histogram, Metrics
from penstock.serve.replica import ReplicaReport
from penstock.types import EngineStats

FINISHED = ("stop", "length", "abort", "error")


def render(metrics: Metrics, replicas: Sequence[ReplicaReport], model_name: str) -> str:
    """Prometheus' text format."""
    stats = {report.replica: report.stats for report in replicas if report.stats}
    model = f'model_name="{_escaped(model_name)}"'
    return "\n".join([*_lines_of_engines(stats, model), *_lines_of_server(metrics, model)]) + "\n"


def _lines_of_engines(stats: Mapping[int, EngineStats], model: str) -> Iterator[str]:
    numbers = {replica: _numbers_of(one) for replica, one in stats.items()}
    for name, (kind, meaning) in _ENGINE_NUMBERS.items():
        samples = [
            f'vllm:{name}{{{model},engine="{replica}"}} {found[name]!r}'
            for replica, found in numbers.items()
        ]
        yield from _family(name, kind, meaning, samples)


def _numbers_of(stats: EngineStats) -> dict[str, float]:
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


_ENGINE_NUMBERS = {
    "num_requests_running": ("gauge", "penstock_requests_running"),
    "num_requests_waiting": ("gauge", "penstock_requests_waiting"),
    "kv_cache_usage_perc": ("gauge", "the part of penstock_pages in use, 0 to 1"),
    "gpu_cache_usage_perc": ("gauge", "the same, as it was once called"),
    "num_preemptions_total": ("counter", "penstock_preemptions_total"),
    "prefix_cache_queries_total": ("counter", "tokens of prompts, found or computed"),
    "prefix_cache_hits_total": ("counter", "penstock_prefix_tokens_reused_total"),
}


def _lines_of_server(metrics: Metrics, model: str) -> Iterator[str]:
    totals = {
        "prompt_tokens": metrics.num_prompt_tokens,
        "generation_tokens": metrics.num_generated_tokens,
    }
    for name, number in totals.items():
        meaning = f"penstock_{name.replace('generation', 'generated')}_total"
        yield from _family(
            f"{name}_total", "counter", meaning, [f"vllm:{name}_total{{{model}}} {number}"]
        )
    ended = [
        f'vllm:request_success_total{{{model},finished_reason="{why}"}} {metrics.num_replies[why]}'
        for why in FINISHED
    ]
    yield from _family("request_success_total", "counter", "replies that ended, by why", ended)
    histograms = {
        "time_to_first_token_seconds": (
            metrics.first_token_s,
            "penstock_time_to_first_token_seconds",
        ),
        "inter_token_latency_seconds": (metrics.inter_token_s, "penstock_inter_token_seconds"),
        "time_per_output_token_seconds": (metrics.inter_token_s, "the same, as it was once called"),
        "request_time_per_output_token_seconds": (
            metrics.token_s,
            "a reply's mean from token to token",
        ),
        "e2e_request_latency_seconds": (
            metrics.reply_s,
            "from a request's arrival to its reply's end",
        ),
        "request_prompt_tokens": (metrics.prompt_lengths, "tokens of a prompt"),
        "request_generation_tokens": (metrics.reply_lengths, "tokens of a reply"),
    }
    for name, (histogram, meaning) in histograms.items():
        yield from _histogram(name, meaning, histogram, model)


def _histogram(name: str, meaning: str, histogram: Histogram, model: str) -> Iterator[str]:
    counts = histogram.cumulative_counts
    edges = [*map(repr, histogram.bounds), "+Inf"]
    samples = [
        f'vllm:{name}_bucket{{{model},le="{edge}"}} {count}' for edge, count in zip(edges, counts)
    ]
    samples += [
        f"vllm:{name}_sum{{{model}}} {histogram.sum!r}",
        f"vllm:{name}_count{{{model}}} {counts[-1]}",
    ]
    return _family(name, "histogram", meaning, samples)


def _family(name: str, kind: str, meaning: str, samples: Iterable[str]) -> Iterator[str]:
    yield f"# HELP vllm:{name} {meaning}."
    yield f"# TYPE vllm:{name} {kind}"
    yield from samples


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
