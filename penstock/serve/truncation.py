"""Conversations truncated to the context: the oldest messages go, system messages at the start
stay.

A conversation is cut before a user message, so that no call loses its result and no result its
call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from penstock.errors import ContextLengthError

Message = dict[str, Any]


def without_oldest(
    messages: list[Message], require_fit: Callable[[list[Message]], None]
) -> list[Message]:
    """As many of the last messages as fit, but not all; `require_fit` raises `ContextLengthError`
    for too many. If even the last turn does not fit, it raises that error."""
    num_system = len(
        list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    )
    places = range(num_system, len(messages))
    starts = [place for place in places if messages[place]["role"] == "user"] or [num_system]

    def cut_at(start: int) -> list[Message]:
        return [*messages[:num_system], *messages[start:]]

    first, last = min(1, len(starts) - 1), len(starts) - 1
    while first < last:
        middle = (first + last) // 2
        try:
            require_fit(cut_at(starts[middle]))
            last = middle
        except ContextLengthError:
            first = middle + 1
    require_fit(cut_at(starts[last]))
    return cut_at(starts[last])
