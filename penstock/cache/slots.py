"""The pool of state slots. A slot has one owner: a running sequence or a checkpoint.

Slot 0 is reserved for padding rows and never handed out. Slots are not shared, since a state is
overwritten by every step; a checkpoint is read once and then continued in another slot.
"""

from __future__ import annotations


class SlotPool:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        assert 0 < slot < self.num_slots, f"there is no slot {slot} to give back"
        self._free.append(slot)

    def free_slots(self) -> frozenset[int]:
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        return frozenset(self._free)
