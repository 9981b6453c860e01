"""Recall of facts from earlier in the conversation, after up to two thousand tokens.

Each fact is an owner, a label and a value that cannot be guessed. Between fact and question there
are other facts, short stories and turns of the other kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from penstock.eval.conversation import Conversation, Mentions, Message
from training.problems import small_talk, spot_checks, word_problems
from training.problems.draw import between, is_held_out, pick
from training.problems.names import (
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    MONTHS,
    ROOMS,
    WEEKDAYS,
    invented_code,
    invented_word,
    person,
    thing,
)
from training.problems.tool import Draw, clock_time, first_name, from_list, integer, place
from training.problems.turns import assistant, decide_thinking, sometimes_system, system, user

THE_USERS = "The user's"
MAX_FILLER_CHARS = 6_600
FAR_CHARS = 8_000
# Maximum length of the filler, and the cumulative share of conversations; a token has four
# characters.
FILLER_CHARS = ((0, 0.2), (350, 0.6), (1_200, 0.82), (3_200, 0.93), (MAX_FILLER_CHARS, 1.0))

_COLOUR, _FOOD, _CITY = from_list(COLOURS), from_list(FOODS), place(CITIES)

LABELS: dict[str, Draw] = {
    "favourite colour": _COLOUR, "car colour": _COLOUR, "door colour": _COLOUR, "team colour": _COLOUR,
    "favourite food": _FOOD, "usual breakfast": _FOOD, "favourite animal": from_list(ANIMALS),
    "home town": _CITY, "favourite city": _CITY, "birthplace": _CITY, "travel goal": _CITY,
    "birth month": from_list(MONTHS), "day off": from_list(WEEKDAYS), "sports day": from_list(WEEKDAYS),
    "lucky number": integer(2, 999), "house number": integer(2, 999), "bus number": integer(2, 99),
    "room number": integer(10, 999), "locker number": integer(10, 999), "shoe size": integer(30, 48),
    "age": integer(5, 90), "phone extension": integer(100, 9999), "door code": invented_code,
    "locker code": invented_code, "flight number": invented_code, "ticket number": invented_code,
    "order number": invented_code, "parking spot": invented_code, "badge number": invented_code,
    "password": invented_word, "secret word": invented_word, "project name": invented_word,
    "street": invented_word, "boat's name": invented_word, "team name": invented_word,
    "dog's name": invented_word, "cat's name": first_name, "sister's name": first_name,
    "brother's name": first_name, "teacher's name": first_name, "boss's name": first_name,
    "best friend's name": first_name, "neighbour's name": first_name, "appointment time": clock_time,
    "train time": clock_time, "hiding place": from_list(ROOMS), "favourite room": from_list(ROOMS),
}  # fmt: skip
_LABEL_NAMES = tuple(LABELS)

TELLINGS = (
    "{Owner} {label} is {value}.",
    "{Owner} {label} is {value}.",
    "Remember that {owner} {label} is {value}.",
    "Please note: {owner} {label} is {value}.",
    "By the way, {owner} {label} is {value}.",
    "I want you to know that {owner} {label} is {value}.",
    "Do not forget: {owner} {label} is {value}.",
)
QUESTIONS = (
    "What is {owner} {label}?",
    "What is {owner} {label}?",
    "Do you remember {owner} {label}?",
    "What was {owner} {label} again?",
    "Tell me {owner} {label}.",
    "I forgot {owner} {label}. What is it?",
    "Remind me: what is {owner} {label}?",
    "Can you tell me {owner} {label}?",
    "Please say what {owner} {label} is.",
)
MEETINGS = (
    "My name is {value}.",
    "Hello, my name is {value}.",
    "Hi, I am {value}.",
    "I am {value}.",
    "Call me {value}.",
)
NARRATIONS = (
    "{name} went to {city} on {day}.",
    "In the morning {name} bought some {things} at the market.",
    "It was a long day, and {name} was tired.",
    "The train to {city} was late again.",
    "{name} met an old friend in the {room}.",
    "On {day} it rained from morning to night.",
    "{name} put the {things} into the {room}.",
    "Nobody knew where the {things} had come from.",
    "Later they all sat down and talked about {city}.",
    "{name} told a story about {things} and laughed.",
    "In {city} the shops close early on {day}.",
    "There was a smell of bread in the {room}.",
    "{name} wrote a letter and forgot to send it.",
    "The children played with {things} until it was dark.",
    "A small bird sat on the window of the {room}.",
    "{name} wanted to learn how to paint {things}.",
    "They walked through the streets of {city} for hours.",
    "On {day} the {room} was cleaned.",
)


@dataclass(frozen=True, slots=True)
class Fact:
    owner: str  # "my", or "Mia's"
    label: str
    value: str

    @property
    def is_name(self) -> bool:
        return self.label == "name"

    @property
    def subject(self) -> str:
        """The subject of the fact, as the assistant refers to it."""
        return f"{'your' if self.owner == 'my' else self.owner} {self.label}"

    @property
    def statement(self) -> str:
        return f"{self.subject} is {self.value}"

    @property
    def system_sentence(self) -> str:
        """The fact as stated in a system prompt."""
        return f"{self.owner if self.owner != 'my' else THE_USERS} {self.label} is {self.value}."

    def fill(self, pattern: str) -> str:
        return pattern.format(
            owner=self.owner, Owner=capitalised(self.owner), label=self.label, value=self.value
        )


def sample(rng: Random, held_out: bool, thinking: bool | None = None) -> Conversation:
    is_thinking = decide_thinking(rng, thinking)
    luck = rng.random()
    if luck < 0.08:
        return _acknowledge(rng, held_out, is_thinking)
    facts = draw_facts(rng, held_out)
    asked = facts[0]
    is_told = luck > 0.16
    told = facts if is_told else facts[1:]
    question = asked.fill(pick(rng, QUESTIONS))
    if is_told:
        thought, answer = f"I was told that {asked.statement}.", capitalised(f"{asked.statement}.")
    else:
        thought = "I was not told this."
        answer = f"You have not told me {asked.subject}."
    others = {
        fact.value for fact in told if fact.value not in answer
    }  # an owner's name may also be a value
    return Conversation(
        kind="recall",
        messages=(
            *_history(rng, held_out, told),
            user(question),
            assistant(answer, thought if is_thinking else None),
        ),
        check=Mentions((asked.value,) if is_told else ("not", "told"), tuple(sorted(others))),
        enable_thinking=is_thinking,
    )


def sample_far(rng: Random, held_out: bool) -> Conversation:
    """One fact in the first turn, and its question after more than 2,000 other tokens."""
    asked = draw_facts(rng, held_out)[0]
    turns = [tell(rng, asked), *_draw_exchanges(rng, held_out, FAR_CHARS)]
    messages = [message for said, answer in turns for message in (user(said), assistant(answer))]
    question = user(asked.fill(pick(rng, QUESTIONS)))
    return Conversation(
        kind="recall",
        messages=(*messages, question, assistant(capitalised(f"{asked.statement}."))),
        check=Mentions((asked.value,), ()),
        enable_thinking=False,
    )


def draw_facts(rng: Random, held_out: bool) -> list[Fact]:
    """Facts with different questions. The first is the one to ask for, and decides whether the
    conversation is held out.
    """
    asked = _draw_fact(rng)
    while is_held_out(f"{asked.owner}{asked.label}{asked.value}") != held_out:
        asked = _draw_fact(rng)
    facts = [asked]
    for _ in range(pick(rng, (0, 0, 1, 1, 2, 2, 3, 4, 5))):
        # Half of the others share the label or the owner: neither alone identifies the answer.
        other = _draw_fact(rng, owner=asked.owner) if rng.random() < 0.25 else _draw_fact(rng)
        if rng.random() < 0.35 and asked.label in LABELS:
            other = Fact(other.owner, asked.label, str(LABELS[asked.label](rng)))
        if all((fact.owner, fact.label) != (other.owner, other.label) for fact in facts):
            facts.append(other)
    return facts


def _draw_fact(rng: Random, owner: str = "") -> Fact:
    if rng.random() < 0.06:
        return Fact("my", "name", first_name(rng))
    owner = owner or ("my" if rng.random() < 0.5 else f"{first_name(rng)}'s")
    label = pick(rng, _LABEL_NAMES)
    return Fact(owner, label, str(LABELS[label](rng)))


def _history(rng: Random, held_out: bool, facts: Sequence[Fact]) -> tuple[Message, ...]:
    """The facts in random order, in separate turns, in one turn or in the system prompt, among
    fillers.
    """
    facts = sorted(facts, key=lambda _: rng.random())
    turns = _draw_filler(rng, held_out)
    head = sometimes_system(rng)
    luck = rng.random()
    if luck < 0.12 and facts:
        head = (system(" ".join(fact.system_sentence for fact in facts)),)
    elif luck < 0.4 and len(facts) > 1:
        text = " ".join(fact.fill(TELLINGS[0]) for fact in facts)
        turns.insert(_early(rng, len(turns)), (text, "Noted."))
    else:
        for fact in facts:
            turns.insert(_early(rng, len(turns)), tell(rng, fact))
    return (
        *head,
        *(message for said, answer in turns for message in (user(said), assistant(answer))),
    )


def tell(rng: Random, fact: Fact) -> tuple[str, str]:
    """A user turn with one fact, and the assistant's reply to it."""
    if fact.is_name:
        return fact.fill(pick(rng, MEETINGS)), f"Nice to meet you, {fact.value}!"
    return fact.fill(pick(rng, TELLINGS)), f"Noted: {fact.statement}."


def _acknowledge(rng: Random, held_out: bool, is_thinking: bool) -> Conversation:
    """Ends with a user turn that states a fact, several facts, or a story."""
    facts = draw_facts(rng, held_out)
    luck = rng.random()
    if luck < 0.6:
        (said, answer), thought = tell(rng, facts[0]), "I keep this in mind."
        if facts[0].is_name:
            thought = f"The user is called {facts[0].value}."
    elif luck < 0.85 and len(facts) > 1:
        said, answer = " ".join(fact.fill(TELLINGS[0]) for fact in facts), "Noted."
        thought = "I keep this in mind."
    else:
        (said, answer), thought = narrate(rng, between(rng, 1, 4)), "The user tells me a story."
    return Conversation(
        kind="recall",
        messages=(
            *sometimes_system(rng),
            user(said),
            assistant(answer, thought if is_thinking else None),
        ),
        check=Mentions((facts[0].value,) if luck < 0.6 else ()),
        enable_thinking=is_thinking,
    )


def _draw_filler(rng: Random, held_out: bool) -> list[tuple[str, str]]:
    """Filler turns of about a drawn total length."""
    luck = rng.random()
    most = next(most for most, edge in FILLER_CHARS if luck < edge)
    return _draw_exchanges(rng, held_out, most * (0.5 + 0.5 * rng.random()))


