"""Keys and values in slots: a contiguous place of max_len tokens for every request."""

from __future__ import annotations

import torch

from penstock.forge.fragments.shape import Shape

FIRST_SLOTS = 8
MAX_SLOTS = 128
MEMORY_SHARE = 0.5  # of what is free once the weights are loaded
KEYS_AT_ONCE = 64  # a slot is a whole number of the blocks in which kernels read it


class Cache:
    """A slot of max_len tokens for every request, in every layer."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        slot_len = shape.max_len  # forge: when layers=torch
        slot_len = -(-shape.max_len // KEYS_AT_ONCE) * KEYS_AT_ONCE  # forge: when layers=kernels
        num_slots = FIRST_SLOTS  # forge: when graphs=none
        # forge: when graphs!=none
        slot_bytes = 2 * shape.num_layers * shape.num_key_rows * slot_len * dtype.itemsize
        num_slots = count_slots(slot_bytes, device)
        # forge: end
        size = (shape.num_layers, num_slots, shape.num_kv_heads, slot_len, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.free = list(reversed(range(num_slots)))
        self.spare = self.free.pop(0)  # for the rows that pad a captured step  # forge: when graphs!=none

    def take_slots(self, count: int) -> list[int]:
        # forge: when graphs=none
        while len(self.free) < count:
            self._grow()
        # forge: end
        # forge: when graphs!=none
        if count > len(self.free):
            raise MemoryError(f"{count} more requests do not fit; {len(self.free)} slots are free")
        # forge: end
        return [self.free.pop() for _ in range(count)]

    def give_back(self, slot: int) -> None:
        self.free.append(slot)

    # forge: when graphs=none
    def _grow(self) -> None:
        """Twice as many slots; requests keep theirs."""
        num_slots = self.keys.shape[1]
        self.keys = torch.cat([self.keys, torch.zeros_like(self.keys)], dim=1)
        self.values = torch.cat([self.values, torch.zeros_like(self.values)], dim=1)
        self.free = [*reversed(range(num_slots, 2 * num_slots)), *self.free]

    # forge: end


def count_slots(slot_bytes: int, device: torch.device) -> int:
    """As many as a share of the free memory holds. A captured step remembers addresses: they cannot move."""
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 28
    return max(2, min(MAX_SLOTS, int(free_bytes * MEMORY_SHARE) // slot_bytes))
