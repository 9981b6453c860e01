"""Reasoning as part of the content, between the model's own tags: for clients without a field for
it.

Wraps a parser and only changes kinds of deltas. The prompt has opened the first thinking block, so
its opening tag is not among the reply's tokens; it is added here, because clients that fold
reasoning look for it.
"""

from __future__ import annotations

from penstock.text.dialects.deltas import ContentDelta, Delta, ReasoningDelta
from penstock.text.dialects.dialect import Thinking
from penstock.text.dialects.parser import StreamParser
from penstock.types import FinishReason


class ThoughtsInContent:
    """A parser without `ReasoningDelta`. A thinking block in which the reply ends stays open."""

    def __init__(self, parser: StreamParser, thinking: Thinking) -> None:
        self._parser = parser
        self._start = f"{thinking.start}\n"
        self._end = thinking.forced_end
        self._is_open = False

    @property
    def is_thinking(self) -> bool:
        return self._parser.is_thinking

    def feed(self, text: str) -> list[Delta]:
        return self._as_content(self._parser.feed(text))

    def close(self, finish: FinishReason) -> list[Delta]:
        *rest, end = self._parser.close(finish)
        return [*self._as_content(rest), end]

    def _as_content(self, deltas: list[Delta]) -> list[Delta]:
        texts = ""
        told: list[Delta] = []
        for delta in deltas:
            is_thought = isinstance(delta, ReasoningDelta)
            texts += self._turn(is_thought)
            if isinstance(delta, ContentDelta | ReasoningDelta):
                texts += delta.text
            else:
                told += [*_content(texts), delta]
                texts = ""
        if not self._parser.is_thinking:
            texts += self._turn(False)
        return [*told, *_content(texts)]

    def _turn(self, to_thought: bool) -> str:
        """The tag between the last text and the next."""
        if to_thought == self._is_open:
            return ""
        self._is_open = to_thought
        return self._start if to_thought else self._end


def _content(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []
