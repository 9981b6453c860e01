"""Expert residency: no slot has two owners, experts in use stay, and neither the cycle through the
layers nor a long prompt empties a tier.
"""

from __future__ import annotations

import random
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from penstock.offload.residency import Residency

LAYERS, EXPERTS = 6, 16
Turns = list[tuple[int, list[int]]]

TURN = st.tuples(
    st.integers(0, LAYERS - 1), st.lists(st.integers(0, EXPERTS - 1), unique=True), st.booleans()
)


@given(st.integers(1, 40), st.lists(TURN, max_size=60))
def test_places_are_owned_once_and_hits_are_true(
    num_places: int, turns: list[tuple[int, list[int], bool]]
) -> None:
    """Simulates the memory: a slot contains what was last written to it."""
    tier, memory = Residency(num_places, LAYERS, EXPERTS), dict[int, tuple[int, int]]()
    for layer, experts, fails in turns:
        taken = tier.take(layer, experts[:num_places])
        assert [one.key for one in taken] == [(layer, expert) for expert in experts[:num_places]]
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


def hit_rate(tier: Residency, turns: Turns) -> float:
    found = []
    for layer, experts in turns:
        found += [not one.is_new for one in tier.take(layer, experts)]
        tier.release()
    return sum(found) / len(found)


def lru_hit_rate(num_places: int, turns: Turns) -> float:
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits, count = 0, 0
    for key in ((layer, expert) for layer, experts in turns for expert in experts):
        hits, count = hits + (key in held), count + 1
        held[key] = None
        held.move_to_end(key)
        if len(held) > num_places:
            held.popitem(last=False)
    return hits / count


def routed(num_steps: int, k: int, first: int = 0, seed: int = 0) -> Turns:
    """Steps through all layers; a layer's first experts are chosen most often."""
    rng = random.Random(seed)
    turns = []
    for _ in range(num_steps):
        for layer in range(LAYERS):
            chosen: dict[int, None] = {}
            while len(chosen) < k:
                chosen[(first + min(int(rng.expovariate(0.4)), EXPERTS - 1)) % EXPERTS] = None
            turns.append((layer, list(chosen)))
    return turns


def test_the_cycle_through_the_layers_does_not_thrash() -> None:
    """A step needs 24 experts: with 20 slots, an LRU never hits."""
    turns = routed(200, k=4)
    assert lru_hit_rate(20, turns) < 0.05
    assert hit_rate(Residency(20, LAYERS, EXPERTS), turns) > 0.5


def test_never_much_worse_than_recency_and_often_better() -> None:
    for num_places in (12, 24, 36, 48, 72):
        turns = routed(200, k=3)
        ours = hit_rate(Residency(num_places, LAYERS, EXPERTS), turns)
        assert ours > lru_hit_rate(num_places, turns) - 0.01


def test_a_long_prompt_leaves_what_replies_use() -> None:
    """Ten chunks, each of which needs all experts of all layers."""
    tier = Residency(30, LAYERS, EXPERTS)
    hit_rate(tier, routed(100, k=3))
    before = hit_rate(tier, routed(20, k=3, seed=1))
    chunks: Turns = [(layer, list(range(EXPERTS))) for layer in range(LAYERS)] * 10
    hit_rate(tier, chunks)
    hit_rate(tier, routed(2, k=3, seed=2))  # experts that the prompt evicted are fetched again
    assert hit_rate(tier, routed(20, k=3, seed=3)) > before - 0.1


def test_new_habits_replace_old_ones() -> None:
    tier = Residency(30, LAYERS, EXPERTS)
    hit_rate(tier, routed(200, k=3))
    settled = hit_rate(tier, routed(20, k=3, seed=1))
    hit_rate(tier, routed(30, k=3, first=8))
    assert hit_rate(tier, routed(20, k=3, first=8, seed=1)) > settled - 0.1


def test_the_heat_of_an_expert_is_how_much_its_layer_needs_it_and_whether_it_has_a_place() -> None:
    tier = Residency(2, LAYERS, EXPERTS)
    for turn in range(200):
        tier.take(1, [3, 5 if turn % 2 else 7])
        tier.release()
    heat = tier.heat()
    assert heat.shape == (LAYERS, EXPERTS)
    level, is_held = heat & 127, heat >= 128
    assert level[1, 3] == 127
    assert 40 < level[1, 5] < 88
    assert 40 < level[1, 7] < 88
    assert level.sum() == level[1, [3, 5, 7]].sum()
    assert sorted(zip(*is_held.nonzero())) == [(1, 3), (1, 5)]  # the last turn's two
