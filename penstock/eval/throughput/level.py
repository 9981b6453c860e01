"""One level of the throughput measurement: what is sent, and what the replies are worth once looked at.

Tokens count when they can be vouched for: prompts are as long as they were made, completions as long as
their text is when it is tokenised again, and never longer than the server said. Sums that hide among the
requests show whether the model behind them still works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from penstock.eval.correctness.grading import ends_with_number
from penstock.eval.load import LoadResult
from penstock.eval.load_summary import Spread
from penstock.eval.recount import ReplyCounter, recount_reply
from penstock.eval.spot_checks import draw_check
from penstock.eval.stream_client import StreamedReply

NUM_SPOT_CHECKS = 2
SPOT_CHECK_TOKENS = 256
MAX_KEPT = 10


@dataclass(frozen=True, slots=True)
class Request:
    """Something to send. `answer` is the number that a spot check must end with."""

    prompt: str
    max_tokens: int
    num_prompt_tokens: int | None = None  # as counted here; None where only the server can count
    answer: int | None = None


def insert_spot_checks(requests: Sequence[Request], rng: Random) -> list[Request]:
    """Sums at random places, never the first: they meet a server at work."""
    mixed = list(requests)
    for _ in range(NUM_SPOT_CHECKS):
        check = draw_check(rng)
        request = Request(check.question, SPOT_CHECK_TOKENS, answer=check.value)
        mixed.insert(rng.randint(min(1, len(mixed)), len(mixed)), request)
    return mixed


@dataclass(slots=True)
class LevelResult:
    """What one level came to. `error` is why nothing could be measured at all."""

    concurrency: int
    num_requests: int
    error: str = ""
    errors: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0
    num_prompt_tokens: int = 0  # these two as recounted, or as claimed where nothing could be
    num_completion_tokens: int = 0
    num_claimed_prompt_tokens: int = 0  # these two as the server's usage has them
    num_claimed_completion_tokens: int = 0
    is_recounted: bool = False  # whether completions were tokenised again
    discrepancies: list[str] = field(default_factory=list)
    num_checks_right: int = 0
    wrong_checks: list[dict[str, str]] = field(default_factory=list)
    ttft: Spread | None = None
    e2e: Spread | None = None

    @property
    def num_ok(self) -> int:
        return 0 if self.error else self.num_requests - self.errors.total()

    @property
    def tok_s(self) -> float:
        """Prompt and completion tokens a second, over the whole wall time of the level."""
        return (self.num_prompt_tokens + self.num_completion_tokens) / self.wall_s if self.wall_s else 0.0

    @property
    def verified_tok_s(self) -> float | None:
        """None where only the server has counted: what nobody recounted is not verified."""
        return self.tok_s if self.is_recounted else None

    @property
    def claimed_tok_s(self) -> float:
        num_claimed = self.num_claimed_prompt_tokens + self.num_claimed_completion_tokens
        return num_claimed / self.wall_s if self.wall_s else 0.0

    @property
    def is_clean(self) -> bool:
        return self.num_ok == self.num_requests and not self.discrepancies and not self.wrong_checks

    def as_json(self) -> dict[str, Any]:
        return {
            "concurrency": self.concurrency,
            "tok_s": round(self.tok_s, 2),
            "verified_tok_s": None if self.verified_tok_s is None else round(self.verified_tok_s, 2),
            "claimed_tok_s": round(self.claimed_tok_s, 2),
            "wall_s": round(self.wall_s, 4),
            "requests": self.num_requests,
            "ok": self.num_ok,
            "failed": self.num_requests - self.num_ok,
            "error": self.error or None,
            "error_messages": dict(self.errors.most_common(MAX_KEPT)),
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "claimed_prompt_tokens": self.num_claimed_prompt_tokens,
            "claimed_completion_tokens": self.num_claimed_completion_tokens,
            "discrepancies": len(self.discrepancies),
            "discrepancy_examples": self.discrepancies[:MAX_KEPT],
            "spot_checks": {"right": self.num_checks_right, "wrong": self.wrong_checks},
            "ttft_ms": self.ttft.as_dict() if self.ttft else None,
            "e2e_ms": self.e2e.as_dict() if self.e2e else None,
        }


def judge_level(
    concurrency: int, requests: Sequence[Request], result: LoadResult, counter: ReplyCounter | None
) -> LevelResult:
    """Looks at every reply of a level, those of spot checks included."""
    pairs = list(zip(requests, result.replies, strict=True))
    measured = [(request, reply) for request, reply in pairs if request.answer is None]
    level = LevelResult(concurrency, len(measured), wall_s=result.wall_s, is_recounted=counter is not None)
    for request, reply in measured:
        if reply.error:
            level.errors[reply.error] += 1
        else:
            _count(level, request, reply, counter)
    for request, reply in pairs:
        if request.answer is not None:
            _grade(level, request, reply)
    good = [reply for _, reply in measured if not reply.error]
    level.ttft = Spread.of(1e3 * reply.ttft_s for reply in good if reply.ttft_s is not None)
    level.e2e = Spread.of(1e3 * reply.e2e_s for reply in good)
    return level


def _count(level: LevelResult, request: Request, reply: StreamedReply, counter: ReplyCounter | None) -> None:
    claimed_prompt, claimed = reply.num_prompt_tokens, reply.num_completion_tokens
    level.num_claimed_prompt_tokens += claimed_prompt
    level.num_claimed_completion_tokens += claimed
    num_prompt, num_completion = claimed_prompt, claimed
    if claimed > request.max_tokens:
        level.discrepancies.append(
            f"{claimed} completion tokens, at most {request.max_tokens} were asked for"
        )
        num_completion = request.max_tokens
    if request.num_prompt_tokens is not None:
        if claimed_prompt != request.num_prompt_tokens:
            level.discrepancies.append(f"{claimed_prompt} prompt tokens, counted {request.num_prompt_tokens}")
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
