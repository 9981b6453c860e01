"""Which experts stay in a tier: the slots of a device, or the records in RAM. Decides with integers
and never touches a tensor.

    [ window: the last experts that came, oldest first | main: experts that earned their place )

A new expert enters the window. When a place is needed, the window's oldest expert competes with
main's least recently used one: the one with more uses stays. So a scan of all experts, such as the
prefill of a long prompt, passes through the window and leaves main as it was, while experts that
come again are kept. Uses are halved from time to time, so that old fame fades.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[int, int]  # layer, expert

WINDOW_SHARE = 8  # one place in so many is the window's
AGE_USES = 16  # per place, after which all uses are halved


@dataclass(frozen=True, slots=True)
class Taken:
    key: Key
    place: int
    is_new: bool  # the tier does not hold it yet: the caller fills the place


class Residency:
    def __init__(self, num_places: int) -> None:
        assert num_places > 0
        self.num_places = num_places
        self._window_places = max(1, num_places // WINDOW_SHARE)
        self._free = list(reversed(range(num_places)))
        self._place_of: dict[Key, int] = {}
        self._window: OrderedDict[Key, None] = OrderedDict()
        self._main: OrderedDict[Key, None] = OrderedDict()
        self._pinned: set[Key] = set()
        self._uses: dict[Key, int] = {}  # of experts that left, too
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._place_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._place_of

    def take(self, keys: Sequence[Key]) -> list[Taken]:
        """A place for each of these different keys. They keep it at least until `release`."""
        assert len(self._pinned.union(keys)) <= self.num_places
        are_new = [key not in self._place_of for key in keys]
        self._pinned.update(keys)  # before any is evicted for another
        for key, is_new in zip(keys, are_new):
            self._count(key)
            if is_new:
                self._place_of[key] = self._free.pop() if self._free else self._evict()
                self._window[key] = None
                self._settle()
            else:
                (self._window if key in self._window else self._main).move_to_end(key)
        return [Taken(key, self._place_of[key], is_new) for key, is_new in zip(keys, are_new)]

    def release(self) -> None:
        """The experts that were taken may be evicted again."""
        self._pinned.clear()

    def forget(self, key: Key) -> None:
        """Frees the place of an expert that could not be read."""
        self._window.pop(key, None)
        self._main.pop(key, None)
        self._pinned.discard(key)
        self._free.append(self._place_of.pop(key))

    def _count(self, key: Key) -> None:
        self._uses[key] = self._uses.get(key, 0) + 1
        self._num_uses += 1
        if self._num_uses >= AGE_USES * self.num_places:
            self._num_uses = 0
            self._uses = {key: uses // 2 for key, uses in self._uses.items() if uses > 1}

    def _settle(self) -> None:
        """While places were free, the window has let nobody go: its oldest move to main."""
        while len(self._window) > self._window_places and len(self._main) < self._main_places:
            key, _ = self._window.popitem(last=False)
            self._main[key] = None

    @property
    def _main_places(self) -> int:
        return self.num_places - self._window_places

    def _evict(self) -> int:
        candidate = self._oldest(self._window)
        victim = self._oldest(self._main)
        loser = candidate if victim is None else victim
        if candidate is not None and victim is not None and self._is_window_full:
            if self._uses.get(candidate, 0) > self._uses.get(victim, 0):
                self._window.pop(candidate)
                self._main[candidate] = None
            else:
                loser = candidate
        assert loser is not None, "fewer keys are pinned than there are places"
        self._window.pop(loser, None)
        self._main.pop(loser, None)
        return self._place_of.pop(loser)

    @property
    def _is_window_full(self) -> bool:
        return len(self._window) >= self._window_places

    def _oldest(self, segment: OrderedDict[Key, None]) -> Key | None:
        return next((key for key in segment if key not in self._pinned), None)
