"""Spot checks of arithmetic; a thinking model writes down the calculation first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from penstock.eval.conversation import Conversation, ExactText
from penstock.eval.spot_checks import draw_check
from training.problems.arithmetic import add, divide, multiply, subtract
from training.problems.draw import is_held_out
from training.problems.turns import assistant, decide_thinking, sometimes_system, user

WORK: Mapping[str, Callable[[int, int], str]] = {
    "+": add,
    "-": subtract,
    "*": multiply,
    "/": divide,
}


def sample(rng: Random, held_out: bool, thinking: bool | None = None) -> Conversation:
    check = draw_check(rng)
    while is_held_out(check.question) != held_out:
        check = draw_check(rng)
    is_thinking = decide_thinking(rng, thinking)
    return Conversation(
        kind="spot_checks",
        messages=(
            *sometimes_system(rng),
            user(check.question),
            assistant(
                str(check.value), f"{WORK[check.sign](check.a, check.b)}." if is_thinking else None
            ),
        ),
        check=ExactText(str(check.value)),
        enable_thinking=is_thinking,
    )
