"""Drafts from the longest suffix that occurred before: in the prompt, the reply, or an earlier
reply to the same tenant.

Every text indexes the positions of its n-grams, so a look-up needs no search; each match is
extended backwards, and the longest one wins. The longer the match, the more tokens are drafted.
Replies are kept by cache scope: tenants never draft from each other's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from weakref import WeakKeyDictionary

from penstock.types import Sequence

LENGTH = 3  # of the n-grams: the shortest suffix that counts
LONGEST = 32  # longer suffixes are not compared
NUM_PLACES = 8  # most recent positions of an n-gram to compare
NUM_REPLIES = 64  # kept per scope
NUM_SCOPES = 256


class SuffixDrafter:
    is_costly = False

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()
        self._replies: OrderedDict[str, deque[_Text]] = OrderedDict()

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        own = self._texts.get(sequence)
        if own is None:
            own = self._texts[sequence] = _Text(sequence.tokens)
        own.read()
        texts = [own, *self._replies.get(sequence.request.cache_scope, ())]
        found = [(*text.find(sequence.tokens), text) for text in texts]
        length, end, text = max(found, key=lambda one: one[0])
        return text.after(end, min(most, 2 * length)) if length else ()

    def end(self, sequence: Sequence) -> None:
        """Keeps its reply, which later requests of the tenant may repeat."""
        reply = _Text(sequence.tokens[sequence.num_prompt_tokens :])
        reply.read()
        scope = sequence.request.cache_scope
        self._replies.setdefault(scope, deque(maxlen=NUM_REPLIES)).append(reply)
        self._replies.move_to_end(scope)
        if len(self._replies) > NUM_SCOPES:
            self._replies.popitem(last=False)


class _Text:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._ends: dict[tuple[int, ...], deque[int]] = {}
        self._num_read = LENGTH

    def read(self) -> None:
        """Indexes the n-grams of new tokens, except the one at the very end, which nothing
        follows.
        """
        tokens = self._tokens
        for end in range(self._num_read, len(tokens)):
            key = tuple(tokens[end - LENGTH : end])
            self._ends.setdefault(key, deque(maxlen=NUM_PLACES)).append(end)
        self._num_read = max(self._num_read, len(tokens))

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """The length of the longest suffix of `tokens` that occurs here, and where it ends."""
        best, best_end = 0, 0
        for end in reversed(self._ends.get(tuple(tokens[-LENGTH:]), ())):
            length = LENGTH
            while length < min(LONGEST, end, len(tokens)) and (
                self._tokens[end - length - 1] == tokens[-length - 1]
            ):
                length += 1
            if length > best:
                best, best_end = length, end
        return best, best_end

    def after(self, end: int, num_tokens: int) -> tuple[int, ...]:
        """The tokens that followed; a text that repeats itself is expected to continue."""
        period = len(self._tokens) - end
        return tuple(self._tokens[end + place % period] for place in range(num_tokens))
