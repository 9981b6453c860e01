"""Tokens a second at several levels of concurrency, counted by the judge and not by the judged.

    penstock eval throughput --base-url URL [--num-requests 64 --input-tokens 1024 --max-tokens 1024
                             --concurrency 1,2,4,8,16,32,64 --output F --baseline F]

With a tokenizer, named or found, prompts are random tokens and completions are tokenised again. Without one
prompts are made of words that the server counts as one token each, and nothing that it counts is called
verified. A level that fails is reported, and the next one is tried. Ends with 0 when nothing failed and
nothing was flagged, else with 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

from penstock.config import setting
from penstock.errors import ConfigError, PenstockError
from penstock.eval.chat_requests import ChatRequests
from penstock.eval.contest_files import contest_level, read_throughput
from penstock.eval.correctness.run_correctness import NO_THINKING
from penstock.eval.find_tokenizer import HOW_TO_VERIFY, FoundTokenizer, find_tokenizer
from penstock.eval.load import Job, LoadClients, LoadProgress, LoadResult, OnProgress
from penstock.eval.recount import ReplyCounter, TokenCounter
from penstock.eval.results import (
    Reporter,
    draw_seed,
    format_table,
    output_file,
    percent,
    prepare_output,
    read_fields,
    require_at_least,
)
from penstock.eval.sized_prompts import fit_prompts
from penstock.eval.stream_client import Target
from penstock.eval.throughput.level import LevelResult, Request, insert_spot_checks, judge_level
from penstock.eval.throughput.token_prompts import TokenPrompts
from penstock.progress import Phase, timed

NUM_WARMUPS = 2
WARMUP_TOKENS = 32
LEVELS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings:
    """What is sent, how much of it at a time, and what it is compared with."""

    base_url: str = setting("http://127.0.0.1:8000", "a running server")
    model: str = setting("", "name to send (default: the server's first model)")
    num_requests: int = setting(64, "requests of a level", aliases=("--num-prompts",))
    input_tokens: int = setting(1024, "tokens of a prompt, chat template included")
    max_tokens: int = setting(1024, "of a reply, which may end earlier")
    concurrency: tuple[int, ...] = setting(LEVELS, "requests at a time, one level each")
    output: str | None = setting(None, "also write the last line to this file")
    output_dir: str | None = setting(None, "folder for it instead: correctness.json or throughput.json")
    baseline: str | None = setting(None, "results of another server, to be compared with")
    tokenizer: str | None = setting(None, "the model's folder, to make prompts and count again with")
    seed: int | None = setting(None, "of prompts and spot checks (default: drawn anew)")
    timeout: float = setting(600.0, "seconds after which a request has failed")
    body: str = setting(NO_THINKING, f"fields for every request, as JSON (default: {NO_THINKING})")
    stream: bool = setting(True, "ask for streams; without them there are no times to a first token")

    def __post_init__(self) -> None:
        require_at_least(
            1, num_requests=self.num_requests, input_tokens=self.input_tokens, max_tokens=self.max_tokens
        )
        for level in self.concurrency:
            require_at_least(1, concurrency=level)
        if not self.timeout > 0:
            raise ConfigError(f"--timeout is {self.timeout}", "It must be above 0.")


class Prompts(Protocol):
    @property
    def is_exact(self) -> bool: ...

    @property
    def num_template_tokens(self) -> int: ...

    def make(self, index: int, num_tokens: int, /) -> str: ...


def run(settings: ThroughputSettings, reporter: Reporter) -> int:
    output = output_file(settings.output, settings.output_dir, "throughput.json")
    prepare_output(output)
    body = read_fields("--body", settings.body)
    baseline = read_throughput("--baseline", settings.baseline).levels if settings.baseline else {}
    if settings.tokenizer:
        TokenCounter.load(settings.tokenizer)  # a mistake in it is said before the server is asked
    settings = replace(settings, seed=draw_seed(settings.seed))
    requests = ChatRequests(settings.base_url, settings.model, extra=body, timeout_s=settings.timeout)
    with reporter.bars() as phases, timed("prompts", phases):
        found = find_tokenizer(settings.tokenizer, requests.client, requests.model)
        prompts = _make_prompts(settings, requests, found.local)
    print(f"seed {settings.seed}; {_about_counts(found)}", flush=True)
    levels: list[LevelResult] = []
    with LoadClients() as clients:
        measuring = _Measuring(settings, requests, prompts, found.counter, clients, reporter)
        for concurrency in settings.concurrency:
            levels.append(measuring.measure(concurrency))
            print(describe(levels[-1], baseline.get(concurrency)), flush=True)
    print(f"\n{format_levels(levels, baseline)}")
    reporter.deliver(_report(settings, requests, prompts, levels, baseline, found), output)
    return int(not all(level.is_clean for level in levels))


def _about_counts(found: FoundTokenizer) -> str:
    if found.counter is None:
        return (
            f"tokens are NOT VERIFIED: no tokenizer was found, so the server's counts stand. {HOW_TO_VERIFY}"
        )
    return f"tokens are counted again with {found.source}"


def _make_prompts(
    settings: ThroughputSettings, requests: ChatRequests, counter: TokenCounter | None
) -> Prompts:
    prompts: Prompts
    if counter is not None:
        prompts = TokenPrompts(counter, draw_seed(settings.seed))
    else:
        prompts = fit_prompts(requests.count_tokens, draw_seed(settings.seed))
    prompts.make(0, settings.input_tokens)  # refuses a length that is too short before anything is measured
    return prompts


class _Measuring:
    """Measures one level after the other; no prompt is sent twice."""

    def __init__(
        self,
        settings: ThroughputSettings,
        requests: ChatRequests,
        prompts: Prompts,
        counter: ReplyCounter | None,
        clients: LoadClients,
        reporter: Reporter,
    ) -> None:
        self._settings = settings
        self._requests = requests
        self._prompts = prompts
        self._counter = counter
        self._clients = clients
        self._reporter = reporter
        self._num_prompts = 0

    def measure(self, concurrency: int) -> LevelResult:
        """A server that does not even let us connect makes a level that failed, not a crash."""
        settings, name = self._settings, f"c = {concurrency}"
        rng = Random(f"{settings.seed}-level-{concurrency}")
        try:
            warmups = [self._next(min(settings.max_tokens, WARMUP_TOKENS)) for _ in range(NUM_WARMUPS)]
            requests = [self._next(settings.max_tokens) for _ in range(settings.num_requests)]
            requests = insert_spot_checks(requests, rng)
            with self._reporter.bars() as phases, timed(name, phases) as report:
                self._send(warmups, concurrency, lambda progress: None)

                def show(progress: LoadProgress) -> None:
                    report(Phase(name, _in_words(progress), progress.num_done / len(requests)))

                result = self._send(requests, concurrency, show)
            return judge_level(concurrency, requests, result, self._counter)
        except PenstockError as error:
            what = f"{error.what}. {error.why}".strip()
            return LevelResult(concurrency, settings.num_requests, error=what)

    def _next(self, max_tokens: int) -> Request:
        index, self._num_prompts = self._num_prompts, self._num_prompts + 1
        prompt = self._prompts.make(index, self._settings.input_tokens)
        if self._counter is not None:
            num_tokens = self._counter.count_prompt([{"role": "user", "content": prompt}])
            return Request(prompt, max_tokens, num_tokens)
        return Request(prompt, max_tokens, self._settings.input_tokens if self._prompts.is_exact else None)

    def _send(self, requests: Sequence[Request], concurrency: int, on_progress: OnProgress) -> LoadResult:
        is_stream = self._settings.stream
        jobs = [
            Job(self._requests.body(each.prompt, each.max_tokens, may_end=True, is_stream=is_stream))
            for each in requests
        ]
        return self._clients.run(
            Target.of(self._settings.base_url),
            jobs,
            concurrency=concurrency,
            timeout_s=self._settings.timeout,
            on_progress=on_progress,
        )


def describe(level: LevelResult, baseline: float | None) -> str:
    """A level in a line, and a line for everything that is wrong with it."""
    if level.error:
        return f"c = {level.concurrency}: FAILED, {level.error}"
    # Of the number that is reported: rounding twice could differ from it in the last digit.
    against = f", {percent(round(level.tok_s, 2), baseline)} of the baseline" if baseline else ""
    trust = "verified" if level.is_recounted else "not verified"
    lines = [
        f"c = {level.concurrency}: {level.tok_s:,.1f} tok/s {trust} in {level.wall_s:,.2f} s"
        f"{against}; {level.num_ok} of {level.num_requests} requests ok"
    ]
    lines += [f"  {count} FAILED: {message}" for message, count in level.errors.most_common(5)]
    if level.discrepancies:
        lines.append(f"  {len(level.discrepancies)} MISCOUNTED, the first: {level.discrepancies[0]}")
    lines += [
        f"  WRONG spot check: {wrong['question']!r} is {wrong['wanted']}, the reply {wrong['got']!r}"
        for wrong in level.wrong_checks
    ]
    return "\n".join(lines)


def format_levels(levels: Sequence[LevelResult], baseline: Mapping[int, float]) -> str:
    rows = [
        [
            str(level.concurrency),
            "-" if level.verified_tok_s is None else f"{level.verified_tok_s:,.1f}",
            f"{level.claimed_tok_s:,.1f}",
            percent(level.tok_s, baseline.get(level.concurrency)),
            f"{level.wall_s:,.2f}",
            f"{level.num_ok}/{level.num_requests}",
            str(len(level.discrepancies)),
            f"{level.num_checks_right}/{level.num_checks_right + len(level.wrong_checks)}",
        ]
        for level in levels
    ]
    return format_table(
        ["at a time", "verified tok/s", "claimed", "of baseline", "wall s", "ok", "miscounted", "sums"], rows
    )


def _in_words(progress: LoadProgress) -> str:
    failed = f", {progress.num_failed} failed" if progress.num_failed else ""
    return f"{progress.num_done} done{failed}"


def _report(
    settings: ThroughputSettings,
    requests: ChatRequests,
    prompts: Prompts,
    levels: Sequence[LevelResult],
    baseline: Mapping[int, float],
    found: FoundTokenizer,
) -> dict[str, Any]:
    def with_baseline(level: LevelResult) -> dict[str, Any]:
        return {**level.as_json(), "baseline_tok_s": baseline.get(level.concurrency)}

    rows = [with_baseline(level) for level in levels]

    return {
        "benchmark": "throughput",
        "clean": all(level.is_clean for level in levels),
        "levels": rows,
        "results": [contest_level(row) for row in rows],
        "model": requests.model,
        "base_url": settings.base_url,
        "num_requests": settings.num_requests,
        "input_tokens": settings.input_tokens,
        "max_tokens": settings.max_tokens,
        "template_tokens": prompts.num_template_tokens,
        "recounted": found.counter is not None,
        "recounted_with": found.source or None,
        "seed": settings.seed,
        "body": read_fields("--body", settings.body),
        "stream": settings.stream,
        "baseline": settings.baseline,
    }
