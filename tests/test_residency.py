"""Which experts stay: no place is owned twice, what is in use stays, and a scan evicts nothing
that is used.
"""

from __future__ import annotations

import random
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from penstock.offload.residency import Residency

KEYS = st.tuples(st.integers(0, 3), st.integers(0, 9))


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.lists(KEYS, unique=True, max_size=14), st.booleans()), max_size=60),
)
def test_places_are_owned_once_and_hits_are_true(
    num_places: int, steps: list[tuple[list[tuple[int, int]], bool]]
) -> None:
    """A model of the memory itself: what a place holds is what was written there last."""
    tier, memory = Residency(num_places), dict[int, tuple[int, int]]()
    for keys, fails in steps:
        taken = tier.take(keys[:num_places])
        assert len({one.place for one in taken}) == len(taken)
        assert all(0 <= one.place < num_places for one in taken)
        for one in taken:
            if not one.is_new:
                assert memory[one.place] == one.key
            elif fails:
                tier.forget(one.key)
            memory[one.place] = one.key
        tier.release()
        assert len(tier) <= num_places
        assert all(one.key in tier for one in taken if not (fails and one.is_new))


def hit_rate(tier: Residency, accesses: list[int]) -> float:
    hits = 0
    for expert in accesses:
        (taken,) = tier.take([(0, expert)])
        tier.release()
        hits += not taken.is_new
    return hits / len(accesses)


def lru_hit_rate(num_places: int, accesses: list[int]) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in accesses:
        hits += expert in held
        held[expert] = None
        held.move_to_end(expert)
        if len(held) > num_places:
            held.popitem(last=False)
    return hits / len(accesses)


def test_a_loop_over_more_than_fits_does_not_thrash() -> None:
    """An LRU would miss every time."""
    loop = list(range(100)) * 30
    assert lru_hit_rate(50, loop) == 0.0
    assert hit_rate(Residency(50), loop) > 0.35


def test_skewed_use_is_kept_better_than_by_recency() -> None:
    rng = random.Random(1)
    skewed = rng.choices(range(400), weights=[1 / (rank + 1) for rank in range(400)], k=20000)
    assert hit_rate(Residency(40), skewed) > lru_hit_rate(40, skewed) + 0.03


def test_a_scan_leaves_what_is_used() -> None:
    tier = Residency(64)
    used = list(range(40))
    hit_rate(tier, used * 5)
    hit_rate(tier, list(range(1000, 1400)))
    assert hit_rate(tier, used) == 1.0


def test_new_habits_replace_old_ones() -> None:
    tier = Residency(32)
    hit_rate(tier, list(range(28)) * 50)
    hit_rate(tier, list(range(100, 128)) * 40)
    assert hit_rate(tier, list(range(100, 128))) > 0.9
