"""The gates that a model must pass to be shipped: held-out problems, each kind with a threshold.

    penstock eval gates [--base-url URL] [--output F] [--limit N] [--seed S] [--concurrency 8]

Works with any server with the OpenAI API, or any function from a conversation to a reply;
`run_gates` is the same for both. Prints a table and, as its last line, one JSON object; exits with
1 when a gate is missed. Kinds without a threshold (`REPORTED`) are only reported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import setting
from penstock.errors import ConfigError, PenstockError
from penstock.eval import held_out
from penstock.eval.conversation import Conversation
from penstock.eval.endpoint import Endpoint
from penstock.eval.reply import Reply
from penstock.eval.results import (
    Bars,
    Reporter,
    ServerSettings,
    format_table,
    no_bars,
    prepare_output,
    require_at_least,
)
from penstock.progress import Phase, timed

Ask = Callable[[Conversation], Reply | str]

THINKING_CLOSED, MTP_ACCEPTANCE = "thinking_closed", "mtp_acceptance"
THRESHOLDS: Mapping[str, float] = {
    "word_problems": 0.95,
    "spot_checks": 0.99,
    "harness_sums": 0.95,
    "tool_calls": 0.95,
    "recall": 0.95,
    THINKING_CLOSED: 1.0,
    MTP_ACCEPTANCE: 0.70,
}
GATES = tuple(name for name in THRESHOLDS if name != MTP_ACCEPTANCE)  # which have problems
# Whether a model says that no tool fits; small models call one that does not exist instead.
REPORTED = ("refusals",)
MAX_FAILURES_KEPT = 20


@dataclass(slots=True)
class GateResult:
    """`share` is None if nothing could be measured: such a gate is neither passed nor missed.

    `threshold` is None if the share is only reported.
    """

    name: str
    threshold: float | None
    share: float | None = None
    num_right: int = 0
    num_asked: int = 0
    num_errors: int = 0  # requests without a reply; they count as wrong
    failures: list[tuple[Conversation, str]] = field(default_factory=list)

    @property
    def is_missed(self) -> bool:
        return self.share is not None and self.threshold is not None and self.share < self.threshold

    @property
    def verdict(self) -> str:
        if self.share is None:
            return "not measured"
        if self.threshold is None:
            return "reported, not gated"
        return "MISSED" if self.is_missed else "ok"

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"share": self.share}
        if self.threshold is not None:
            has_passed = None if self.share is None else not self.is_missed
            fields |= {"threshold": self.threshold, "passed": has_passed}
        if self.num_asked:
            fields |= {"right": self.num_right, "asked": self.num_asked, "errors": self.num_errors}
        return fields


def score(
    gate: str, problems: Sequence[Conversation], replies: Sequence[Reply | str | None]
) -> GateResult:
    """Judges replies to `problems`, in their order; None is a failed request."""
    result = GateResult(gate, THRESHOLDS.get(gate), num_asked=len(problems))
    for conversation, answer in zip(problems, replies, strict=True):
        if answer is None:
            result.num_errors += 1
            continue
        reply = answer if isinstance(answer, Reply) else conversation.read(answer)
        if _passes(gate, conversation, reply):
            result.num_right += 1
        elif len(result.failures) < MAX_FAILURES_KEPT:
            result.failures.append((conversation, _show_reply(reply)))
    result.share = result.num_right / max(1, len(problems))
    return result


def _passes(gate: str, conversation: Conversation, reply: Reply) -> bool:
    if gate == THINKING_CLOSED:
        has_ended = reply.finish_reason in ("stop", "tool_calls")
        return has_ended and reply.is_thought_closed and bool(reply.content or reply.calls)
    return conversation.check.accepts(reply)


def run_gates(
    ask: Ask,
    *,
    num_problems: int = 200,
    seed: int = 0,
    concurrency: int = 1,
    mtp_acceptance: float | None = None,
    on_result: Callable[[GateResult], None] = lambda result: None,
    bars: Bars = no_bars,
) -> list[GateResult]:
    """Runs every gate's problems. MTP acceptance is not measured here, but passed in."""
    results = ask_problems(ask, GATES, num_problems, seed, concurrency, on_result, bars)
    return [*results, judge_acceptance(mtp_acceptance)]


def ask_problems(
    ask: Ask,
    gates: Sequence[str],
    num_problems: int,
    seed: int,
    concurrency: int,
    on_result: Callable[[GateResult], None] = lambda result: None,
    bars: Bars = no_bars,
) -> list[GateResult]:
    """`ask` returns a `Reply`, or the text after the generation prompt.

    A text counts as a complete reply; a `Reply` has its finish reason.
    """
    results = []
    with ThreadPoolExecutor(max_workers=max(1, concurrency)) as pool:
        for gate in gates:
            problems = held_out.take(gate, num_problems, seed)
            replies: list[Reply | str | None] = []
            with bars() as phases, timed(gate, phases) as report:
                for reply in pool.map(lambda problem: _ask_safely(ask, problem), problems):
                    replies.append(reply)
                    asked = f"{len(replies)} of {num_problems} asked"
                    report(Phase(gate, asked, len(replies) / num_problems))
            result = score(gate, problems, replies)
            on_result(result)
            results.append(result)
    return results


