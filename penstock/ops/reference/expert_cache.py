"""Slots for the experts of a layer: assigns slots to the experts of a step, and copies missing
ones.

The host does not take part: the device keeps the table of its slots, chooses what to evict, and
reads experts from host memory itself, so that a step is one graph whatever it misses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MEMORY = 0.1  # weight of a layer's last step in its experts' scores
NUM_COUNTS = 3  # hits, misses, and fetched misses


def take_slots(
    ids: Tensor,  # [T, k]  experts; those of a token differ
    weights: Tensor,  # [T, k] float32
    slot_of: Tensor,  # [E] int32  -1: no slot holds it; written
    scores: Tensor,  # [E] float32  how often it was needed recently; written
    marks: Tensor,  # [E] int32  zeros, before and after
    counts: Tensor,  # [NUM_COUNTS] int64  added to
    host_share: Tensor,  # [1] float32  share of missing experts that the host computes
    num_slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [T, k], [T, k], [T, k], [1 + 2 * n] int32
    """Slots and weights in place of experts and weights. Experts left to the host get slot
    `num_slots`, which holds zeros, and weight 0; their weights are in the third result. The last
    one lists what to fetch: the count, then an expert and its slot for each.

    The experts with the lowest scores are evicted; of the missing ones, those with the lowest
    scores are left to the host. A step that needs most experts says little about which are popular,
    and changes scores little.
    """
    num_experts = len(slot_of)
    needed = torch.zeros(num_experts, dtype=torch.bool, device=ids.device)
    needed[ids.flatten().long()] = True
    num_needed = int(needed.sum())
    moved = MEMORY * (1 - num_needed / (num_experts + 1))
    scores.mul_(1 - moved).add_(needed.float(), alpha=moved)
    held = slot_of >= 0
    missing = (needed & ~held).nonzero().flatten().tolist()
    evictable = (held & ~needed).nonzero().flatten().tolist()
    rated = scores.tolist()
    missing.sort(key=lambda expert: (-rated[expert], expert))
    evictable.sort(key=lambda expert: (rated[expert], expert))
    num_host = int(len(missing) * float(host_share) + 0.5)
    num_fetched = min(len(missing) - num_host, len(evictable))
    wanted = torch.zeros(1 + 2 * min(ids.numel(), num_experts), dtype=torch.int32)
    wanted[0] = num_fetched
    for place, (new, old) in enumerate(zip(missing[:num_fetched], evictable)):
        slot = int(slot_of[old])
        slot_of[old], slot_of[new] = -1, slot
        wanted[1 + 2 * place], wanted[2 + 2 * place] = new, slot
    counts += torch.tensor([num_needed - len(missing), len(missing), num_fetched])
    slots = slot_of[ids.long()].to(ids.dtype)
    is_host = slots < 0
    return (
        slots.masked_fill(is_host, num_slots),
        weights.masked_fill(is_host, 0.0),
        weights.masked_fill(~is_host, 0.0),
        wanted,
    )


def fetch_experts(
    wanted: Tensor,  # [1 + 2 * n] int32  from `take_slots`
    sources: Sequence[Tensor],  # [E, ...]  in host memory, pinned
    targets: Sequence[Tensor],  # [S, ...]  the slots
    table: Tensor,  # [F, 4] int64  from `copy_table`
) -> None:
    """Copies every expert of the list into its slot."""
    count, *pairs = wanted.tolist()
    for place in range(count):
        expert, slot = pairs[2 * place : 2 * place + 2]
        for source, target in zip(sources, targets, strict=True):
            target[slot] = source[expert]


CHUNK = 4096  # words per program and iteration


def copy_table(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:  # [F, 4] int64
    """For each field its address on the host and on the device, its words per expert, and its first
    chunk, for the kernel of `fetch_experts`.
    """
    rows, first = [], 0
    for source, target in zip(sources, targets, strict=True):
        num_bytes = source[0].nbytes
        assert num_bytes == target[0].nbytes
        assert num_bytes % 4 == 0
        assert source.is_contiguous()
        assert target.is_contiguous()
        rows.append([source.data_ptr(), target.data_ptr(), num_bytes // 4, first])
        first += -(-num_bytes // 4 // CHUNK)
    return torch.tensor(rows, dtype=torch.int64, device=targets[0].device)
