"""State checkpoints: where they are, what each one is worth, and which one is evicted for another.

A checkpoint is worth the tokens it saves, those beyond the checkpoint below it, times the
probability that a prompt continues from it. The checkpoint with the lowest rank is evicted first:

    rank = floor + probability * saved tokens        floor: the rank of the last evicted one

A use renews the rank and raises the probability. The floor rises with every eviction, so an unused
checkpoint sinks without being touched: guesses first, small ones before large ones, much used ones
last. A new one that ranks below all others is refused, which raises the floor too: nothing stays
forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, KeysView, Sequence
from dataclasses import dataclass

# Probabilities that a prompt continues from a checkpoint; only their ratios matter.
LADDER = 0.01  # a rung of a long prompt, without any evidence
GUESS = 0.1  # where messages begin and prompts end
PROVEN = 1.0  # two prompts have diverged there
MOST = 4.0  # after several uses, each of which adds PROVEN


@dataclass(slots=True)
class Checkpoint:
    slot: int
    base: bytes | None  # the checkpoint below it
    saved: int  # tokens from there on
    chance: float
    rank: float


class Checkpoints:
    """All checkpoints that prompts can continue from, by the digest of the last page before
    them.
    """

    def __init__(self) -> None:
        self._all: dict[bytes, Checkpoint] = {}
        self._pins: Counter[bytes] = Counter()
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._all

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def pinned(self) -> Counter[bytes]:
        return self._pins

    def slots(self) -> Iterator[int]:
        return (checkpoint.slot for checkpoint in self._all.values())

    def digests(self) -> KeysView[bytes]:
        return self._all.keys()

    def slot_at(self, digest: bytes) -> int | None:
        checkpoint = self._all.get(digest)
        return None if checkpoint is None else checkpoint.slot

    def nearest(self, digests: Sequence[bytes], num_pages: int) -> int:
        """The number of pages, at most `num_pages`, before the deepest checkpoint."""
        while num_pages > 0 and digests[num_pages - 1] not in self._all:
            num_pages -= 1
        return num_pages

    def attach(
        self, digest: bytes, slot: int, *, base: bytes | None, saved: int, chance: float
    ) -> None:
        assert digest not in self._all
        self._all[digest] = Checkpoint(slot, base, saved, chance, self._floor + chance * saved)

    def use(self, digest: bytes) -> None:
        """A prompt continues from it."""
        checkpoint = self._all.get(digest)
        if checkpoint is not None:
            checkpoint.chance = min(checkpoint.chance + PROVEN, MOST)
            checkpoint.rank = self._floor + checkpoint.chance * checkpoint.saved

    def evict_for(self, worth: float, keep: Collection[int | None]) -> int | None:
        """Removes the lowest one that is neither pinned nor in `keep`, for a new one of this worth.
        Returns its slot. None: there is no such checkpoint, or the new one would rank below it.
        """
        digest = self._lowest(keep)
        if digest is None:
            return None
        rank = self._all[digest].rank
        if rank > self._floor + worth:
            self._floor += worth
            return None
        self._floor = max(self._floor, rank)
        return self.forget(digest)

    def forget(self, digest: bytes) -> int | None:
        """Removes this one, if it exists. Returns its slot; the checkpoints above it now save
        more.
        """
        gone = self._all.pop(digest, None)
        if gone is None:
            return None
        for checkpoint in self._all.values():
            if checkpoint.base == digest:
                checkpoint.base = gone.base
                checkpoint.saved += gone.saved
                checkpoint.rank += checkpoint.chance * gone.saved
        return gone.slot

    def pin(self, digest: bytes) -> None:
        assert digest in self._all
        self._pins[digest] += 1

    def unpin(self, digest: bytes) -> None:
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]

    def is_pinned(self, digest: bytes) -> bool:
        return digest in self._pins

    def check(self) -> None:
        """Asserts that all ranks are consistent."""
        assert self._pins.keys() <= self._all.keys(), "a pinned checkpoint was evicted"
        for checkpoint in self._all.values():
            assert checkpoint.saved > 0, "a checkpoint saves nothing"
            assert 0 < checkpoint.chance <= MOST
            assert checkpoint.base is None or checkpoint.base in self._all, "a base is gone"

    def _lowest(self, keep: Collection[int | None]) -> bytes | None:
        """Among equal ranks, the oldest."""
        candidates = (
            (checkpoint.rank, digest)
            for digest, checkpoint in self._all.items()
            if checkpoint.slot not in keep and digest not in self._pins
        )
        return min(candidates, key=lambda candidate: candidate[0], default=(0.0, None))[1]
