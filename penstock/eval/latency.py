"""The time of one whole reply to one client, at three lengths, compared with a baseline.

    penstock eval latency --base-url URL [--baseline F|URL --warmup 5 --runs 50 --output F]

Raw prompts go to /v1/completions, as in the contest; `--api chat` wraps them in a chat template.
One request runs at a time, no prompt twice; the median of the timed runs counts, and the mean of
the speed-ups is the rank. The baseline is the published one, an earlier result, or another server,
which is then measured in the same way, size by size. Exits with 1 if a request failed or a reply
did not have the requested length.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import require_choice, setting
from penstock.errors import ConfigError, PenstockError
from penstock.eval.chat_requests import NO_THINKING, ChatRequests, RawRequests
from penstock.eval.load import LoadClients, LoadResult
from penstock.eval.load_summary import LoadSummary, summarise
from penstock.eval.prompts import RequestMaker, make_prompts
from penstock.eval.recount import TokenCounter
from penstock.eval.results import (
    Reporter,
    ServerSettings,
    draw_seed,
    format_table,
    prepare_output,
    read_fields,
    read_results,
    require_above_zero,
    require_at_least,
)
from penstock.eval.traces import Arrival
from penstock.progress import timed

# Tokens of prompt and reply, and the time that Qwen3.5-4B takes for them on an A10G before any
# optimisation.
PUBLISHED_MS = {(64, 128): 2582.0, (2048, 256): 5441.0, (8192, 256): 6576.0}
APIS = {"completions": RawRequests, "chat": ChatRequests}
SIZES = ",".join(f"{prompt}+{reply}" for prompt, reply in PUBLISHED_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings(ServerSettings):
    """What to request, how often, and from which server."""

    api: str = setting(
        "completions", "endpoint: raw prompts, or chats with their template", choices=tuple(APIS)
    )
    sizes: str = setting(SIZES, "tokens of prompt+reply, a chat's template included")
    warmup: int = setting(5, "untimed requests per size, before the timed ones")
    runs: int = setting(50, "timed requests per size")
    tokenizer: str | None = setting(None, "the model's folder, to generate prompts")
    seed: int | None = setting(None, "seed for the prompts (default: random)")
    baseline: str | None = setting(
        None, "results of another server, or for latency its URL (default: the published times)"
    )
    timeout: float = setting(300.0, "seconds until a request fails")
    body: str | None = setting(
        None, "extra fields of every request, as JSON (default: chats without thinking)"
    )

    def __post_init__(self) -> None:
        require_at_least(1, runs=self.runs)
        require_at_least(0, warmup=self.warmup)
        require_above_zero(timeout=self.timeout)
        require_choice("--api", self.api, tuple(APIS))


@dataclass(frozen=True, slots=True)
class SizeResult:
    """The timed runs of one size."""

    num_prompt_tokens: int
    num_reply_tokens: int
    summary: LoadSummary
    num_off: int = 0  # runs whose prompt or reply did not have the requested length
    baseline_ms: float | None = None  # for the same size

    @property
    def median_ms(self) -> float | None:
        return self.summary.e2e.p50 if self.summary.e2e else None

    @property
    def speed_up(self) -> float | None:
        return self.baseline_ms / self.median_ms if self.baseline_ms and self.median_ms else None

    def as_json(self) -> dict[str, Any]:
        e2e = self.summary.e2e
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "reply_tokens": self.num_reply_tokens,
            "runs": self.summary.num_ok,
            "failed": self.summary.num_errors,
            "error_messages": dict(self.summary.errors.most_common(10)),
            "other_length": self.num_off,
            "median_ms": _rounded(self.median_ms),
            "min_ms": _rounded(e2e.min) if e2e else None,
            "p90_ms": _rounded(e2e.p90) if e2e else None,
            "published_ms": PUBLISHED_MS.get((self.num_prompt_tokens, self.num_reply_tokens)),
            "baseline_ms": _rounded(self.baseline_ms),
            "speed_up": _rounded(self.speed_up),
        }


def read_sizes(text: str) -> list[tuple[int, int]]:
    sizes = []
    for part in text.split(","):
        prompt, _, reply = part.partition("+")
        if not (
            prompt.strip().isdecimal() and reply.strip().isdecimal() and int(prompt) and int(reply)
        ):
            raise ConfigError(
                f"--sizes has {part!r}", "A size is written as tokens of prompt+reply: 64+128."
            )
        sizes.append((int(prompt), int(reply)))
    return sizes


def run(settings: LatencySettings, reporter: Reporter) -> int:
    sizes = read_sizes(settings.sizes)
    prepare_output(settings.output)
    seed, is_raw = draw_seed(settings.seed), settings.api == "completions"
    default_body = "{}" if is_raw else NO_THINKING
    body = read_fields("--body", default_body if settings.body is None else settings.body)
    api = APIS[settings.api](
        settings.base_url, settings.model, extra=body, timeout_s=settings.timeout
    )
    known, other = read_baseline(settings.baseline), None
    if settings.baseline is not None and is_url(settings.baseline):
        other = APIS[settings.api](settings.baseline, extra=body, timeout_s=settings.timeout)
    counter = TokenCounter.load(settings.tokenizer) if settings.tokenizer else None
    with reporter.bars() as phases, timed("prompts", phases):
        prompts = make_prompts(api, counter, seed)
        prompts.make(0, min(size[0] for size in sizes))  # refuses a length that is too short
    print(f"seed {seed}; {api.path}", flush=True)
    results, maker = [], RequestMaker(prompts)
    with LoadClients() as clients:
        for size in sizes:
            warmups = maker.make([Arrival(0.0, *size)] * settings.warmup)
            requests = maker.make([Arrival(0.0, *size)] * settings.runs)
            name, bars = "{}+{}".format(*size), reporter.bars
            given: dict[str, Any] = {"concurrency": 1, "bars": bars, "warmups": warmups}
            if other is not None:
                load = clients.measure(f"{name} of the baseline", other, requests, **given)
                theirs = judge_size(*size, load)
                _require_baseline(theirs, settings)
                known[size] = theirs.median_ms or 0.0
            load = clients.measure(name, api, requests, **given)
            results.append(judge_size(*size, load, known.get(size)))
    print(format_results(results))
    speed_ups = [result.speed_up for result in results if result.speed_up is not None]
    num_ranked = len(results) if settings.baseline else len(PUBLISHED_MS)
    mean = statistics.fmean(speed_ups) if len(speed_ups) == num_ranked else None
    if mean is not None:
        print(f"\nmean speed-up {mean:.2f}x over {settings.baseline or 'the published baseline'}")
    fields = {
        "benchmark": "latency",
        "sizes": [result.as_json() for result in results],
        "mean_speed_up": _rounded(mean),
        "model": api.model,
        "base_url": settings.base_url,
        "baseline": settings.baseline or "published",
        "warmup": settings.warmup,
        "endpoint": api.path,
        "seed": seed,
        "template_tokens": prompts.num_template_tokens,
    }
    reporter.deliver(fields, settings.output)
    return int(any(result.summary.num_errors or result.num_off for result in results))


def read_baseline(baseline: str | None) -> dict[tuple[int, int], float]:
    """Milliseconds by size: the published ones, or a file's; none for a server, measured later."""
    if baseline is None:
        return dict(PUBLISHED_MS)
    if is_url(baseline):
        return {}
    fields = read_results("--baseline", baseline)
    try:
        return {
            (int(size["prompt_tokens"]), int(size["reply_tokens"])): float(size["median_ms"])
            for size in fields["sizes"]
            if size["median_ms"] is not None
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--baseline {baseline} has no latencies",
            f"`sizes` with prompt_tokens, reply_tokens and median_ms are expected ({error!r}).",
            "Use a file that `penstock eval latency --output FILE` wrote, or the URL of a server.",
        ) from None


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _require_baseline(theirs: SizeResult, settings: LatencySettings) -> None:
    if theirs.summary.num_errors or theirs.num_off or theirs.median_ms is None:
        errors = [message for message, _ in theirs.summary.errors.most_common(1)]
        raise PenstockError(
            f"The baseline {settings.baseline} cannot be measured",
            f"{theirs.summary.num_errors} requests failed, and {theirs.num_off} replies had the "
            f"wrong length{': ' + errors[0] if errors else ''}.",
            "It must honour ignore_eos and max_tokens.",
        )


def judge_size(
    num_prompt: int, num_reply: int, load: LoadResult, baseline_ms: float | None = None
) -> SizeResult:
    wanted = (num_prompt, num_reply)
    num_off = sum(
        not reply.error and (reply.num_prompt_tokens, reply.num_completion_tokens) != wanted
        for reply in load.replies
    )
    return SizeResult(num_prompt, num_reply, summarise(load), num_off, baseline_ms)


def format_results(results: Sequence[SizeResult]) -> str:
    def cell(value: float | None, form: str = ",.1f") -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            f"{result.num_prompt_tokens}+{result.num_reply_tokens}",
            str(result.summary.num_ok),
            cell(result.median_ms),
            cell(result.baseline_ms),
            cell(result.speed_up, ".2f"),
            str(result.summary.num_errors),
            str(result.num_off),
        ]
        for result in results
    ]
    columns = ["tokens", "runs", "median ms", "baseline ms", "speed-up", "failed", "other length"]
    lines = [format_table(columns, rows)]
    for result in results:
        lines += [
            f"{count} FAILED: {message}" for message, count in result.summary.errors.most_common(3)
        ]
    return "\n".join(lines)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
