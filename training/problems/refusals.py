"""Requests for a tool that is not offered: the right reply says so and calls nothing.

Tools and requests are those of tool_calls.py; only the matching tool is missing.
"""

from __future__ import annotations

from random import Random

from penstock.eval.conversation import Conversation, Mentions
from training.problems.tool_calls import Errand, draw_errand, offer, system_turn
from training.problems.topics import UNKNOWN
from training.problems.turns import assistant, decide_thinking, user

REFUSAL = "I am sorry, I cannot do that with what I have here."
REFUSING_THOUGHT = "None of the tools can do this."
ANSWERED_BY_TALK = frozenset(
    question for question, _ in UNKNOWN
)  # with "I do not know", tools or not


def sample(rng: Random, held_out: bool, thinking: bool | None = None) -> Conversation:
    is_thinking = decide_thinking(rng, thinking)
    errand = draw_errand_to_refuse(rng, held_out)
    offered = draw_errand(rng, held_out, (errand.tool.name,)).tool
    thought = REFUSING_THOUGHT if is_thinking else None
    return Conversation(
        kind="refusals",
        messages=(*system_turn(rng), user(errand.text), assistant(REFUSAL, thought)),
        check=Mentions(),
        enable_thinking=is_thinking,
        tools=offer(rng, [offered], never={errand.tool.name}),
    )


def draw_errand_to_refuse(rng: Random, held_out: bool) -> Errand:
    """A request that cannot be answered without a tool."""
    while True:
        errand = draw_errand(rng, held_out)
        if errand.request.pattern not in ANSWERED_BY_TALK:
            return errand
