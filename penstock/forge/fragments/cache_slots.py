"""Keys and values in slots: contiguous memory for max_len tokens per request."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.forge.fragments.shape import Shape

FIRST_SLOTS = 8
MAX_SLOTS = 129  # for 64 requests, 64 prompts that replace them, and the rows that pad a step
MEMORY_SHARE = 0.5  # of what is free once the weights are loaded
KEYS_AT_ONCE = 64  # a slot is a whole number of the blocks that kernels read


class Cache:
    """A slot of max_len tokens for every request, in every layer."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        slot_len = shape.max_len  # forge: when layers=torch
        slot_len = -(-shape.max_len // KEYS_AT_ONCE) * KEYS_AT_ONCE  # forge: when layers=kernels
        slot_bytes = 2 * shape.num_layers * shape.num_key_rows * slot_len * dtype.itemsize
        num_slots = count_slots(slot_bytes, device)
        num_slots = min(num_slots, FIRST_SLOTS)  # more on demand  # forge: when graphs=none
        size = (shape.num_layers, num_slots, shape.num_kv_heads, slot_len, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.free = list(reversed(range(num_slots)))
        self.spare = self.free.pop(0)  # of rows that pad a step  # forge: when graphs!=none

    def take_slots(self, count: int) -> list[int]:
        """Sorted: consecutive slots can be read in place."""
        # forge: when graphs=none
        if count > len(self.free):
            self._grow(count - len(self.free))
        # forge: end
        # forge: when graphs!=none
        # A captured step has fixed addresses, so the slots cannot be reallocated.
        if count > len(self.free):
            raise MemoryError(f"{count} prompts do not fit; {len(self.free)} slots are free")
        # forge: end
        return sorted(self.free.pop() for _ in range(count))

    def give_back(self, slot: int) -> None:
        self.free.append(slot)

    # forge: when graphs=none
    def _grow(self, num_missing: int) -> None:
        """Doubles the slots, or adds only the missing ones if memory is short; requests keep
        theirs.
        """
        num_slots = self.keys.shape[1]
        for num_more in (max(num_slots, num_missing), num_missing):
            try:
                self.keys, self.values = extend(self.keys, num_more), extend(self.values, num_more)
            except RuntimeError as error:  # torch has no memory left; neither has changed
                shortage = error
            else:
                self.free = [*reversed(range(num_slots, num_slots + num_more)), *self.free]
                return
        slot_bytes = 2 * self.keys[:, :1].nbytes
        raise MemoryError(
            f"{num_missing} more slots of {self.keys.shape[3]} tokens do not fit beside "
            f"{num_slots}: each takes {slot_bytes / 1e9:.2f} GB"
        ) from shortage

    # forge: end


def extend(slots: Tensor, num_more: int) -> Tensor:
    """[layers, S, Hkv, slot_len, D] -> the same with empty slots at the end"""
    layers, num_slots, *slot = slots.shape
    extended = slots.new_zeros(layers, num_slots + num_more, *slot)
    extended[:, :num_slots] = slots
    return extended


def count_slots(slot_bytes: int, device: torch.device) -> int:
    """As many as a share of the free memory holds."""
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 28
    return max(2, min(MAX_SLOTS, int(free_bytes * MEMORY_SHARE) // slot_bytes))