def _draw_exchanges(rng: Random, held_out: bool, num_chars: float) -> list[tuple[str, str]]:
    turns: list[tuple[str, str]] = []
    left = num_chars
    while left > 150:
        said, answer = _draw_exchange(rng, held_out, int(left))
        if len(said) + len(answer) > left:
            continue
        left -= len(said) + len(answer) + 30  # control tokens around two turns
        turns.append((said, answer))
    return turns


def _draw_exchange(rng: Random, held_out: bool, most_chars: int) -> tuple[str, str]:
    luck = rng.random()
    if luck < 0.5:
        return narrate(rng, between(rng, 1, max(1, min(12, most_chars // 80))))
    kind = word_problems if luck < 0.62 else spot_checks if luck < 0.8 else small_talk
    messages = kind.sample(rng, held_out, False).messages
    said, answer = messages[-2]["content"], messages[-1]["content"]
    # An introduction in a filler would be a second answer to "what is my name?".
    return narrate(rng, 1) if answer.startswith("Nice to meet you") else (said, answer)


def narrate(rng: Random, num_sentences: int) -> tuple[str, str]:
    words = {
        "name": person(rng)["name"],
        "city": pick(rng, CITIES),
        "day": pick(rng, WEEKDAYS),
        "room": pick(rng, ROOMS),
        "things": thing(rng)[1],
    }
    # A stride that is coprime to the number of sentences never repeats one.
    start, stride = between(rng, 0, len(NARRATIONS) - 1), pick(rng, (5, 7, 11))
    text = " ".join(
        [
            NARRATIONS[(start + n * stride) % len(NARRATIONS)].format_map(words)
            for n in range(num_sentences)
        ]
    )
    return text, "Thank you for telling me."


def _early(rng: Random, num_turns: int) -> int:
    """An index into the turns, more often near the start than near the end."""
    return int(num_turns * rng.random() ** 2 + 0.5 * rng.random())


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]
