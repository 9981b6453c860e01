"""Problems that follow one amount of things or money through gains, losses, doublings and shares.

A tale has an opening, up to three events and a question, each drawn from many patterns. Events make
sense in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.problems.arithmetic import add, divide, divisors, multiply, subtract
from training.problems.draft import Draft
from training.problems.draw import pick

MAX_VALUE = 999


@dataclass(frozen=True, slots=True)
class Wording:
    """The patterns for one sort of amount."""

    openings: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    group_gains: tuple[str, ...]  # {k} times {n}
    group_losses: tuple[str, ...]
    halvings: tuple[str, ...]
    doublings: tuple[str, ...]
    questions: tuple[str, ...]
    share_questions: tuple[str, ...]  # among {k}
    goal_questions: tuple[str, ...]  # {n} are wanted


THINGS = Wording(
    openings=(
        "{name} has {n} {things}.",
        "{name} starts the day with {n} {things}.",
        "There are {n} {things} in {name}'s basket.",
        "{name} owns {n} {things}.",
        "{name} keeps {n} {things} at home.",
        "{name} counts {his} {things} and finds {n}.",
        "At first {name} has {n} {things}.",
        "{friend} hands {name} {n} {things}, {his} first ones.",
    ),
    gains=(
        "{name} buys {n} more {things}.",
        "{friend} gives {him} {n} {things}.",
        "Then {he} finds {n} {things}.",
        "{His} brother brings {him} {n} more.",
        "{He} gets {n} {things} as a present.",
        "After that, {name} collects another {n} {things}.",
        "{name} wins {n} {things} in a game.",
        "In the afternoon {he} receives {n} more {things}.",
        "A neighbour adds {n} {things}.",
        "{He} picks up {n} more at the market.",
        "The next day {he} gets {n} extra {things}.",
        "{His} aunt sends {him} {n} {things}.",
    ),
    losses=(
        "{name} gives {n} {things} to {friend}.",
        "{He} loses {n} of them.",
        "{name} sells {n} {things}.",
        "Then {n} of the {things} are stolen.",
        "{friend} takes {n} of them.",
        "{He} leaves {n} {things} at school.",
        "On the way home {he} drops {n} {things}.",
        "{n} {things} turn out to be broken and are thrown away.",
        "{He} uses {n} of them.",
        "{name} lends {n} {things} to {friend} and does not get them back.",
        "{His} sister borrows {n} of the {things}.",
        "{He} trades {n} {things} for {a_other}.",
        "By evening {n} of them are gone.",
        "{name} donates {n} {things}.",
    ),
    group_gains=(
        "{He} buys {k} boxes with {n} {things} each.",
        "{k} friends bring {him} {n} {things} each.",
        "Then {he} gets {k} bags of {n} {things}.",
        "On each of the next {k} days {he} finds {n} {things}.",
        "{name} opens {k} packs, and every pack holds {n} {things}.",
    ),
    group_losses=(
        "{He} gives {n} {things} to each of {his} {k} friends.",
        "{He} sells {k} bags of {n} {things}.",
        "Each day for {k} days {he} uses {n} {things}.",
        "{k} children take {n} {things} each.",
        "{name} fills {k} boxes with {n} {things} each and sends them away.",
    ),
    halvings=(
        "{He} gives half of the {things} to {friend}.",
        "Half of them get lost.",
        "{name} sells half of {his} {things}.",
        "Then half of the {things} are used up.",
    ),
    doublings=(
        "Then the number of {his} {things} doubles.",
        "{friend} gives {him} as many {things} as {he} already has.",
        "{name} works hard until {he} has twice as many {things}.",
    ),
    questions=(
        "How many {things} does {name} have now?",
        "How many {things} does {he} have in the end?",
        "How many {things} are there now?",
        "What is the number of {things} {name} ends up with?",
        "How many {things} does {name} have left?",
        "How many does {he} have at the end?",
    ),
    share_questions=(
        "{He} shares the {things} equally among {k} friends. How many {things} does each friend get?",
        "{name} packs all {his} {things} into {k} boxes, the same number in each. How many are in one box?",
        "If {he} puts {k} {things} into every bag, how many bags does {he} fill?",
        "{k} children split them evenly. How many {things} does each child get?",
    ),
    goal_questions=(
        "{name} wants to have {n} {things}. How many more does {he} need?",
        "How many {things} are missing until {he} has {n}?",
        "{His} goal is {n} {things}. How many more must {he} get?",
    ),
)

MONEY = Wording(
    openings=(
        "{name} has ${n}.",
        "{name} has {n} dollars in {his} wallet.",
        "There are {n} dollars in {name}'s piggy bank.",
        "{name} starts with ${n} in savings.",
        "{name} has saved {n} dollars.",
    ),
    gains=(
        "{He} earns ${n} by washing a car.",
        "{friend} pays {him} back ${n}.",
        "{name} gets ${n} for {his} birthday.",
        "{He} sells an old {other} for {n} dollars.",
        "Then {he} finds ${n} in a coat.",
        "{His} grandmother gives {him} {n} dollars.",
        "{name} wins ${n} in a contest.",
    ),
    losses=(
        "{He} spends ${n} on {a_other}.",
        "{name} pays {n} dollars for lunch.",
        "{He} buys {a_thing} for ${n}.",
        "{He} gives ${n} to {friend}.",
        "A bus ticket costs {him} {n} dollars.",
        "{name} loses ${n} on the street.",
        "{He} donates ${n}.",
    ),
    group_gains=(
        "{He} works {k} hours for ${n} an hour.",
        "{name} sells {k} {things} for ${n} each.",
        "For {k} weeks {he} gets ${n} a week.",
        "{k} neighbours pay {him} {n} dollars each.",
    ),
    group_losses=(
        "{He} buys {k} {things} for ${n} each.",
        "{name} pays for {k} tickets at ${n} each.",
        "On each of {k} days {he} spends {n} dollars.",
        "{He} buys {k} {others}, which cost ${n} each.",
    ),
    halvings=(
        "{He} spends half of {his} money on {a_other}.",
        "{name} gives half of the money to {friend}.",
        "Half of the money goes into the bank.",
    ),
    doublings=(
        "{His} father doubles the money.",
        "{friend} gives {him} as much money as {he} already has.",
    ),
    questions=(
        "How much money does {name} have now?",
        "How many dollars does {he} have left?",
        "How much money does {he} have in the end?",
        "How many dollars does {name} have now?",
    ),
    share_questions=(
        "{He} splits the money equally among {k} people. How many dollars does each get?",
        "{name} buys {others} for ${k} each with all the money. How many {others} does {he} get?",
    ),
    goal_questions=(
        "{He} wants {a_other} that costs ${n}. How many dollars are missing?",
        "How much more does {name} need to have ${n}?",
    ),
)

DISTRACTORS = (
    "{name} is {d} years old.",
    "The shop around the corner sells {d} kinds of {others}.",
    "It is {d} degrees outside.",
    "{His} house has the number {d}.",
    "There are {d} children in {name}'s class.",
    "The school is {d} kilometers away.",
    "A book about {others} has {d} pages.",
    "{name} woke up at {d} minutes past six.",
    "{His} favourite {other} weighs {d} grams.",
    "The bus to town takes {d} minutes.",
    "Next to the door there are {d} {others}.",
)


def write_tale(draft: Draft) -> None:
    """Writes an opening, events and a question."""
    wording = THINGS
    if draft.rng.random() < 0.3:
        wording = MONEY
        draft.unit = ("dollar", "dollars")
    open_tale(draft, wording)
    num_events = pick(draft.rng, (0, 1, 1, 1, 2, 2, 2, 2, 3, 3))
    for _ in range(num_events):
        tell_event(draft, wording)
    ask_for_amount(draft, wording, may_be_plain=num_events > 0)


def open_tale(draft: Draft, wording: Wording) -> None:
    size = draft.rng.random()
    highest = 30 if size < 0.5 else 120 if size < 0.85 else 500
    value = draft.number(2, highest)
    draft.say(wording.openings, n=value)
    draft.value = value


def tell_event(draft: Draft, wording: Wording) -> None:
    """Adds one event that changes the current amount."""
    value, luck = draft.value, draft.rng.random()
    if luck < 0.1 and value >= 2 and value % 2 == 0:
        draft.say(wording.halvings)
        draft.work(f"Half of {value} is {divide(value, 2)}.", value // 2)
        draft.has(subtract(value, value // 2), value - value // 2)
    elif luck < 0.18 and 2 <= value <= 200:
        draft.say(wording.doublings)
        draft.has(multiply(value, 2), value * 2)
    elif luck < 0.32 and value <= 800:
        _gain_groups(draft, wording)
    elif luck < 0.42 and value >= 8:
        _lose_groups(draft, wording)
    elif (luck < 0.7 or value < 4) and value < MAX_VALUE - 1:
        n = draft.number(2, min(MAX_VALUE - value, 60 if draft.rng.random() < 0.7 else 400))
        draft.say(wording.gains, n=n)
        draft.has(add(value, n), value + n)
    else:
        n = draft.number(2, min(value, 60) if draft.rng.random() < 0.7 else value)
        draft.say(wording.losses, n=n)
        draft.has(subtract(value, n), value - n)


def _gain_groups(draft: Draft, wording: Wording) -> None:
    value = draft.value
    k, n = draft.number(2, 9), draft.number(2, 20)
    draft.say(wording.group_gains, k=k, n=n)
    draft.work(f"That is {multiply(k, n)} {draft.name_unit(2)}.", k * n)
    draft.has(add(value, k * n), value + k * n)


def _lose_groups(draft: Draft, wording: Wording) -> None:
    value = draft.value
    k = draft.number(2, min(9, value // 2))
    n = draft.number(2, min(20, value // k))
    draft.say(wording.group_losses, k=k, n=n)
    draft.work(f"That is {multiply(k, n)} {draft.name_unit(2)}.", k * n)
    draft.has(subtract(value, k * n), value - k * n)


def ask_for_amount(draft: Draft, wording: Wording, *, may_be_plain: bool) -> None:
    """Asks for the amount, a share of it, or what is missing to reach a goal."""
    value, luck = draft.value, draft.rng.random()
    if may_be_plain and luck < 0.6:
        draft.ask(wording.questions)
        return
    shares = divisors(value, 2, 12)
    if luck < 0.8 and shares and value:
        k = pick(draft.rng, shares)
        draft.ask(wording.share_questions, k=k)
        draft.work(f"{value} split by {k} is {divide(value, k)}.", value // k)
        draft.unit = ("", "")
        return
    goal = value + draft.number(2, 90)
    draft.ask(wording.goal_questions, n=goal)
    missing = goal - value
    draft.work(f"{draft.words['name']} needs {subtract(goal, value)} more.", missing)


def add_distractor(draft: Draft) -> None:
    """Inserts a sentence with an irrelevant number at a random position."""
    place = draft.number(1, len(draft.sentences))
    draft.say(DISTRACTORS, d=draft.number(5, 60))
    draft.sentences.insert(place, draft.sentences.pop())
