"""How many pages and slots fit a memory budget, and how many requests that serves. No tensors.

A sequence of a hybrid model needs a slot, whatever its length, and pages for its length. Slots are
sized first, because no sequence runs without one, but they take at most half of the budget. Rows
that were asked for may take three quarters of it, if the longest context still fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import CapacityError, ConfigError
from penstock.types import CacheSpec, KVSpec, StateSpec

GB = 1e9
CHECKPOINT_SHARE = 3  # 1/3 of scarce slots is left to the prefix cache
GOOD_CHECKPOINTS = 64  # if memory allows, however few sequences run


@dataclass(frozen=True, slots=True)
class PoolSizes:
    max_rows: int
    max_model_len: int
    num_pages: int  # including page 0
    num_slots: int  # including slot 0
    max_checkpoints: int
    page_bytes: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes + self.num_slots * self.slot_bytes

    @property
    def shapes(self) -> tuple[int, int]:
        """The sizes that kernels and graphs are compiled for."""
        return self.max_rows, self.max_model_len


def size_pools(
    specs: list[CacheSpec],
    *,
    budget_bytes: int,
    element_bytes: int,
    kv_bytes: int,  # per KV element
    state_bytes: int,  # per element of a recurrent state
    page_size: int,
    max_rows: int,
    are_rows_asked_for: bool,  # rather than a default
    max_model_len: int | None,
    max_position: int,
    prefix_cache: bool,
    checkpoint_bytes: int | None,
) -> PoolSizes:
    if max_model_len is not None and max_model_len > max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len:,}, but the model has {max_position:,} positions",
            "The model was not trained on longer contexts.",
            f"Use --max-model-len {max_position} or less, or omit it.",
        )
    page_bytes = page_size * sum(s.num_bytes(kv_bytes) for s in specs if isinstance(s, KVSpec))
    slot_bytes = sum(
        s.num_bytes(element_bytes, state_bytes) for s in specs if isinstance(s, StateSpec)
    )

    num_slots = max_checkpoints = 0
    if slot_bytes:
        affordable = budget_bytes // (2 * slot_bytes) - 1  # slot 0 is reserved
        if affordable < 1:
            raise CapacityError(
                f"The cache budget of {budget_bytes / GB:.3g} GB is too small for one sequence",
                f"One sequence's state takes {slot_bytes / GB:.3g} GB; states may use half of the "
                "budget.",
                # 3 digits may round down
                f"Use at least --memory-gb {1.005 * 4 * slot_bytes / GB:.3g}.",
            )
        # Slots without which the prefix cache of a hybrid model would find nothing.
        num_kept = (
            affordable // CHECKPOINT_SHARE if prefix_cache and checkpoint_bytes is None else 0
        )
        if are_rows_asked_for:
            num_kept = min(num_kept, GOOD_CHECKPOINTS)
            longest = -(-(max_model_len or page_size) // page_size) + 1
            most_bytes = min(budget_bytes * 3 // 4, budget_bytes - longest * page_bytes)
            affordable = max(affordable, min(most_bytes // slot_bytes - 1, max_rows + num_kept))
        max_rows = min(max_rows, affordable - num_kept)
        if prefix_cache:
            wanted = max(max_rows, GOOD_CHECKPOINTS)
            if checkpoint_bytes is not None:
                wanted = checkpoint_bytes // slot_bytes
            max_checkpoints = min(wanted, affordable - max_rows)
        num_slots = 1 + max_rows + max_checkpoints

    num_pages = 0
    length = max_model_len or max_position
    if page_bytes:
        left = budget_bytes - num_slots * slot_bytes
        affordable = left // page_bytes - 1  # page 0 is reserved
        needed = -(-length // page_size)
        if affordable < (needed if max_model_len is not None else 1):
            raise CapacityError(
                f"A context of {length:,} tokens does not fit the cache",
                f"It needs {needed} pages of {page_bytes / GB:.3g} GB; what is left of "
                f"{budget_bytes / GB:.3g} GB holds {max(affordable, 0)}.",
                f"Lower --max-model-len to {max(affordable, 0) * page_size} or raise --memory-gb.",
            )
        length = min(length, affordable * page_size)
        # More than twice every row at full length, for cached prefixes, would never be used.
        num_pages = 1 + min(affordable, 2 * max_rows * -(-length // page_size))
    return PoolSizes(
        max_rows, length, num_pages, num_slots, max_checkpoints, page_bytes, slot_bytes
    )
