"""Sums as other harnesses ask them: round numbers, three numbers at once, and all kinds of wording.

`spot_checks` are those of our own harness; these are for all others. Whole wordings are held out
besides numbers, so a right answer cannot come from a memorized wording.

The gate has mental arithmetic: sums of two or three round or small numbers, differences from a
round number, products of the table or with one digit, quotients without remainder. Training also
has some harder ones (`draw_harder`), so that the model does not lose them; no gate has those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from penstock.eval.conversation import Conversation, ExactText, Message
from penstock.eval.spot_checks import INSTRUCTIONS, QUESTIONS
from training.problems.arithmetic import add, add_three, divide, multiply, subtract
from training.problems.draw import between, is_held_out, pick
from training.problems.turns import SYSTEM_PROMPTS, assistant, system, user


@dataclass(frozen=True, slots=True)
class Sum:
    """One calculation. `form` is its key in `WRITTEN` and `SAID`."""

    form: str
    numbers: tuple[int, ...]
    work: str
    value: int


@dataclass(frozen=True, slots=True)
class Wordings:
    """`asking` patterns have a {sum}; `telling` patterns, by form, have numbers {a}, {b}, {c}."""

    asking: Sequence[str]
    telling: Mapping[str, Sequence[str]]
    instructions: Sequence[str]


WRITTEN: Mapping[str, Sequence[str]] = {
    "a+b": ("{a} + {b}", "{a}+{b}", "({a} + {b})"),
    "a+b+c": ("{a} + {b} + {c}", "{a}+{b}+{c}", "({a} + {b}) + {c}"),
    "a-b": ("{a} - {b}", "{a}-{b}", "{a} − {b}"),
    "a-b-c": ("{a} - {b} - {c}", "{a}-{b}-{c}"),
    "a+b-c": ("{a} + {b} - {c}", "{a}+{b}-{c}"),
    "a*b": ("{a} * {b}", "{a}*{b}", "{a} x {b}", "{a} × {b}", "{a} · {b}"),
    "a/b": ("{a} / {b}", "{a}/{b}", "{a} ÷ {b}"),
}
SAID: Mapping[str, Sequence[str]] = {
    "a+b": ("{a} plus {b}", "the sum of {a} and {b}", "the total of {a} and {b}"),
    "a+b+c": (
        "{a} plus {b} plus {c}",
        "the sum of {a}, {b} and {c}",
        "the sum of {a}, {b}, and {c}",
        "the total of {a}, {b} and {c}",
    ),
    "a-b": ("{a} minus {b}", "{a} less {b}", "{a} take away {b}"),
    "a-b-c": ("{a} minus {b} minus {c}",),
    "a+b-c": ("{a} plus {b} minus {c}",),
    "a*b": ("{a} times {b}", "the product of {a} and {b}", "{a} multiplied by {b}"),
    "a/b": ("{a} divided by {b}", "{a} over {b}"),
}

TRAINED = Wordings(
    asking=(
        *QUESTIONS,
        "Compute: {sum}",
        "Calculate: {sum}",
        "Calculate the following: {sum}",
        "What is the result of {sum}?",
        "What is the value of {sum}?",
        "What is the answer to {sum}?",
        "Question: What is {sum}?",
        "Q: What is {sum}?\nA:",
        "Q: {sum}\nA:",
        "Math check: {sum}",
        "Math question: what is {sum}?",
        "A quick sum: {sum}",
        "Please calculate {sum}.",
        "Please tell me what {sum} is.",
        "Could you tell me what {sum} is?",
        "Do the math: {sum}",
        "Find {sum}.",
        "Find the value of {sum}.",
        "Evaluate the expression {sum}.",
        "Evaluate: {sum}",
        "Solve: {sum}",
        "Solve this: {sum} = ?",
        "{sum} = ___",
        "{sum} equals what?",
        "{sum} is what?",
        "{sum}?",
        "{sum}=?",
        "{sum}=",
        "What number is {sum}?",
        "How much do you get for {sum}?",
        "Sanity check: {sum} = ?",
        "Simple arithmetic: what is {sum}?",
        "Answer this: what is {sum}?",
        "Work this out: {sum}",
        "Complete: {sum} =",
    ),
    telling={
        "a+b": (
            "Add {a} and {b}.",
            "Add {b} to {a}.",
            "If you add {a} and {b}, what do you get?",
            "What do you get when you add {a} and {b}?",
            "I have {a} and get {b} more. How many do I have?",
        ),
        "a+b+c": (
            "Add {a}, {b} and {c}.",
            "Add {a}, {b}, and {c}.",
            "Add up {a}, {b} and {c}.",
            "If you add {a}, {b} and {c}, what do you get?",
            "What do you get when you add {a}, {b} and {c}?",
            "What do {a}, {b} and {c} add up to?",
            "Start with {a}, add {b}, then add {c}. What is the result?",
            "Add {a} and {b}, then add {c}.",
            "Sum these numbers: {a}, {b}, {c}",
            "What is the total: {a}, {b}, {c}?",
        ),
        "a-b": (
            "Subtract {b} from {a}.",
            "If you subtract {b} from {a}, what is left?",
            "What do you get when you subtract {b} from {a}?",
            "Take {b} from {a}.",
            "Take {b} away from {a}.",
            "Start with {a} and subtract {b}.",
            "How much is left of {a} when {b} are gone?",
            "What number is {b} less than {a}?",
            "I have {a} and give away {b}. How many are left?",
        ),
        "a-b-c": (
            "Start with {a}, subtract {b}, then subtract {c}.",
            "Take {b} and {c} away from {a}.",
        ),
        "a+b-c": (
            "Add {a} and {b}, then subtract {c}.",
            "Start with {a}, add {b}, then subtract {c}.",
        ),
        "a*b": (
            "Multiply {a} by {b}.",
            "Multiply {a} and {b}.",
            "If you multiply {a} by {b}, what do you get?",
            "What do you get when you multiply {a} by {b}?",
        ),
        "a/b": (
            "Divide {a} by {b}.",
            "If you divide {a} by {b}, what do you get?",
            "What do you get when you divide {a} by {b}?",
            "How many times does {b} go into {a}?",
        ),
    },
    instructions=(
        *INSTRUCTIONS,
        "",
        "",
        "Answer with only the number.",
        "Answer with just the number.",
        "Answer with a number.",
        "Answer only with the number.",
        "Reply with the number only.",
        "Respond with only the number.",
        "Respond with just the number, no explanation.",
        "Please respond with only the numeric answer.",
        "Return only the number.",
        "Return only the integer.",
        "Just give the number.",
        "Just the answer.",
        "Give just the answer.",
        "Give the answer as a number.",
        "Only the number, no explanation.",
        "Do not explain.",
        "No explanation.",
        "Your answer should be a single integer.",
        "Write only the final answer.",
        "Output the final number only.",
        "Answer:",
    ),
)
# Never used in training.
HELD_OUT = Wordings(
    asking=(
        "Can you compute {sum}?",
        "What would {sum} be?",
        "Please evaluate {sum}.",
        "Determine {sum}.",
        "Arithmetic test: {sum} = ?",
        "Compute the value of {sum}.",
        "Please solve {sum}.",
        "Question: {sum}",
        "What is {sum} equal to?",
        "Check: {sum}",
    ),
    telling={
        "a+b": ("What do you get if you add {b} to {a}?", "Please add {a} and {b}."),
        "a+b+c": (
            "Please add {a}, {b} and {c}.",
            "What is the sum of these three numbers: {a}, {b}, {c}?",
            "If I add {a} and {b} and {c}, what is the total?",
        ),
        "a-b": (
            "What is left if you take {b} from {a}?",
            "Please subtract {b} from {a}.",
            "If I subtract {b} from {a}, what do I get?",
        ),
        "a-b-c": ("Subtract {b} and then {c} from {a}.",),
        "a+b-c": ("Add {b} to {a} and subtract {c}.",),
        "a*b": ("Please multiply {a} by {b}.", "If I multiply {a} by {b}, what do I get?"),
        "a/b": ("Please divide {a} by {b}.", "If I divide {a} by {b}, what do I get?"),
    },
    instructions=(
        "",
        "Reply with just a number.",
        "Answer with nothing but the number.",
        "Give me only the number.",
        "Please give only the number.",
        "Respond with the number alone.",
    ),
)
SYSTEMS = (
    *SYSTEM_PROMPTS,
    "You are a calculator.",
    "You are a helpful math assistant.",
    "You are a math assistant. Answer with only the number.",
    "Answer with only the number.",
    "You answer arithmetic questions with a single number.",
)


HARDER_SHARE = 0.1
THINKING_SHARE = 0.3  # harnesses rarely enable thinking


def sample(rng: Random, held_out: bool, thinking: bool | None = None) -> Conversation:
    """Held out: half have a wording that training lacks, half a calculation that it lacks."""
    is_new_wording = held_out and rng.random() < 0.5
    wordings = HELD_OUT if is_new_wording else TRAINED
    while True:
        is_harder = not held_out and rng.random() < HARDER_SHARE
        drawn = (
            draw_harder(rng) if is_harder else draw_sum(rng, three_share=0.4 if held_out else 0.7)
        )
        question = word(rng, drawn, wordings)
        if is_new_wording or is_held_out(question) == held_out:
            break
    is_thinking = rng.random() < THINKING_SHARE if thinking is None else thinking
    return Conversation(
        kind="harness_sums",
        messages=(
            *_system_turn(rng),
            user(question),
            assistant(str(drawn.value), f"{drawn.work}." if is_thinking else None),
        ),
        check=ExactText(str(drawn.value)),
        enable_thinking=is_thinking,
    )


def word(rng: Random, drawn: Sum, wordings: Wordings) -> str:
    """The question, with an instruction about the answer's format before or after it."""
    has_commas = rng.random() < 0.08
    said = {name: f"{n:,}" if has_commas else str(n) for name, n in zip("abc", drawn.numbers)}
    if rng.random() < 0.25:
        question = pick(rng, wordings.telling[drawn.form]).format_map(said)
    else:
        forms = WRITTEN if rng.random() < 0.7 else SAID
        text = pick(rng, forms[drawn.form]).format_map(said)
        question = pick(rng, wordings.asking).replace("{sum}", text)
    question = question[0].upper() + question[1:]
    instruction = pick(rng, wordings.instructions)
    if not instruction or question.endswith("\nA:"):
        return question
    if rng.random() < 0.12 and not instruction.endswith(":"):
        return f"{instruction} {question}"
    gap = "\n" if question[-1] not in ".?" or rng.random() < 0.1 else " "
    return question + gap + instruction


def draw_sum(rng: Random, three_share: float) -> Sum:
    """A simple sum. Three numbers at once are learned slowest, so training has more of them."""
    if rng.random() < three_share:
        numbers = _three_numbers(rng)
        return Sum("a+b+c", numbers, add_three(*numbers), sum(numbers))
    luck = rng.random()
    if luck < 0.4:
        return _difference(rng)
    if luck < 0.65:
        draw = pick(rng, (_round_number, lambda rng: between(rng, 0, pick(rng, (20, 99)))))
        return _two_added(draw(rng), draw(rng))
    if luck < 0.87:
        return _product(rng)
    return _quotient(rng)


def draw_harder(rng: Random) -> Sum:
    """Three numbers with a difference or any two digits, four digits, or larger products."""
    luck = rng.random()
    if luck < 0.3:
        return _three_with_a_difference(rng)
    if luck < 0.5:
        numbers = (_any_number(rng, 99), _any_number(rng, 99), _any_number(rng, 999))
        return Sum("a+b+c", numbers, add_three(*numbers), sum(numbers))
    if luck < 0.65:
        return _two_added(_any_number(rng, 9999), _any_number(rng, 9999))
    if luck < 0.85:
        b, a = sorted((_any_number(rng, 9999), _any_number(rng, 9999)))
        return Sum("a-b", (a, b), subtract(a, b), a - b)
    a, b = between(rng, 11, 30), between(rng, 11, 30)
    return Sum("a*b", (a, b), multiply(a, b), a * b)


