"""Words that a reply must not contain, as token ids: computes which tokens may not come next. Knows
no tensors.

The last token of a word is forbidden where the reply ends with all its other tokens; a word of one
token is always forbidden. As in other engines, a word is not found if the model writes it with
other tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


class BannedWords:
    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._always: list[int] = []
        self._after: dict[int, list[tuple[int, ...]]] = defaultdict(
            list
        )  # by the second to last token
        for word in words:
            if len(word) == 1:
                self._always.append(word[0])
            elif word:
                self._after[word[-2]].append(word)

    def __bool__(self) -> bool:
        return bool(self._always or self._after)

    def next_ids(self, tokens: list[int], start: int) -> list[int]:
        """The ids that may not follow these tokens; the reply begins at `start`."""
        begun = self._after.get(tokens[-1], ()) if len(tokens) > start else ()
        return self._always + [word[-1] for word in begun if _ends_with(tokens, start, word[:-1])]


def _ends_with(tokens: list[int], start: int, beginning: tuple[int, ...]) -> bool:
    first = len(tokens) - len(beginning)
    return first >= start and tuple(tokens[first:]) == beginning
