"""GPQA-Diamond as in the contest: no examples, thinking on, streamed, 12,288 tokens; from a local
file.

lm-evaluation-harness does not stream, so the prompt and the grading are ours. The data set must not
be shipped: its authors ask that it appear nowhere in plain text. A line of the file is one question
with the columns of the published table (`Question`, `Correct Answer`, `Incorrect Answer 1` to `3`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from penstock.errors import PenstockError
from penstock.eval.chat_requests import ChatRequests, Request
from penstock.eval.harness_tasks import Mark
from penstock.eval.lm_harness import Asking
from penstock.eval.load import LoadClients
from penstock.eval.results import Bars
from penstock.eval.stream_client import StreamedReply

NAME, GATE, MAX_TOKENS = "gpqa_diamond", 0.630, 12_288
LETTERS = "ABCD"
INCORRECT = tuple(f"Incorrect Answer {number}" for number in (1, 2, 3))
_SAID = re.compile(r"(?i:answer(?:\s+is)?)[\s:*$]*(?:\\boxed\{|\\text\{)*[\s*$({]*([ABCD])\b")
_IN_BRACKETS = re.compile(r"\(([ABCD])\)")


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    letter: str  # of the correct choice


def read_questions(file: Path, limit: float, seed: int) -> list[Question]:
    """The first `limit` questions; the seed determines the order of choices."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    count = math.ceil(limit * len(lines)) if limit < 1 else int(limit)
    questions = []
    for number, line in enumerate(lines[:count], 1):
        try:
            questions.append(_as_asked(json.loads(line), Random(f"{seed}-gpqa-{number}")))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PenstockError(
                f"Line {number} of {file} is not a question of GPQA",
                f"{type(error).__name__}: {error}.",
                "It must be a JSON object with Question, Correct Answer and Incorrect Answer 1 to "
                "3.",
            ) from error
    return questions


def _as_asked(fields: Mapping[str, str], rng: Random) -> Question:
    right = fields["Correct Answer"].strip()
    choices = [right, *(fields[name].strip() for name in INCORRECT)]
    rng.shuffle(choices)
    listed = "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices))
    text = (
        f"{fields['Question'].strip()}\n\n{listed}\n\n"
        'One of the choices is right. End your reply with "The answer is (X)", where X is its '
        "letter."
    )
    return Question(text, LETTERS[choices.index(right)])


def chosen_letter(reply: StreamedReply) -> str | None:
    """The last choice named after the reasoning; reasoning that never ended has no choice."""
    text = reply.content
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    elif "<think>" in text:
        return None
    found = _SAID.findall(text) or _IN_BRACKETS.findall(text)
    return found[-1] if found else None


def ask_gpqa(file: Path, asking: Asking, bars: Bars) -> Mark:
    questions = read_questions(file, asking.limit, asking.seed)
    api = ChatRequests(
        asking.base_url,
        asking.model,
        extra={"seed": asking.seed, **asking.body},
        timeout_s=asking.timeout_s,
        may_end=True,
    )
    requests = [Request(question.text, asking.max_tokens) for question in questions]
    with LoadClients() as clients:
        load = clients.measure(NAME, api, requests, concurrency=asking.num_concurrent, bars=bars)
    if load.error is not None:
        raise load.error
    pairs = list(zip(questions, load.replies, strict=True))
    num_right = sum(
        not reply.error and chosen_letter(reply) == question.letter for question, reply in pairs
    )
    num_cut = sum(not reply.error and reply.finish_reason == "length" for reply in load.replies)
    return Mark(
        name=NAME,
        metric="exact_match",
        share=num_right / max(1, len(pairs)),
        gate=GATE,
        num_asked=len(pairs),
        num_without_reply=sum(bool(reply.error) for reply in load.replies),
        num_fewshot=0,
        max_tokens=asking.max_tokens,
        metrics={"cut_off": float(num_cut)},
        note="; ".join(sorted({reply.error for reply in load.replies if reply.error})[:2]),
    )


def thinking(max_tokens: int) -> dict[str, Any]:
    """Fields that turn thinking on, for templates and APIs. Without a budget a server may close
    thinking early, ours at half of the tokens; a budget of all tokens sets no limit, so that this
    measures the model.
    """
    return {
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking": {"type": "enabled", "budget_tokens": max_tokens},
    }
