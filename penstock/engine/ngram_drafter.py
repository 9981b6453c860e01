"""Drafts by prompt lookup: the tokens that followed the same n-gram the last time.

The positions of all n-grams of a sequence are indexed, so a proposal processes only the new tokens.
The longest n-gram that occurred before decides.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from penstock.types import Sequence

LENGTHS = (4, 3, 2)  # of the n-grams, longest first


class NgramDrafter:
    is_costly = False

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Sequence, _Places] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        places = self._seen.get(sequence)
        if places is None:
            places = self._seen[sequence] = _Places()
        return places.propose(sequence.tokens, most)

    def end(self, sequence: Sequence) -> None:
        self._seen.pop(sequence, None)


class _Places:
    """Where each n-gram of a text ended last, except the one at its very end."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_read = 0

    def propose(self, tokens: list[int], most: int) -> tuple[int, ...]:
        for end in range(self._num_read, len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._num_read = max(self._num_read, len(tokens))
        for length in LENGTHS:
            last = self._ends.get(tuple(tokens[-length:])) if length < len(tokens) else None
            if last is not None:
                # A text that repeats itself is expected to continue.
                period = len(tokens) - last
                return tuple(tokens[last + place % period] for place in range(most))
        return ()
