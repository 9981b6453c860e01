"""Whether replies with drafts are those of plain decoding, before steps with drafts are timed.

Where results must not depend on a step (`--deterministic`), tokens are compared one by one. Else
steps of several tokens round their products differently, a router of random weights flips at its
next near tie, and after a few tokens two right replies are two texts. So each is judged by itself:
its tokens are scored by a prefill of the same text, and must be as likely there as those of a plain
reply. A token of a wrong state would be as unlikely as one drawn blindly, such as the prompt's.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.commands.measure import random_prompts
from penstock.errors import PenstockError
from penstock.types import Request, SamplingParams, Sequence

if TYPE_CHECKING:
    from penstock.engine.logits_engine import LogitsEngine

NUM_ROWS, NUM_TOKENS, PROMPT_TOKENS = 4, 24, 100
# Of the distance of a blindly drawn token from the likeliest: more than a plain reply's.
MOST_FURTHER = 0.1

Replies = dict[str, tuple[int, ...]]


class ReplyDrafter:
    """Drafts what a plain engine has said, as long as the reply is the same: always right."""

    is_costly = False

    def __init__(self, replies: Replies) -> None:
        self.replies = replies

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        said = tuple(sequence.tokens[sequence.num_prompt_tokens :])
        known = self.replies[sequence.id]
        return known[len(said) : len(said) + most] if known[: len(said)] == said else ()

    def end(self, sequence: Sequence) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Found:
    """Of replies of one kind."""

    kind: str
    num_same: int  # tokens before the first that a plain reply does not have
    distance: float  # of a token from the likeliest, relative to that of a blindly drawn one
    drafted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        drafts = f", {self.accepted} of {self.drafted} drafts right" if self.drafted else ""
        return f"{self.kind}: {self.num_same} tokens the same, distance {self.distance:.3f}{drafts}"


def check_replies(engine: LogitsEngine) -> list[Found]:
    """Plain replies, those with the head's drafts, and those with drafts that are right as long as
    the reply is the plain one. Raises an error if one of them is wrong."""
    speculator = engine.engine.policy.speculator
    pace, most, drafter = speculator.pace, speculator.most_drafts, speculator.drafter
    speculator.pace, speculator.most_drafts = None, lambda _: 0
    found = []
    try:
        plain = _replies(engine)
        found.append(Found("plain", NUM_ROWS * NUM_TOKENS, _distance(engine, plain)))
        speculator.most_drafts = most
        for kind in ("the head's drafts", "right drafts"):
            if kind == "right drafts":
                speculator.drafter = ReplyDrafter(plain)
            before = speculator.stats()
            replies = _replies(engine)
            counts = [_total(stats) for stats in (before, speculator.stats())]
            drafted, accepted = (after - first for first, after in zip(*counts))
            speculator.most_drafts = lambda _: 0  # scored without drafts
            distance = _distance(engine, replies)
            speculator.most_drafts = most
            same = sum(_num_same(plain[id], replies[id]) for id in plain)
            found.append(Found(kind, same, distance, drafted, accepted))
            _judge(engine, found[0], found[-1])
    finally:
        speculator.pace, speculator.most_drafts, speculator.drafter = pace, most, drafter
    return found


def as_dict(found: list[Found]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) | {"distance": round(one.distance, 5)} for one in found]


def _judge(engine: LogitsEngine, plain: Found, found: Found) -> None:
    is_exact = engine.engine.runner.deterministic
    if is_exact and found.num_same < plain.num_same:
        why = (
            f"Only {found.num_same} of {plain.num_same} tokens are the same, and results must "
            "not depend on a step."
        )
    elif not found.distance <= plain.distance + MOST_FURTHER:
        why = (
            f"Its tokens are {found.distance:.1%} as far from the likeliest as blindly drawn ones; "
            f"those of a plain reply {plain.distance:.1%}."
        )
    else:
        return
    raise PenstockError(
        f"A reply with {found.kind} is not that of plain decoding",
        why,
        "This is a bug. Times of wrong results are worthless, so nothing was timed.",
    )


def _num_same(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(one))


def _total(stats: Any) -> tuple[int, int]:
    drafted = sum(count.num_drafted for count in stats.counts)
    return drafted, sum(count.num_accepted for count in stats.counts)


def _prompts(engine: LogitsEngine) -> dict[str, tuple[int, ...]]:
    prompts = random_prompts(engine, NUM_ROWS, PROMPT_TOKENS)
    return {
        f"check-{row}": tuple(prompt[: PROMPT_TOKENS - 9 * row].tolist())
        for row, prompt in enumerate(prompts)
    }


def _replies(engine: LogitsEngine) -> Replies:
    inner = engine.engine
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    for id, prompt in _prompts(engine).items():
        inner.submit(Request(id=id, token_ids=prompt, sampling=sampling))
    said: dict[str, list[int]] = {}
    while inner.has_work:
        for delta in inner.step():
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
    return {id: tuple(tokens) for id, tokens in said.items()}


def _distance(engine: LogitsEngine, replies: Replies) -> float:
    """The mean distance of a reply's tokens from the likeliest at their places, relative to that of
    the prompts' tokens, which were drawn blindly."""
    inner, prompts = engine.engine, _prompts(engine)
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    for id, reply in replies.items():
        inner.submit(Request(id=id, token_ids=(*prompts[id], *reply), sampling=sampling))
    gaps: dict[str, list[float]] = {}
    while inner.has_work:
        for delta in inner.step():
            if delta.prompt_scores is not None:
                scores = delta.prompt_scores.unpack()
                new = [one.top[0][1] - one.logprob for one in scores]
                gaps.setdefault(delta.request_id, []).extend(new)
    blind, said = [], []
    for id, prompt in prompts.items():
        blind += gaps[id][: len(prompt) - 1]
        said += gaps[id][len(prompt) - 1 :]
    return statistics.mean(said) / max(statistics.mean(blind), 1e-9)
