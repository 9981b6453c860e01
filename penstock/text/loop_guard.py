"""Detects a reply that only repeats itself.

A model may get stuck and write the same few tokens, or the same paragraph, until a limit. The guard
checks the end of a reply every `CHECK_EVERY` tokens, and reports a loop if the end consists of one
repeated run of tokens: at least `MIN_REPEATS` times and at least `MIN_TOKENS` long. It sees tokens,
not text, and decides nothing: the caller ends the thinking or the reply.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

MIN_TOKENS = 192
MIN_REPEATS = 6
MAX_PERIOD = 160  # longest repeated run, in tokens
CHECK_EVERY = 64  # tokens between two checks


class LoopGuard:
    """The guard of one reply; receives all of its tokens."""

    def __init__(self) -> None:
        self._token_ids: array[int] = array("i")
        self._num_unchecked = 0

    def push(self, token_ids: Iterable[int]) -> bool:
        """Adds tokens; returns whether a check was due and found a loop."""
        num_before = len(self._token_ids)
        self._token_ids.extend(token_ids)
        self._num_unchecked += len(self._token_ids) - num_before
        if self._num_unchecked < CHECK_EVERY:
            return False
        self._num_unchecked = 0
        del self._token_ids[: -MIN_REPEATS * MAX_PERIOD]  # more is never checked
        return find_loop(self._token_ids) is not None


def find_loop(token_ids: array[int]) -> int | None:
    """The length of the repeated run at the end; None: no loop."""
    data, width = token_ids.tobytes(), token_ids.itemsize
    for period in range(1, MAX_PERIOD + 1):
        num_tokens = max(MIN_TOKENS, MIN_REPEATS * period)
        if num_tokens > len(token_ids):
            return None
        if token_ids[-1] != token_ids[-1 - period]:
            continue
        start = len(data) - width * num_tokens
        if data[start + width * period :] == data[start : -width * period]:
            return period
    return None