def num_problems_reported(num_problems: int) -> int:
    """How many problems of each `REPORTED` kind to run, given the number per gate."""
    return max(1, num_problems // 2)


def judge_acceptance(share: float | None) -> GateResult:
    return GateResult(MTP_ACCEPTANCE, THRESHOLDS[MTP_ACCEPTANCE], share)


def _ask_safely(ask: Ask, conversation: Conversation) -> Reply | str | None:
    try:
        return ask(conversation)
    except PenstockError as error:
        print(f"  a request failed: {error.what} {error.why}".rstrip(), file=sys.stderr)
        return None


def _show_reply(reply: Reply) -> str:
    calls = " ".join(f"{call.name}({json.dumps(dict(call.arguments))})" for call in reply.calls)
    return " ".join(
        part for part in (reply.content[:300], calls[:300], f"[{reply.finish_reason}]") if part
    )


def format_gates(results: Sequence[GateResult]) -> str:
    rows = []
    for result in results:
        counts = f"{result.num_right}/{result.num_asked}" if result.num_asked else ""
        share = "-" if result.share is None else f"{result.share:.1%}"
        needed = "-" if result.threshold is None else f"{result.threshold:.0%}"
        errors = f", {result.num_errors} without a reply" if result.num_errors else ""
        rows.append([result.name, counts, share, needed, result.verdict + errors])
    return format_table(["gate", "right", "share", "needed", ""], rows)


def format_failures(result: GateResult, most: int) -> str:
    lines = []
    for conversation, got in result.failures[:most]:
        lines.append(f"  {result.name}: {conversation.messages[-2]['content'][-300:]!r}")
        lines.append(f"    wanted {conversation.completion!r}")
        lines.append(f"    got    {got!r}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings(ServerSettings):
    """Which server to run the problems on, and how many."""

    limit: int = setting(200, "problems per gate")
    seed: int = setting(0, "seed for the problems")
    concurrency: int = setting(8, "concurrent requests")
    mtp: str | None = setting(None, 'JSON file with {"mtp_acceptance": share}')
    show: int = setting(0, "print N wrong replies per gate")
    json: str | None = setting(None, "the same as --output, as it is called in `penstock bench`")

    def __post_init__(self) -> None:
        if self.limit != int(self.limit):
            raise ConfigError(
                f"--limit is {self.limit:g}", "It must be a whole number of problems."
            )
        require_at_least(1, limit=self.limit, concurrency=self.concurrency)
        if self.output and self.json:
            raise ConfigError("--output and --json are both set", "They mean the same: use one.")


def run(settings: GateSettings, reporter: Reporter) -> int:
    """Runs the gates on the server, reports, and returns the exit code."""
    output = settings.output or settings.json
    prepare_output(output, "--output" if settings.output else "--json")
    endpoint = Endpoint(settings.base_url, settings.model)
    given = _read_acceptance(Path(settings.mtp)) if settings.mtp else None
    before, start = endpoint.draft_counts(), time.monotonic()

    def show(result: GateResult) -> None:
        if settings.show and result.failures:
            print(format_failures(result, settings.show), flush=True)

    results = run_gates(
        endpoint.ask,
        num_problems=settings.limit,
        seed=settings.seed,
        concurrency=settings.concurrency,
        mtp_acceptance=given,
        on_result=show,
        bars=reporter.bars,
    )
    after = endpoint.draft_counts()
    if given is None and before is not None and after is not None:
        drafted, accepted = (later - earlier for earlier, later in zip(before, after))
        results[-1] = judge_acceptance(accepted / drafted if drafted > 0 else None)
    num_reported = num_problems_reported(settings.limit)
    how = (settings.seed, settings.concurrency, show, reporter.bars)
    reported = ask_problems(endpoint.ask, REPORTED, num_reported, *how)
    elapsed_s = time.monotonic() - start
    is_missed = any(result.is_missed for result in results)
    fields = {
        "benchmark": "gates",
        "passed": not is_missed,
        "gates": {result.name: result.share for result in results},
        "reported": {result.name: result.share for result in reported},
        "details": {result.name: result.as_json() for result in (*results, *reported)},
        "model": endpoint.model,
        "base_url": settings.base_url,
        "limit": settings.limit,
        "seed": settings.seed,
        "concurrency": settings.concurrency,
        "elapsed_s": round(elapsed_s, 1),
    }
    print(format_gates([*results, *reported]))
    reporter.deliver(fields, output)
    return int(is_missed)


def _read_acceptance(file: Path) -> float:
    try:
        share = float(json.loads(file.read_text(encoding="utf-8"))[MTP_ACCEPTANCE])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PenstockError(
            f"{file} has no share of accepted drafts",
            f"{type(error).__name__}: {error}.",
            'Use a JSON file such as {"mtp_acceptance": 0.75}.',
        ) from error
    return share
