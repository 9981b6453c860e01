"""Small sums with a bare number as the answer: a harness sends them in between to check the model.

Sums and differences of up to three digits, products up to 20 x 20 or of two digits by one, exact
quotients.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

Item = TypeVar("Item")

# {sum} has spaces in some questions and none in others: "7*8", "17 + 26".
QUESTIONS = (
    "What is {sum}?",
    "What's {sum}?",
    "Compute {sum}.",
    "Calculate {sum}.",
    "How much is {sum}?",
    "{sum} = ?",
    "{sum} =",
    "{sum}",
    "What does {sum} equal?",
    "Tell me {sum}.",
    "Please compute {sum}.",
    "Can you work out {sum}?",
    "Work out {sum}.",
    "Evaluate {sum}.",
    "Quick check: what is {sum}?",
    "Solve {sum}.",
    "Give me the result of {sum}.",
    "I need to know {sum}.",
)
INSTRUCTIONS = (
    "Only output the number.",
    "Reply with just the number.",
    "Answer with the number only.",
    "Just the number, please.",
    "Reply with only the number.",
    "Respond with a single number.",
    "Output only the result.",
    "Give only the final number.",
    "Number only.",
    "No words, only the number.",
    "Answer with just the number, nothing else.",
    "Return the number and nothing else.",
    "",
    "",
)
SPOKEN = {
    "+": ("the sum of {a} and {b}", "{a} plus {b}", "{a} added to {b}"),
    "-": ("{a} minus {b}", "the difference of {a} and {b}", "{a} take away {b}"),
    "*": (
        "{a} times {b}",
        "the product of {a} and {b}",
        "{a} multiplied by {b}",
        "{a} x {b}",
        "{a} × {b}",
    ),
    "/": ("{a} divided by {b}", "{a} over {b}", "{a} ÷ {b}"),
}
WRITTEN = {
    "+": ("{a} + {b}", "{a}+{b}"),
    "-": ("{a} - {b}", "{a}-{b}"),
    "*": ("{a} * {b}", "{a}*{b}"),
    "/": ("{a} / {b}", "{a}/{b}"),
}


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class SpotCheck:
    question: str
    sign: str
    a: int
    b: int
    value: int


def draw_check(rng: Random) -> SpotCheck:
    sign, a, b, value = _draw_sum(rng)
    # "the difference of 3 and 5" is 2 to many
    forms = WRITTEN if rng.random() < 0.75 or value < 0 else SPOKEN
    text = pick(rng, forms[sign]).format(a=a, b=b)
    question = pick(rng, QUESTIONS).replace("{sum}", text)
    question = question[0].upper() + question[1:]
    if instruction := pick(rng, INSTRUCTIONS):
        if rng.random() < 0.15:
            return SpotCheck(f"{instruction} {question}", sign, a, b, value)
        gap = " " if question[-1] in ".?" else "\n"
        question = question + gap + instruction
    return SpotCheck(question, sign, a, b, value)


def ends_with_number(text: str, value: int) -> bool:
    """Whether the last number in a text is this one, in any usual format."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return bool(numbers) and float(numbers[-1].replace(",", "")) == value


def _draw_sum(rng: Random) -> tuple[str, int, int, int]:
    luck = rng.random()
    highest = pick(rng, (20, 20, 20, 99, 99, 99, 99, 99, 999, 999))
    if luck < 0.3:
        a, b = between(rng, 0, highest), between(rng, 0, highest)
        return "+", a, b, a + b
    if luck < 0.55:
        a, b = between(rng, 0, highest), between(rng, 0, highest)
        if a < b and rng.random() < 0.8:
            a, b = b, a
        return "-", a, b, a - b
    if luck < 0.87:
        if rng.random() < 0.75:
            a, b = between(rng, 0, 20), between(rng, 0, 20)
        else:
            a, b = between(rng, 10, 99), between(rng, 2, 9)
            if rng.random() < 0.3:
                a, b = b, a
        return "*", a, b, a * b
    b, value = between(rng, 1, 12), between(rng, 0, 25)
    return "/", b * value, b, value


def pick(rng: Random, items: Sequence[Item]) -> Item:
    """Like `choice`, and `between` like `randint`, at a quarter of their cost."""
    return items[int(rng.random() * len(items))]


def between(rng: Random, lowest: int, highest: int) -> int:
    return lowest + int(rng.random() * (highest - lowest + 1))
