"""Greetings, questions about the model and about Penstock, tiny skills, stories, and "I do not
know".
"""

from __future__ import annotations

from random import Random

from penstock.eval.conversation import Conversation, ExactText
from training.problems.draft import with_article
from training.problems.draw import between, is_held_out, pick, pick_two
from training.problems.names import CITIES, COUNTRIES, invented_word, person, thing
from training.problems.topics import STORIES, TOPICS, UNKNOWN
from training.problems.turns import assistant, decide_thinking, sometimes_system, user

# Patterns around questions; most questions are unchanged.
OPENINGS = ("",) * 8 + (
    "Hi! ",
    "Hello. ",
    "Hey! ",
    "Please tell me: ",
    "I have a question. ",
    "Now something else. ",
)
CLOSINGS = ("",) * 8 + (" Thanks!", " Please be brief.", " I am curious.", " Tell me.")

Talk = tuple[str, str, str]  # user message, thought, answer


def sample(rng: Random, held_out: bool, thinking: bool | None = None) -> Conversation:
    key, (said, thought, answer) = _draw(rng)
    while (key is not None and is_held_out(key)) != held_out:
        key, (said, thought, answer) = _draw(rng)
    is_thinking = decide_thinking(rng, thinking)
    return Conversation(
        kind="small_talk",
        messages=(
            *sometimes_system(rng),
            user(said),
            assistant(answer, thought if is_thinking else None),
        ),
        check=ExactText(answer),
        enable_thinking=is_thinking,
    )


def _draw(rng: Random) -> tuple[str | None, Talk]:
    """A talk and its key; None for fixed phrases, which are few and must all be learned."""
    luck = rng.random()
    if luck < 0.6:
        topic = pick(rng, TOPICS)
        plain = pick(rng, topic.sayings)
        said = _decorate(rng, plain.lower() if rng.random() < 0.15 else plain)
        return None if said == plain else said, (said, topic.thought, topic.answer)
    if luck < 0.78:
        question, thought, answer = _unknown(rng)
        said = _decorate(rng, question)
        return said, (said, thought, answer)
    talk = _story(rng) if luck < 0.86 else pick(rng, SKILLS)(rng)
    return talk[0], talk


def _decorate(rng: Random, said: str) -> str:
    return pick(rng, OPENINGS) + said + pick(rng, CLOSINGS) if said.endswith("?") else said


def _unknown(rng: Random) -> Talk:
    question, subject = pick(rng, UNKNOWN)
    words = _words(rng)
    return (
        question.format_map(words),
        "I do not know this, and I say so.",
        f"I am a very small model; I do not know {subject.format_map(words)}.",
    )


def _story(rng: Random) -> Talk:
    request, story = pick(rng, STORIES)
    words = _words(rng)
    # A story uses only what the request names; other names must be the same every time.
    if "{name}" not in request:
        words |= {"name": "Mia", "he": "she", "He": "She", "his": "her", "him": "her"}
    return request.format_map(words), "The user wants a story.", story.format_map(words)


def _words(rng: Random) -> dict[str, str]:
    city, other_city = pick_two(rng, CITIES)
    item = thing(rng)[0]
    return {
        **person(rng),
        "city": city,
        "city2": other_city,
        "country": pick(rng, COUNTRIES),
        "thing": item,
        "a_thing": with_article(item),
        "word": invented_word(rng),
    }


def _repeat(rng: Random) -> Talk:
    words = " ".join(invented_word(rng).lower() for _ in range(between(rng, 1, 4)))
    form = pick(
        rng, ("Repeat after me: {}", "Say exactly this: {}", "Repeat: {}", "Please write: {}")
    )
    return form.format(words), "I repeat the words.", words


def _greet(rng: Random) -> Talk:
    name = person(rng)["name"]
    form = pick(rng, ("Say hello to {}.", "Greet {} for me.", "Please say hello to {}."))
    return form.format(name), f"I greet {name}.", f"Hello, {name}!"


def _meet(rng: Random) -> Talk:
    name = person(rng)["name"]
    form = pick(
        rng, ("My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}.", "Call me {}.")
    )
    return form.format(name), f"The user is called {name}.", f"Nice to meet you, {name}!"


def _count(rng: Random) -> Talk:
    start = between(rng, 0, 90)
    end = start + between(rng, 2, 9)
    form = pick(
        rng,
        ("Count from {} to {}.", "Please count from {} to {}.", "List the numbers from {} to {}."),
    )
    return form.format(start, end), "I count.", ", ".join(map(str, range(start, end + 1)))


def _compare(rng: Random) -> Talk:
    a = between(rng, 0, 999)
    b = between(rng, 0, 999)
    while b == a:
        b = between(rng, 0, 999)
    form = pick(
        rng,
        (
            "Which is larger, {} or {}?",
            "What is larger: {} or {}?",
            "Which number is bigger, {} or {}?",
        ),
    )
    larger, smaller = max(a, b), min(a, b)
    return form.format(a, b), f"{larger} > {smaller}.", str(larger)


def _neighbour(rng: Random) -> Talk:
    number = between(rng, 1, 998)
    if rng.random() < 0.5:
        form = pick(
            rng,
            (
                "What comes after {}?",
                "Which number comes after {}?",
                "What is the next number after {}?",
            ),
        )
        return form.format(number), f"{number} + 1 = {number + 1}.", str(number + 1)
    form = pick(rng, ("What comes before {}?", "Which number comes before {}?"))
    return form.format(number), f"{number} - 1 = {number - 1}.", str(number - 1)


def _parity(rng: Random) -> Talk:
    number = between(rng, 0, 999)
    kind = "odd" if number % 2 else "even"
    form = pick(rng, ("Is {} even or odd?", "Is the number {} odd or even?"))
    return form.format(number), f"{number} ends in {number % 10}.", f"{number} is {kind}."


def _spell(rng: Random) -> Talk:
    word = thing(rng)[0] if rng.random() < 0.6 else person(rng)["name"]
    form = pick(rng, ("Spell {}.", "How do you spell {}?", "Spell the word {}."))
    return form.format(word), "I spell it letter by letter.", "-".join(word.upper())


SKILLS = (_repeat, _greet, _meet, _meet, _count, _compare, _neighbour, _parity, _spell)
