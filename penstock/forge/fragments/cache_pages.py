"""Keys and values in pages of one pool: a request holds as many as its length needs."""

from __future__ import annotations

import torch

from penstock.forge.fragments.shape import Shape

PAGE_SIZE = 64  # forge: value
MAX_REQUESTS = 256
MEMORY_SHARE = 0.5  # of what is free once the weights are loaded


class Cache:
    """Pages of one pool. A row of the table names those of a request, in their order."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        pages_each = -(-shape.max_len // PAGE_SIZE)
        page_bytes = 2 * shape.num_layers * shape.num_key_rows * PAGE_SIZE * dtype.itemsize
        num_pages = count_pages(page_bytes, MAX_REQUESTS * pages_each, device)
        size = (shape.num_layers, num_pages, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.table = torch.zeros(MAX_REQUESTS + 1, pages_each, dtype=torch.int32, device=device)
        self.free = list(reversed(range(MAX_REQUESTS)))
        self.spare = MAX_REQUESTS  # all its pages are page 0, which is reserved
        self.free_pages = list(reversed(range(1, num_pages)))
        self.pages: list[list[int]] = [[] for _ in range(MAX_REQUESTS)]

    def take_slots(self, count: int) -> list[int]:
        if count > len(self.free):
            raise MemoryError(f"{count} prompts do not fit; {len(self.free)} rows are free")
        return [self.free.pop() for _ in range(count)]

    def reserve(self, slots: list[int], lengths: list[int]) -> None:
        """Reserves pages for requests of these lengths; on an error, none."""
        needed = [
            (slot, index)
            for slot, length in zip(slots, lengths)
            for index in range(len(self.pages[slot]), -(-length // PAGE_SIZE))
        ]
        if len(needed) > len(self.free_pages):
            raise MemoryError(
                f"{len(needed)} more pages are needed; {len(self.free_pages)} are free"
            )
        if not needed:
            return
        pages = self.free_pages[: -len(needed) - 1 : -1]
        places = torch.tensor(needed, device=self.table.device)
        entries = torch.tensor(pages, dtype=torch.int32, device=self.table.device)
        self.table[places[:, 0], places[:, 1]] = entries
        del self.free_pages[-len(needed) :]
        for (slot, _), page in zip(needed, pages):
            self.pages[slot].append(page)

    def give_back(self, slot: int) -> None:
        self.free_pages += self.pages[slot]
        self.pages[slot] = []
        self.free.append(slot)


def count_pages(page_bytes: int, most: int, device: torch.device) -> int:
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 28
    return max(2, min(most + 1, int(free_bytes * MEMORY_SHARE) // page_bytes))
