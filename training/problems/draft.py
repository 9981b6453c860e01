"""A word problem under construction: its cast, sentences, lines of the solution, and value.

Scenes and tales fill a draft; word_problems.py turns it into a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from training.problems.draw import between, pick
from training.problems.names import person, thing


def with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


class Draft:
    """`words` fills the patterns; `key` identifies the combination of patterns and numbers, without
    names.
    """

    __slots__ = ("key", "lines", "question", "rng", "sentences", "unit", "value", "words")

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.sentences: list[str] = []
        self.lines: list[str] = []
        self.key: list[str] = []
        self.question = ""
        self.value = 0
        hero, friend = person(rng), person(rng)
        while friend["name"] == hero["name"]:
            friend = person(rng)
        self.unit = thing(rng)
        other = thing(rng)
        while other == self.unit:
            other = thing(rng)
        self.words: dict[str, str | int] = {
            **hero,
            "friend": friend["name"],
            "thing": self.unit[0],
            "things": self.unit[1],
            "a_thing": with_article(self.unit[0]),
            "A_thing": with_article(self.unit[0]).capitalize(),
            "other": other[0],
            "others": other[1],
            "a_other": with_article(other[0]),
            "A_other": with_article(other[0]).capitalize(),
        }

    def number(self, lowest: int, highest: int) -> int:
        return between(self.rng, lowest, highest)

    def say(self, patterns: Sequence[str], **numbers: int) -> None:
        """Adds one of the patterns as the next sentence."""
        self.sentences.append(self._fill(patterns, numbers))

    def ask(self, patterns: Sequence[str], **numbers: int) -> None:
        """Sets one of the patterns as the question."""
        self.question = self._fill(patterns, numbers)

    def work(self, line: str, value: int) -> None:
        """Adds one line of the solution, with its value."""
        self.lines.append(line)
        self.value = value

    def has(self, calculation: str, value: int) -> None:
        self.work(f"{self.words['name']} has {calculation} {self.name_unit(value)}.", value)

    def name_unit(self, value: int) -> str:
        return self.unit[value != 1]

    def _fill(self, patterns: Sequence[str], numbers: dict[str, int]) -> str:
        pattern = pick(self.rng, patterns)
        self.words.update(numbers)
        self.key.append(f"{pattern}{[*numbers.values()]}")
        return pattern.format_map(self.words)
