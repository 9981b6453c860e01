# mypy: disable-error-code="no-untyped-def"
"""Expert slots of a layer, managed on the device: one program chooses, many copy.

The copies are loads from pinned host memory, which run at the link's copy speed if enough of them
are in flight. They must be complete before any kernel reads a slot, even one that starts early:
`fetch_experts` lets no kernel start before its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.reference.expert_cache import CHUNK, MEMORY
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    next_power_of_2,
    num_processors,
    wait_for_previous,
)

PROGRAMS = 2  # per SM

NOTHING = tl.constexpr(3.0e38)


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
    num_pairs, num_experts = ids.numel(), len(slot_of)
    slots, slot_weights = torch.empty_like(ids), torch.empty_like(weights)
    host_weights = torch.empty_like(weights)
    wanted = slot_of.new_empty(1 + 2 * min(num_pairs, num_experts))
    _take_slots_kernel[(1,)](
        ids,
        weights,
        slot_of,
        scores,
        marks,
        counts,
        host_share,
        slots,
        slot_weights,
        host_weights,
        wanted,
        num_pairs,
        num_slots,
        E=num_experts,
        SHARE=MEMORY,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_P=next_power_of_2(num_pairs),
        num_warps=1,  # with one warp, no barriers are needed
        **launch_options(ids.device),
    )
    return slots, slot_weights, host_weights, wanted


def fetch_experts(
    wanted: Tensor,  # [1 + 2 * n] int32  from `take_slots`
    sources: Sequence[Tensor],  # [E, ...]  in host memory, pinned
    targets: Sequence[Tensor],  # [S, ...]  the slots
    table: Tensor,  # [F, 4] int64  from `copy_table`
) -> None:
    num_words = [source[0].nbytes // 4 for source in sources]
    _fetch_experts_kernel[(PROGRAMS * num_processors(wanted.device),)](
        wanted,
        table,
        CHUNKS=sum(cdiv(words, CHUNK) for words in num_words),
        FIELDS=len(sources),
        CHUNK=CHUNK,
        # Then a thread loads 16 bytes at a time.
        IS_WIDE=all(words % 4 == 0 for words in num_words) and _are_aligned(sources, targets),
        num_warps=8,
    )


def _are_aligned(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in (*sources, *targets))


@triton.jit(do_not_specialize=["num_pairs", "num_slots"])
def _take_slots_kernel(
    ids,
    weights,
    slot_of,
    scores,
    marks,
    counts,
    host_share,
    slots,
    slot_weights,
    host_weights,
    wanted,
    num_pairs,
    num_slots,
    E: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < E
    pairs = tl.arange(0, BLOCK_P)
    is_pair = pairs < num_pairs
    chosen = tl.load(ids + pairs, mask=is_pair, other=0)
    tl.store(marks + chosen, 1, mask=is_pair)
    tl.debug_barrier()
    is_needed = tl.load(marks + experts, mask=is_expert, other=0) != 0
    tl.debug_barrier()
    tl.store(marks + experts, 0, mask=is_expert)

    held = tl.load(slot_of + experts, mask=is_expert, other=-1)
    b_scores = tl.load(scores + experts, mask=is_expert, other=0.0)
    num_needed = tl.sum(is_needed.to(tl.int32), axis=0)
    moved = SHARE * (1.0 - num_needed.to(tl.float32) / (E + 1))
    b_scores = b_scores * (1.0 - moved) + tl.where(is_needed, moved, 0.0)
    tl.store(scores + experts, b_scores, mask=is_expert)

    is_missing = is_needed & (held < 0)
    is_evictable = (held >= 0) & (is_needed == 0)
    num_missing = tl.sum(is_missing.to(tl.int32), axis=0)
    num_host = (num_missing.to(tl.float32) * tl.load(host_share) + 0.5).to(tl.int32)
    num_fetched = tl.minimum(num_missing - num_host, tl.sum(is_evictable.to(tl.int32), axis=0))
    left = tl.where(is_missing, b_scores, -1.0)
    worth = tl.where(is_evictable, b_scores, NOTHING)
    for place in range(num_fetched):
        best = tl.max(left, axis=0)
        new = tl.min(tl.where(left == best, experts, BLOCK_E), axis=0)
        least = tl.min(worth, axis=0)
        old = tl.min(tl.where(worth == least, experts, BLOCK_E), axis=0)
        slot = tl.sum(tl.where(experts == old, held, 0), axis=0)
        tl.store(wanted + 1 + 2 * place, new)
        tl.store(wanted + 2 + 2 * place, slot)
        held = tl.where(experts == new, slot, tl.where(experts == old, -1, held))
        left = tl.where(experts == new, -1.0, left)
        worth = tl.where(experts == old, NOTHING, worth)
    tl.store(wanted, num_fetched)
    tl.store(slot_of + experts, held, mask=is_expert)
    tl.debug_barrier()

    tl.store(counts, tl.load(counts) + (num_needed - num_missing).to(tl.int64))
    tl.store(counts + 1, tl.load(counts + 1) + num_missing.to(tl.int64))
    tl.store(counts + 2, tl.load(counts + 2) + num_fetched.to(tl.int64))
    own = tl.load(slot_of + chosen, mask=is_pair, other=0)
    b_weights = tl.load(weights + pairs, mask=is_pair, other=0.0)
    tl.store(slots + pairs, tl.where(own < 0, num_slots, own), mask=is_pair)
    tl.store(slot_weights + pairs, tl.where(own < 0, 0.0, b_weights), mask=is_pair)
    tl.store(host_weights + pairs, tl.where(own < 0, b_weights, 0.0), mask=is_pair)


@triton.jit
def _fetch_experts_kernel(
    wanted,
    table,
    CHUNKS: tl.constexpr,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """A program copies every num_programs-th chunk of all experts in the list."""
    words = tl.arange(0, CHUNK)
    num_wanted = tl.load(wanted)
    for chunk in range(tl.program_id(0), num_wanted * CHUNKS, tl.num_programs(0)):
        own = wanted + 1 + 2 * (chunk // CHUNKS)
        expert = tl.load(own).to(tl.int64)
        slot = tl.load(own + 1).to(tl.int64)
        place = chunk % CHUNKS
        source = tl.load(table)
        target = tl.load(table + 1)
        num_words = tl.load(table + 2)
        first = tl.load(table + 3)
        for field in tl.static_range(1, FIELDS):
            start = tl.load(table + 4 * field + 3)
            source = tl.where(place >= start, tl.load(table + 4 * field), source)
            target = tl.where(place >= start, tl.load(table + 4 * field + 1), target)
            num_words = tl.where(place >= start, tl.load(table + 4 * field + 2), num_words)
            first = tl.where(place >= start, start, first)
        start = (place - first) * CHUNK
        p_source = (source + 4 * (expert * num_words + start)).to(tl.pointer_type(tl.int32))
        p_target = (target + 4 * (slot * num_words + start)).to(tl.pointer_type(tl.int32))
        if IS_WIDE:
            p_source = tl.multiple_of(p_source, 16)
            p_target = tl.multiple_of(p_target, 16)
            num_words = tl.multiple_of(num_words, 4)
            start = tl.multiple_of(start, 4)
        is_word = start + words < num_words
        b_words = tl.load(p_source + words, mask=is_word, other=0)
        tl.store(p_target + words, b_words, mask=is_word)
