"""Tokens per second at several levels of concurrency, recounted independently of the server.

    penstock eval throughput --base-url URL [--num-requests 64 --input-tokens 1024 --max-tokens 1024
                             --concurrency 1,2,4,8,16,32,64 --output F --baseline F]

Only verified tokens count. With a tokenizer (given or found), prompts are random tokens and
completions are tokenised again; they never count for more than the server's own number. Without
one, prompts are made of words that the server counts as one token each, and its counts are "not
verified". Small sums among the requests check that the model still works. A level that fails is
reported, and the next one is tried. Exits with 0 if nothing failed or was flagged, else with 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from penstock.config import setting
from penstock.errors import PenstockError
from penstock.eval.chat_requests import NO_THINKING, ChatRequests, Request
from penstock.eval.contest_files import contest_level, read_throughput
from penstock.eval.load import LoadClients, LoadResult
from penstock.eval.load_summary import LoadSummary, summarise
from penstock.eval.prompts import Prompts, RequestMaker, make_prompts
from penstock.eval.recount import (
    HOW_TO_VERIFY,
    ReplyCounter,
    TokenCounter,
    find_tokenizer,
    recount_reply,
)
from penstock.eval.results import (
    Reporter,
    ServerSettings,
    draw_seed,
    format_table,
    output_file,
    percent,
    prepare_output,
    read_fields,
    require_above_zero,
    require_at_least,
)
from penstock.eval.spot_checks import draw_check, ends_with_number
from penstock.eval.stream_client import StreamedReply
from penstock.eval.traces import Arrival
from penstock.progress import timed

NUM_WARMUPS = 2
NUM_SPOT_CHECKS, SPOT_CHECK_TOKENS = 2, 256
MAX_KEPT = 10
LEVELS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings(ServerSettings):
    """What to send, at which concurrency, and what to compare it with."""

    num_requests: int = setting(64, "requests per level", aliases=("--num-prompts",))
    input_tokens: int = setting(1024, "tokens per prompt, chat template included")
    max_tokens: int = setting(1024, "most tokens per reply, which may end earlier")
    concurrency: tuple[int, ...] = setting(LEVELS, "concurrent requests, one level each")
    output_dir: str | None = setting(
        None, "folder to write correctness.json or throughput.json to, instead of --output"
    )
    baseline: str | None = setting(None, "results of another server, to compare with")
    tokenizer: str | None = setting(
        None, "the model's folder, to generate prompts and recount tokens"
    )
    seed: int | None = setting(None, "seed for prompts and spot checks (default: random)")
    timeout: float = setting(600.0, "seconds until a request fails")
    body: str = setting(
        NO_THINKING, f"extra fields of every request, as JSON (default: {NO_THINKING})"
    )
    stream: bool = setting(True, "stream replies; without it, there is no time to first token")

    def __post_init__(self) -> None:
        require_at_least(
            1,
            num_requests=self.num_requests,
            input_tokens=self.input_tokens,
            max_tokens=self.max_tokens,
        )
        require_at_least(1, concurrency=min(self.concurrency))
        require_above_zero(timeout=self.timeout)


def run(settings: ThroughputSettings, reporter: Reporter) -> int:
    output = output_file(settings.output, settings.output_dir, "throughput.json")
    prepare_output(output)
    body = read_fields("--body", settings.body)
    baseline = read_throughput("--baseline", settings.baseline).levels if settings.baseline else {}
    if settings.tokenizer:
        TokenCounter.load(settings.tokenizer)  # reports a mistake before the server is used
    seed = draw_seed(settings.seed)
    api = ChatRequests(
        settings.base_url,
        settings.model,
        extra=body,
        timeout_s=settings.timeout,
        may_end=True,
        is_stream=settings.stream,
    )
    with reporter.bars() as phases, timed("prompts", phases):
        counter, source = find_tokenizer(settings.tokenizer, api.client, api.model)
        prompts = make_prompts(api, counter, seed)
        prompts.make(0, settings.input_tokens)  # refuses a length that is too short
    about = f"counting tokens again with {source}"
    if counter is None:
        why = "no tokenizer was found, so only the server counts them"
        about = f"tokens are NOT VERIFIED: {why}. {HOW_TO_VERIFY}"
    print(f"seed {seed}; {about}", flush=True)
    levels: list[LevelResult] = []
    maker = _request_maker(prompts, counter)
    with LoadClients() as clients:
        for concurrency in settings.concurrency:
            rng = Random(f"{seed}-level-{concurrency}")
            result = _measure(settings, maker, api, clients, concurrency, rng, reporter)
            levels.append(judge_level(concurrency, result, counter))
            print(describe(levels[-1], baseline.get(concurrency)), flush=True)
    print(f"\n{format_levels(levels, baseline)}")
    rows = [
        {**level.as_json(), "baseline_tok_s": baseline.get(level.concurrency)} for level in levels
    ]
    is_clean = all(level.is_clean for level in levels)
    fields = {
        "benchmark": "throughput",
        "clean": is_clean,
        "levels": rows,
        "results": [contest_level(row) for row in rows],
        "model": api.model,
        **{name: getattr(settings, name) for name in ("base_url", "num_requests", "input_tokens")},
        "max_tokens": settings.max_tokens,
        "template_tokens": prompts.num_template_tokens,
        "recounted": counter is not None,
        "recounted_with": source or None,
        "seed": seed,
        "body": body,
        "stream": settings.stream,
        "baseline": settings.baseline,
    }
    reporter.deliver(fields, output)
    return int(not is_clean)


def _request_maker(prompts: Prompts, counter: ReplyCounter | None) -> RequestMaker:
    if counter is None:
        return RequestMaker(prompts, count=None if prompts.is_exact else lambda prompt: None)
    return RequestMaker(
        prompts, count=lambda prompt: counter.count_prompt([{"role": "user", "content": prompt}])
    )


def _measure(
    settings: ThroughputSettings,
    maker: RequestMaker,
    api: ChatRequests,
    clients: LoadClients,
    concurrency: int,
    rng: Random,
    reporter: Reporter,
) -> LoadResult:
    arrivals = [Arrival(0.0, settings.input_tokens, settings.max_tokens)] * settings.num_requests
    try:
        warmups = maker.make_warmups(arrivals[:1] * NUM_WARMUPS)
        requests = insert_spot_checks(maker.make(arrivals), rng)
    except PenstockError as error:  # the server, which counts prompts, is gone
        unsent = [Request("", settings.max_tokens)] * settings.num_requests
        return LoadResult.of_nothing_sent(unsent, error)
    name, bars = f"c = {concurrency}", reporter.bars
    return clients.measure(name, api, requests, concurrency=concurrency, bars=bars, warmups=warmups)


def insert_spot_checks(requests: Sequence[Request], rng: Random) -> list[Request]:
    """Inserts sums at random positions, never the first, so that they meet a busy server."""
    mixed = list(requests)
    for _ in range(NUM_SPOT_CHECKS):
        check = draw_check(rng)
        request = Request(check.question, SPOT_CHECK_TOKENS, answer=check.value)
        mixed.insert(rng.randint(min(1, len(mixed)), len(mixed)), request)
    return mixed


@dataclass(slots=True)
class LevelResult:
    """The result of one level. `error`: why nothing could be measured."""

    concurrency: int
    summary: LoadSummary  # without the spot checks, with tokens from the server's usage
    error: str = ""
    num_prompt_tokens: int = 0  # these two as recounted, or as claimed if they cannot be
    num_completion_tokens: int = 0
    is_recounted: bool = False  # whether completions were tokenised again
    discrepancies: list[str] = field(default_factory=list)
    num_checks_right: int = 0
    wrong_checks: list[dict[str, str]] = field(default_factory=list)

    @property
    def tok_s(self) -> float:
        """Prompt and completion tokens per second, over the whole wall time of the level."""
        return (self.num_prompt_tokens + self.num_completion_tokens) / self.summary.wall_s

    @property
    def is_clean(self) -> bool:
        return not (self.summary.num_errors or self.discrepancies or self.wrong_checks)

    def as_json(self) -> dict[str, Any]:
        summary, tok_s = self.summary, round(self.tok_s, 2)
        return {
            "concurrency": self.concurrency,
            "tok_s": tok_s,
            "verified_tok_s": tok_s if self.is_recounted else None,  # else only the server counted
            "claimed_tok_s": round(summary.tok_s, 2),
            "wall_s": round(summary.wall_s, 4),
            "requests": summary.num_requests,
            "ok": summary.num_ok,
            "failed": summary.num_errors,
            "error": self.error or None,
            "error_messages": {} if self.error else dict(summary.errors.most_common(MAX_KEPT)),
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "claimed_prompt_tokens": summary.prompt.total,
            "claimed_completion_tokens": summary.completion.total,
            "discrepancies": len(self.discrepancies),
            "discrepancy_examples": self.discrepancies[:MAX_KEPT],
            "spot_checks": {"right": self.num_checks_right, "wrong": self.wrong_checks},
            "ttft_ms": summary.ttft.as_dict() if summary.ttft else None,
            "e2e_ms": summary.e2e.as_dict() if summary.e2e else None,
        }


def judge_level(concurrency: int, result: LoadResult, counter: ReplyCounter | None) -> LevelResult:
    """Judges every reply of a level, those of spot checks included."""
    summary = summarise(result.only(lambda request: request.answer is None))
    level = LevelResult(concurrency, summary, is_recounted=counter is not None)
    if result.error is not None:
        level.error = result.replies[0].error
        return level
    for request, reply in result.pairs:
        if request.answer is not None:
            _grade(level, request, reply)
        elif not reply.error:
            _count(level, request, reply, counter)
    return level


def _count(
    level: LevelResult, request: Request, reply: StreamedReply, counter: ReplyCounter | None
) -> None:
    claimed_prompt, claimed = reply.num_prompt_tokens, reply.num_completion_tokens
    num_prompt, num_completion = claimed_prompt, claimed
    if claimed > request.max_tokens:
        level.discrepancies.append(
            f"{claimed} completion tokens, at most {request.max_tokens} were requested"
        )
        num_completion = request.max_tokens
    if request.num_prompt_tokens is not None:
        if claimed_prompt != request.num_prompt_tokens:
            level.discrepancies.append(
                f"{claimed_prompt} prompt tokens, counted {request.num_prompt_tokens}"
            )
        num_prompt = min(claimed_prompt, request.num_prompt_tokens)
    if counter is not None:
        recount = recount_reply(counter, reply.text, num_completion, reply.finish_reason)
        if recount.is_off:
            level.discrepancies.append(f"{claimed} completion tokens, counted {recount.counted}")
        num_completion = recount.verified
    level.num_prompt_tokens += num_prompt
    level.num_completion_tokens += num_completion


def _grade(level: LevelResult, request: Request, reply: StreamedReply) -> None:
    assert request.answer is not None
    got = reply.error or reply.text
    if not reply.error and ends_with_number(reply.text, request.answer):
        level.num_checks_right += 1
    else:
        level.wrong_checks.append(
            {"question": request.prompt, "wanted": str(request.answer), "got": got[:200]}
        )


def describe(level: LevelResult, baseline: float | None) -> str:
    """A level in a line, and a line for each of its errors."""
    if level.error:
        return f"c = {level.concurrency}: FAILED, {level.error}"
    # Relative to the reported number, or the last digits might not match.
    against = f", {percent(round(level.tok_s, 2), baseline)} of the baseline" if baseline else ""
    trust = "verified" if level.is_recounted else "not verified"
    summary = level.summary
    lines = [
        f"c = {level.concurrency}: {level.tok_s:,.1f} tok/s {trust} in {summary.wall_s:,.2f} s"
        f"{against}; {summary.num_ok} of {summary.num_requests} requests ok"
    ]
    lines += [f"  {count} FAILED: {message}" for message, count in summary.errors.most_common(5)]
    if level.discrepancies:
        lines.append(
            f"  {len(level.discrepancies)} MISCOUNTED, the first: {level.discrepancies[0]}"
        )
    lines += [
        f"  WRONG spot check: {wrong['question']!r} is {wrong['wanted']}, the reply "
        f"{wrong['got']!r}"
        for wrong in level.wrong_checks
    ]
    return "\n".join(lines)


def format_levels(levels: Sequence[LevelResult], baseline: Mapping[int, float]) -> str:
    rows = [
        [
            str(level.concurrency),
            f"{level.tok_s:,.1f}" if level.is_recounted else "-",
            f"{level.summary.tok_s:,.1f}",
            percent(level.tok_s, baseline.get(level.concurrency)),
            f"{level.summary.wall_s:,.2f}",
            f"{level.summary.num_ok}/{level.summary.num_requests}",
            str(len(level.discrepancies)),
            f"{level.num_checks_right}/{level.num_checks_right + len(level.wrong_checks)}",
        ]
        for level in levels
    ]
    columns = ["at a time", "verified tok/s", "claimed", "of baseline", "wall s", "ok"]
    return format_table([*columns, "miscounted", "sums"], rows)
