"""A drafter that knows the reply: its drafts are right up to a position given by a script."""

from __future__ import annotations

from collections.abc import Sequence as Script
from typing import Any

from penstock.engine.engine import Engine
from penstock.types import Request, Sequence, TokenDelta
from small_models import make_engine, run, tokens_of

NUM_DRAFTS = 3
NO_DRAFT = -1
ALWAYS_RIGHT = 99
# Index of the first wrong draft, per step; a row without drafts is a plain decode.
EVERY_PLACE = (0, 1, 2, ALWAYS_RIGHT, NO_DRAFT, ALWAYS_RIGHT, NO_DRAFT, NO_DRAFT, 1, 0)


class ScriptedDrafter:
    is_costly = False

    def __init__(self, replies: dict[str, list[int]], script: Script[int]) -> None:
        self.replies, self.script = replies, script
        self.num_steps: dict[str, int] = {}

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        step = self.num_steps.get(sequence.id, 0)
        self.num_steps[sequence.id] = step + 1
        # Rows of one batch are at different positions of the script.
        wrong = self.script[(step + sequence.arrival) % len(self.script)]
        if wrong == NO_DRAFT:
            return ()
        begin = len(sequence.tokens) - sequence.num_prompt_tokens
        right = self.replies.get(sequence.id, [])[begin : begin + most]
        return tuple(token ^ (place == wrong) for place, token in enumerate(right))

    def end(self, sequence: Sequence) -> None:
        pass


def drafting_engine(
    config: dict[str, Any],
    replies: dict[str, list[TokenDelta]],
    script: Script[int] = EVERY_PLACE,
    **settings: Any,
) -> Engine:
    """An engine that drafts what a plain engine replies."""
    engine = make_engine(config, speculate=f"ngram:{NUM_DRAFTS}", **settings)
    said = {id: tokens_of(deltas) for id, deltas in replies.items()}
    engine.policy.speculator.drafter = ScriptedDrafter(said, script)
    engine.policy.speculator.pace = None  # even if it does not pay off
    return engine


def run_both(
    config: dict[str, Any], *requests: Request, script: Script[int] = EVERY_PLACE, **settings: Any
) -> tuple[dict[str, list[TokenDelta]], dict[str, list[TokenDelta]]]:
    """The replies of a plain engine, and those of one that drafts."""
    plain = run(make_engine(config, **settings), *requests)
    return plain, run(drafting_engine(config, plain, script, **settings), *requests)