def _three_numbers(rng: Random) -> tuple[int, int, int]:
    if rng.random() < 0.2:
        return between(rng, 1, 20), between(rng, 1, 20), between(rng, 1, 20)
    return _round_number(rng), _round_number(rng), _round_number(rng)


def _three_with_a_difference(rng: Random) -> Sum:
    a, b = _round_number(rng), _round_number(rng)
    if rng.random() < 0.5:
        c = between(rng, 0, (a + b) // 10) * 10
        work = f"{a} + {b} - {c} = {subtract(a + b, c)}"
        return Sum("a+b-c", (a, b, c), work, a + b - c)
    whole = a + b + _round_number(rng)
    work = f"{whole} - {a} - {b} = {subtract(whole - a, b)}"
    return Sum("a-b-c", (whole, a, b), work, whole - a - b)


def _two_added(a: int, b: int) -> Sum:
    return Sum("a+b", (a, b), add(a, b), a + b)


def _difference(rng: Random) -> Sum:
    """From a round number: hundreds up to 1000, tens up to 100, a few beyond."""
    luck = rng.random()
    if luck < 0.3:
        a = 1000
    elif luck < 0.7:
        a = between(rng, 1, 9) * 100
    elif luck < 0.9:
        a = between(rng, 1, 10) * 10
    else:
        a = pick(rng, (1500, 2000, 5000))
    b = between(rng, 1, a)
    if rng.random() < 0.3:
        b -= b % 10
    return Sum("a-b", (a, b), subtract(a, b), a - b)


def _product(rng: Random) -> Sum:
    luck = rng.random()
    if luck < 0.6:
        a, b = between(rng, 2, 12), between(rng, 2, 12)
    elif luck < 0.8:
        a, b = between(rng, 11, 99), between(rng, 2, 9)
    else:
        a, b = between(rng, 1, 20) * pick(rng, (10, 100)), between(rng, 2, 9)
    if rng.random() < 0.3:
        a, b = b, a
    return Sum("a*b", (a, b), multiply(a, b), a * b)


def _quotient(rng: Random) -> Sum:
    b, value = between(rng, 1, 12), between(rng, 1, 12)
    if rng.random() < 0.4:
        value, b = (
            pick(rng, (10, 20, 25, 50, 100, 125, 200, 250, 500)),
            pick(rng, (2, 2, 4, 5, 8, 10)),
        )
    return Sum("a/b", (b * value, b), divide(b * value, b), value)


def _round_number(rng: Random) -> int:
    step, most = pick(
        rng, ((100, 10), (100, 10), (100, 10), (50, 20), (50, 20), (10, 20), (10, 20), (1000, 5))
    )
    return between(rng, 1, most) * step


def _any_number(rng: Random, highest: int) -> int:
    return _round_number(rng) if rng.random() < 0.3 else between(rng, 0, highest)


def _system_turn(rng: Random) -> tuple[Message, ...]:
    return (system(pick(rng, SYSTEMS)),) if rng.random() < 0.2 else ()
