"""Notices a reply that only repeats itself.

A model that has lost its way writes the same few tokens, or the same paragraph, until a limit ends it. The
guard looks at the end of a reply now and then, and calls it a loop when the end consists of one run of tokens
over and over: at least `MIN_REPEATS` times and at least `MIN_TOKENS` long. It judges tokens, knows no text,
and decides nothing: who asked closes the thought or ends the reply.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

MIN_TOKENS = 192
MIN_REPEATS = 6
MAX_PERIOD = 160  # tokens of what is repeated
CHECK_EVERY = 64  # tokens: a loop does not run away


class LoopGuard:
    """One reply's; hears of all its tokens."""

    def __init__(self) -> None:
        self._token_ids: array[int] = array("i")
        self._num_unchecked = 0

    def push(self, token_ids: Iterable[int]) -> bool:
        """More tokens; whether the reply is a loop by now, as far as it was looked at."""
        num_before = len(self._token_ids)
        self._token_ids.extend(token_ids)
        self._num_unchecked += len(self._token_ids) - num_before
        if self._num_unchecked < CHECK_EVERY:
            return False
        self._num_unchecked = 0
        del self._token_ids[: -MIN_REPEATS * MAX_PERIOD]  # more is never looked at
        return find_loop(self._token_ids) is not None


def find_loop(token_ids: array[int]) -> int | None:
    """The length of what the end repeats; None when it is no loop."""
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
