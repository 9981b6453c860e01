"""The pages and slots of a memory budget, checked by hand calculation."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.pools import PoolSizes, size_pools
from penstock.errors import CapacityError, ConfigError
from penstock.types import CacheSpec, KVSpec, StateSpec

ATTENTION: list[CacheSpec] = [KVSpec(num_kv_heads=2, head_dim=256)] * 10
# Qwen3.5-35B-A3B: 20,480 bytes of KV per token; 60 MiB of recurrent and 1,474,560 bytes of
# convolution state per request.
HYBRID: list[CacheSpec] = ATTENTION + [StateSpec(32, 128, 128, 8192, 3)] * 30
SLOT_BYTES = 62_914_560 + 1_474_560


def pools(specs: list[CacheSpec], budget_gb: float, **changes: Any) -> PoolSizes:
    settings: dict[str, Any] = {
        "element_bytes": 2,
        "kv_bytes": 2,
        "state_bytes": 4,
        "page_size": 64,
        "max_rows": 64,
        "are_rows_asked_for": False,
        "max_model_len": None,
        "max_position": 262_144,
        "prefix_cache": True,
        "checkpoint_bytes": None,
    }
    return size_pools(specs, budget_bytes=int(budget_gb * 1e9), **(settings | changes))


def test_bytes_of_the_published_model() -> None:
    sizes = pools(HYBRID, 60)
    assert sizes.page_bytes == 64 * 20_480
    assert sizes.slot_bytes == SLOT_BYTES
    assert pools(HYBRID, 60, state_bytes=2).slot_bytes == SLOT_BYTES - 62_914_560 // 2


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_of_codes_take_half_and_a_scale_for_each_head(head_dim: int) -> None:
    specs: list[CacheSpec] = [KVSpec(num_kv_heads=2, head_dim=head_dim)] * 10
    plain, codes = (pools(specs, 1, kv_bytes=size, max_rows=10_000) for size in (2, 1))
    assert codes.page_bytes == plain.page_bytes // 2 + 64 * 10 * 2 * 2 * 4
    assert codes.num_pages / plain.num_pages == pytest.approx(2 / (1 + 4 / head_dim), rel=1e-3)


@pytest.mark.parametrize("budget_gb", [1, 5, 20, 60])
@pytest.mark.parametrize("specs", [ATTENTION, HYBRID])
def test_pools_never_exceed_the_budget(specs: list[CacheSpec], budget_gb: float) -> None:
    assert pools(specs, budget_gb).num_bytes <= budget_gb * 1e9


def test_every_row_has_a_slot_and_states_take_at_most_half() -> None:
    for budget_gb in (1, 2, 8, 30, 60):
        sizes = pools(HYBRID, budget_gb)
        assert sizes.num_slots == 1 + sizes.max_rows + sizes.max_checkpoints
        assert sizes.num_slots * sizes.slot_bytes <= budget_gb * 1e9 / 2


def test_rows_shrink_before_nothing_fits() -> None:
    assert pools(HYBRID, 1).max_rows < 64 == pools(HYBRID, 60).max_rows


def test_plain_models_have_no_slots_and_models_without_attention_no_pages() -> None:
    assert pools(ATTENTION, 1).num_slots == 0
    assert pools(HYBRID[10:], 60).num_pages == 0


def test_few_rows_still_have_many_checkpoints_and_scarce_slots_are_shared() -> None:
    few = pools(HYBRID, 60, max_rows=4)
    assert (few.max_rows, few.max_checkpoints) == (4, 64)
    scarce = pools(HYBRID, 2)
    assert 0 < scarce.max_checkpoints <= scarce.max_rows
    assert pools(HYBRID, 2, prefix_cache=False).max_rows == scarce.max_rows + scarce.max_checkpoints


def test_rows_that_were_asked_for_may_take_three_quarters() -> None:
    """1,000 rows of Qwen3.5-35B-A3B take 64.4 GB; by default slots stop at half of 92."""
    asked = {"max_rows": 1000, "are_rows_asked_for": True}
    assert pools(HYBRID, 92, max_rows=1000).max_rows < 500
    sizes = pools(HYBRID, 92, **asked)
    assert (sizes.max_rows, sizes.max_checkpoints) == (1000, 64)
    assert sizes.num_slots * SLOT_BYTES <= 69e9
    assert pools(HYBRID, 92, **asked, prefix_cache=False).num_slots == 1 + 1000
    for budget_gb in (1, 2, 8, 30, 60):
        sizes = pools(HYBRID, budget_gb, **asked)
        assert sizes.num_slots * sizes.slot_bytes <= budget_gb * 1e9 * 3 / 4
        assert sizes.max_rows > pools(HYBRID, budget_gb, max_rows=1000).max_rows
        assert sizes.max_checkpoints > 0


def test_rows_that_were_asked_for_leave_room_for_the_longest_context() -> None:
    asked = {"max_rows": 1000, "are_rows_asked_for": True}
    length = pools(HYBRID, 8).max_model_len // 64 * 64
    sizes = pools(HYBRID, 8, max_model_len=length, **asked)
    assert sizes.max_model_len == length
    assert sizes.num_slots * sizes.slot_bytes > 8e9 / 2 - 2 * SLOT_BYTES


def test_few_rows_that_were_asked_for_get_what_they_would_by_default() -> None:
    for max_rows in (1, 8, 64):
        asked = pools(HYBRID, 60, max_rows=max_rows, are_rows_asked_for=True)
        assert asked == pools(HYBRID, 60, max_rows=max_rows)


def test_checkpoints_follow_their_own_budget() -> None:
    assert pools(HYBRID, 60, checkpoint_bytes=5 * SLOT_BYTES).max_checkpoints == 5
    assert pools(HYBRID, 60, prefix_cache=False).max_checkpoints == 0


def test_context_is_fitted_to_memory_unless_it_was_asked_for() -> None:
    assert pools(HYBRID, 2).max_model_len < 262_144
    with pytest.raises(CapacityError) as raised:
        pools(HYBRID, 2, max_model_len=262_144)
    assert "4096 pages" in raised.value.why
    assert "--max-model-len" in raised.value.todo


def test_a_budget_too_small_for_one_sequence_is_refused_with_numbers() -> None:
    with pytest.raises(CapacityError) as raised:
        pools(HYBRID, 0.1)
    assert "0.0644 GB" in raised.value.why
    assert "--memory-gb" in raised.value.todo


def test_the_budget_that_is_asked_for_is_enough_even_for_a_tiny_model() -> None:
    """Its state takes kilobytes, less than two decimals of a gigabyte show."""
    tiny = [StateSpec(num_value_heads=1, key_dim=16, value_dim=16, conv_channels=48, conv_width=4)]
    with pytest.raises(CapacityError) as raised:
        pools(tiny, 1e-6)
    enough = float(raised.value.todo.rpartition(" ")[2].rstrip("."))
    assert enough > 0
    assert pools(tiny, enough).max_rows >= 1


def test_a_context_longer_than_the_model_knows_is_refused() -> None:
    assert pools(ATTENTION, 60, max_model_len=None, max_position=4096).max_model_len == 4096
    assert pools(ATTENTION, 60, max_model_len=4096, max_position=4096).max_model_len == 4096
    with pytest.raises(ConfigError, match="4,097") as raised:
        pools(ATTENTION, 60, max_model_len=4097, max_position=4096)
    assert "--max-model-len 4096" in raised.value.todo
