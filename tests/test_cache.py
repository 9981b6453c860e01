"""Invariants of pages, slots and reusable prefixes, without a scheduler."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import Cache, SessionLimits
from penstock.cache.pages import PagePool
from penstock.cache.prefix import Node, PrefixIndex
from penstock.cache.slots import SlotPool
from penstock.digests import ROOT, PageDigests, extend_digests
from penstock.errors import CapacityError
from penstock.types import PrefixHit, Request, Sequence

PAGE = 4


def sequence_of(tokens: list[int], name: str = "a") -> Sequence:
    return Sequence.start(Request(id=name, token_ids=tuple(tokens)), arrival=0)


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return list(range(start, start + num_tokens))


def compute(
    cache: Cache, sequence: Sequence, num_tokens: int, checkpoints: tuple[int, ...] = ()
) -> bool:
    """Admits the sequence and marks its first `num_tokens` tokens as computed."""
    if not cache.admit(sequence):
        return False
    assert cache.reserve(sequence, num_tokens - sequence.num_computed) is not None
    for position in checkpoints:
        cache.plan_checkpoint(sequence, position)
    sequence.num_computed = num_tokens
    cache.end_plan()
    cache.commit(sequence)
    cache.check()
    return True


def finish(cache: Cache, sequence: Sequence) -> None:
    cache.commit(sequence)
    cache.release(sequence)
    cache.check()


def test_a_pool_hands_out_every_page_once_but_never_page_zero() -> None:
    pool = PagePool(5)
    pages = [pool.take() for _ in range(4)]
    assert sorted(pages) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.drop(pages[0])
    pool.give_back(pages[0])
    assert pool.take() == pages[0]


def test_a_shared_page_is_idle_only_after_its_last_user() -> None:
    pool = PagePool(2)
    page = pool.take()
    pool.share(page)
    assert not pool.drop(page)
    assert pool.drop(page)
    with pytest.raises(AssertionError):
        pool.drop(page)


def test_a_page_in_use_cannot_be_given_back() -> None:
    pool = PagePool(3)
    page = pool.take()
    with pytest.raises(AssertionError):
        pool.give_back(page)


def test_slots_run_out_and_come_back() -> None:
    pool = SlotPool(3)
    slots = {pool.take(), pool.take()}
    assert slots == {1, 2}
    assert pool.take() is None
    pool.give_back(1)
    assert pool.take() == 1


def digests(tokens: list[int], tenant: str = "") -> list[bytes]:
    return PageDigests.of(tokens, PAGE, tenant).split()


def test_a_digest_depends_on_every_token_before_it_and_on_the_tenant() -> None:
    assert digests(prompt(8)) != digests(prompt(8), "somebody")
    assert digests(prompt(11)) == digests(prompt(8))
    assert digests(prompt(8))[1] != digests([9, *prompt(8)[1:]])[1]
    assert digests(prompt(8))[1] != digests(prompt(4, 4))[0]


def test_digests_extended_in_pieces_are_those_of_the_whole() -> None:
    pieces: list[bytes] = []
    for length in range(20):
        extend_digests(pieces, prompt(length), PAGE)
    assert pieces == digests(prompt(19))


def test_the_longest_known_chain_is_found_at_every_length() -> None:
    index = PrefixIndex()
    chain = digests(prompt(40))
    for num_known in range(11):
        assert index.num_known_pages(chain, 10) == num_known
        assert index.num_known_pages(chain, 3) == min(num_known, 3)
        if num_known < 10:
            parent = chain[num_known - 1] if num_known else ROOT
            index.insert(chain[num_known], Node(num_known + 1, parent))


@pytest.mark.parametrize("sizes", [{"num_pages": 1}, {"num_pages": 4, "num_slots": 1}])
def test_a_pool_that_holds_nothing_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(CapacityError, match="at least 2"):
        Cache(page_size=PAGE, **sizes)


def test_a_finished_prompt_is_found_again_up_to_its_last_full_page_but_one_token() -> None:
    cache = Cache(page_size=PAGE, num_pages=9)
    first = sequence_of(prompt(12))
    compute(cache, first, 12)
    pages = tuple(first.pages)
    finish(cache, first)
    assert cache.match(sequence_of(prompt(12))) == PrefixHit(8, pages[:2], num_known_tokens=8)
    assert cache.match(sequence_of(prompt(13))) == PrefixHit(12, pages, num_known_tokens=12)
    parted = sequence_of([*prompt(5), 99, 98, 97, 96])
    assert cache.match(parted) == PrefixHit(4, pages[:1], num_known_tokens=4)
    assert cache.match(sequence_of(prompt(4))) == PrefixHit()


def test_only_known_and_computed_tokens_are_registered() -> None:
    cache = Cache(page_size=PAGE, num_pages=9)
    first = sequence_of(prompt(12))
    compute(cache, first, 7)
    assert cache.match(sequence_of(prompt(12))).num_tokens == 4
    first.num_computed = 12  # as if a sampled token, unknown to the host, had also been computed
    first.tokens = first.tokens[:11]
    cache.reserve(first, 0)
    cache.commit(first)
    assert cache.match(sequence_of(prompt(13))).num_tokens == 8


def test_releasing_returns_every_page_and_slot() -> None:
    cache = Cache(page_size=PAGE, num_pages=9, num_slots=5)
    sequence = sequence_of(prompt(20))
    cache.admit(sequence)
    cache.reserve(sequence, 20)
    assert cache.plan_checkpoint(sequence, 16) is not None
    assert cache.num_free_pages == 3
    assert cache.num_free_slots == 2
    cache.release(sequence)
    cache.check()
    assert cache.num_free_pages == 8
    assert cache.num_free_slots == 4
    assert sequence.pages == []
    assert sequence.slot is None


def test_reserve_without_room_changes_nothing() -> None:
    cache = Cache(page_size=PAGE, num_pages=5)
    first, second = sequence_of(prompt(8)), sequence_of(prompt(8, 50))
    compute(cache, first, 8)
    compute(cache, second, 8)
    assert cache.reserve(first, 4) is None
    assert len(first.pages) == 2
    cache.check()
    finish(cache, second)
    assert len(cache.reserve(first, 4) or ()) == 1


def test_admission_counts_the_idle_pages_of_its_own_hit_as_taken() -> None:
    cache = Cache(page_size=PAGE, num_pages=5)
    first = sequence_of(prompt(9))
    compute(cache, first, 9)
    finish(cache, first)
    assert cache.num_free_pages == 4
    assert not cache.admit(sequence_of(prompt(17)))
    assert not cache.admit(sequence_of(prompt(9)), spare_pages=2)
    cache.check()
    assert cache.admit(sequence_of(prompt(9)), spare_pages=1)
    cache.check()


def test_eviction_takes_the_least_recently_used_prefix_from_its_end() -> None:
    cache = Cache(page_size=PAGE, num_pages=7)
    old, new = sequence_of(prompt(12)), sequence_of(prompt(12, 100))
    for sequence in (old, new):
        compute(cache, sequence, 12)
    finish(cache, old)
    finish(cache, new)
    again = sequence_of(prompt(13))
    assert cache.admit(again)  # used again, so the other one is older now
    finish(cache, again)
    other = sequence_of(prompt(8, 200))
    compute(cache, other, 8)
    assert cache.match(sequence_of(prompt(13))).num_tokens == 12
    assert cache.match(sequence_of(prompt(13, 100))).num_tokens == 4
    assert cache.counters["evicted_pages"] == 2


def test_identical_pages_computed_at_once_are_kept_once() -> None:
    cache = Cache(page_size=PAGE, num_pages=9)
    first, second = sequence_of(prompt(10)), sequence_of(prompt(10), "b")
    for sequence in (first, second):
        cache.admit(sequence)
        cache.reserve(sequence, 10)
        sequence.num_computed = 10
    assert cache.num_free_pages == 2
    assert cache.commit(first) == []
    assert cache.commit(second) == [(0, 2)]
    cache.check()
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert cache.num_free_pages == 4
    finish(cache, first)
    finish(cache, second)
    assert cache.num_free_pages == 8


def test_idle_pages_of_shared_prefixes_can_all_be_evicted() -> None:
    cache = Cache(page_size=PAGE, num_pages=6)
    first, second = sequence_of(prompt(4)), sequence_of(prompt(12), "b")
    for sequence in (first, second):
        cache.admit(sequence)
        cache.reserve(sequence, len(sequence.tokens))
        sequence.num_computed = len(sequence.tokens)
    cache.commit(first)
    finish(cache, second)
    cache.release(first)
    cache.check()
    assert cache.num_free_pages == 5
    third = sequence_of(prompt(20, 100), "c")
    assert compute(cache, third, 20)


def test_divergent_prompt_restores_nearest_checkpoint() -> None:
    cache = Cache(page_size=PAGE, num_pages=17, num_slots=9)
    first = sequence_of(prompt(24))
    compute(cache, first, 24, checkpoints=(8, 20))
    pages = tuple(first.pages)
    slots = {n: cache.match(sequence_of(prompt(n + 1))).checkpoint_slot for n in (8, 20)}
    assert None not in slots.values()
    finish(cache, first)
    assert cache.match(sequence_of(prompt(30))) == PrefixHit(
        20, pages[:5], slots[20], num_known_tokens=24
    )
    parted = sequence_of([*prompt(18), 99, 98, 97])
    assert cache.match(parted) == PrefixHit(8, pages[:2], slots[8], num_known_tokens=16)
    assert cache.match(sequence_of([*prompt(6), 99, 98, 97])) == PrefixHit(num_known_tokens=4)


def test_a_model_without_pages_restores_checkpoints_alone() -> None:
    cache = Cache(page_size=PAGE, num_slots=6)
    first = sequence_of(prompt(24))
    compute(cache, first, 24, checkpoints=(8, 20))
    finish(cache, first)
    hit = cache.match(sequence_of([*prompt(18), 99, 98, 97]))
    assert (hit.num_tokens, hit.pages) == (8, ())
    assert hit.checkpoint_slot is not None
    assert cache.reserve(sequence_of(prompt(100)), 100) == []


def test_a_checkpoint_goes_with_its_page() -> None:
    cache = Cache(page_size=PAGE, num_pages=5, num_slots=5)
    first = sequence_of(prompt(9))
    compute(cache, first, 9, checkpoints=(8,))
    finish(cache, first)
    assert compute(cache, sequence_of(prompt(16, 100)), 16)
    assert cache.match(sequence_of(prompt(9))) == PrefixHit()
    assert cache.counters["evicted_checkpoints"] == 1
    cache.check()


def test_checkpoints_stay_within_their_budget_and_the_least_recently_used_goes() -> None:
    cache = Cache(page_size=PAGE, num_pages=33, num_slots=9, max_checkpoints=2)
    for start in (0, 100):
        sequence = sequence_of(prompt(9, start))
        compute(cache, sequence, 9, checkpoints=(8,))
        finish(cache, sequence)
    again = sequence_of(prompt(9))
    cache.admit(again)
    cache.end_plan()
    finish(cache, again)
    third = sequence_of(prompt(9, 200))
    compute(cache, third, 9, checkpoints=(8,))
    finish(cache, third)
    found = [cache.match(sequence_of(prompt(9, start))).num_tokens for start in (0, 100, 200)]
    assert found == [8, 0, 8]


def test_a_checkpoint_that_exists_is_not_planned_again() -> None:
    cache = Cache(page_size=PAGE, num_pages=33, num_slots=9)
    compute(cache, sequence_of(prompt(9)), 9, checkpoints=(8,))
    second = sequence_of(prompt(9), "b")
    cache.admit(second)
    assert cache.plan_checkpoint(second, 8) is None


def test_a_state_saved_twice_at_once_is_kept_once() -> None:
    cache = Cache(page_size=PAGE, num_pages=33, num_slots=9)
    first, second = sequence_of(prompt(9)), sequence_of(prompt(9), "b")
    for sequence in (first, second):
        cache.admit(sequence)
        cache.reserve(sequence, 9)
        assert cache.plan_checkpoint(sequence, 8) is not None
        sequence.num_computed = 9
    assert cache.num_free_slots == 4
    finish(cache, first)
    finish(cache, second)
    assert cache.num_free_slots == 8
    assert cache.match(sequence_of(prompt(9))).num_tokens == 8


def test_checkpoints_evicted_before_running_requests_are_refused() -> None:
    cache = Cache(page_size=PAGE, num_pages=33, num_slots=4, max_checkpoints=3)
    first = sequence_of(prompt(13))
    compute(cache, first, 13, checkpoints=(8, 12))
    assert cache.num_free_slots == 2
    others = [sequence_of(prompt(5, 100 * i), str(i)) for i in (1, 2, 3)]
    assert [cache.admit(other) for other in others] == [True, True, False]
    assert cache.counters["evicted_checkpoints"] == 2
    cache.check()


def test_a_checkpoint_being_read_in_the_plan_is_not_evicted() -> None:
    cache = Cache(page_size=PAGE, num_pages=33, num_slots=4, max_checkpoints=3)
    first = sequence_of(prompt(9))
    compute(cache, first, 9, checkpoints=(8,))
    reader = sequence_of(prompt(9), "b")
    assert cache.admit(reader)
    assert reader.initial_slot not in (None, reader.slot)
    refused = sequence_of(prompt(9, 100), "c")
    assert not cache.admit(refused)
    assert not cache.admit(sequence_of(prompt(9), "d"))
    assert cache.plan_checkpoint(first, 4) is None
    cache.end_plan()
    assert cache.admit(refused)
    cache.check()


def test_the_last_slot_continues_its_own_checkpoint() -> None:
    cache = Cache(page_size=PAGE, num_pages=33, num_slots=3, max_checkpoints=2)
    first = sequence_of(prompt(9))
    compute(cache, first, 9, checkpoints=(8,))
    second = sequence_of(prompt(9), "b")
    assert cache.admit(second)
    assert second.initial_slot == second.slot
    assert second.num_computed == 8
    assert cache.match(sequence_of(prompt(9))).num_tokens == 0
    cache.check()


def test_counters_name_the_reason_of_every_miss() -> None:
    cache = Cache(page_size=PAGE, num_pages=33, num_slots=9)

    def outcome(sequence: Sequence, checkpoints: tuple[int, ...] = ()) -> dict[str, int]:
        before = Counter(cache.counters)
        compute(cache, sequence, len(sequence.tokens), checkpoints)
        finish(cache, sequence)
        changed = Counter(cache.counters) - before
        tokens = [
            n
            for name, n in changed.items()
            if name == "tokens_reused" or name.startswith("missed_")
        ]
        assert sum(tokens) == len(sequence.tokens)
        return {name: n for name, n in changed.items() if not name.startswith("evicted_")}

    last = {"missed_tokens_partial_page": 1}
    assert outcome(sequence_of(prompt(4))) == {
        "miss_short_prompt": 1,
        "missed_tokens_partial_page": 4,
    }
    unknown = {"miss_no_prefix": 1, "missed_tokens_no_prefix": 8}
    assert outcome(sequence_of(prompt(9, 50))) == unknown | last  # the first request left its page
    stateless = {"miss_no_checkpoint": 1, "missed_tokens_no_checkpoint": 8}
    assert outcome(sequence_of(prompt(9, 50)), (8,)) == stateless | last
    assert outcome(sequence_of(prompt(9, 50))) == {"hit": 1, "tokens_reused": 8} | last
    more = {"missed_tokens_no_checkpoint": 4, "missed_tokens_no_prefix": 4}
    longer = sequence_of(prompt(13, 50))
    assert outcome(longer) == {"hit": 1, "tokens_reused": 8, "missed_tokens_no_prefix": 4} | last
    assert outcome(sequence_of(prompt(17, 50))) == {"hit": 1, "tokens_reused": 8} | more | last
    assert outcome(sequence_of(prompt(128, 200)))["miss_no_prefix"] == 1  # takes every page
    gone = {"miss_evicted": 1, "missed_tokens_evicted": 12, "missed_tokens_no_prefix": 4}
    assert outcome(sequence_of([*prompt(13, 50), *prompt(4)])) == gone | last
    cache = Cache(page_size=PAGE, num_pages=33)
    assert outcome(sequence_of(prompt(9))) == {"miss_empty": 1, "missed_tokens_no_prefix": 8} | last
    cache = Cache(page_size=PAGE, num_pages=33, num_slots=9, prefix_cache=False)
    for _ in range(2):
        off = {"miss_disabled": 1, "missed_tokens_disabled": 9}
        assert outcome(sequence_of(prompt(9)), (8,)) == off


def test_a_resumed_sequence_keeps_its_first_cached_count() -> None:
    cache = Cache(page_size=PAGE, num_pages=33)
    sequence = sequence_of(prompt(9))
    compute(cache, sequence, 9)
    finish(cache, sequence)
    sequence.num_preemptions = 1
    cache.admit(sequence)
    assert sequence.num_computed == 8
    assert sequence.num_cached_tokens == 0
    assert cache.counters["hit"] == 0


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.sampled_from([0, 4, 9, 17]),
    num_slots=st.sampled_from([0, 3, 6]),
)
def test_nothing_leaks_and_nothing_is_owned_twice(
    seed: int, num_pages: int, num_slots: int
) -> None:
    """Random admissions, growth, checkpoints and releases of prompts over a tiny alphabet, and
    sessions that are kept, dropped, evicted for others, or expire.
    """
    if num_pages == num_slots == 0:
        return
    rng = random.Random(seed)
    limits = SessionLimits(
        rng.choice([0, 4, 99]), max_idle_s=20, page_bytes=1, slot_bytes=2, max_checkpoints=2
    )
    now_s = 0
    cache = Cache(
        page_size=PAGE,
        num_pages=num_pages,
        num_slots=num_slots,
        session_limits=limits,
        clock=lambda: now_s,
    )
    running: list[Sequence] = []
    for _ in range(40):
        now_s += 1
        action = rng.random()
        if action < 0.4:
            tokens = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 24)))
            request = Request(id="a", token_ids=tokens, session_id=rng.choice([None, "s", "t"]))
            sequence = Sequence.start(request, arrival=0)
            hit = cache.match(sequence)
            free = cache.num_free_pages
            if cache.admit(sequence, hit, ends_sessions=rng.random() < 0.3):
                assert sequence.num_computed == hit.num_tokens < len(sequence.tokens)
                running.append(sequence)
            else:
                assert cache.num_free_pages >= free  # more, if ending sessions was not enough
        elif running and action < 0.7:
            sequence = rng.choice(running)
            num_tokens = rng.randrange(1, 9)
            num_tokens = min(num_tokens, len(sequence.tokens) - sequence.num_computed)
            is_at_boundary = (
                num_slots and sequence.num_computed and sequence.num_computed % PAGE == 0
            )
            if is_at_boundary and sequence.initial_slot is None and rng.random() < 0.5:
                cache.keep_reply_state(sequence)
            if cache.reserve(sequence, num_tokens) is not None:
                sequence.initial_slot = None
                start, sequence.num_computed = (
                    sequence.num_computed,
                    sequence.num_computed + num_tokens,
                )
                for boundary in range(start // PAGE * PAGE + PAGE, sequence.num_computed + 1, PAGE):
                    if rng.random() < 0.2:
                        cache.learn(sequence, boundary)
                    cache.plan_checkpoint(sequence, boundary)
        elif running and action < 0.8:
            cache.commit(rng.choice(running))
        elif running and action < 0.85:
            cache.release(running.pop(rng.randrange(len(running))))
        elif running and action < 0.97:
            sequence = running.pop(rng.randrange(len(running)))
            cache.commit(sequence)
            cache.keep_session(sequence)
            cache.release(sequence)
        else:
            cache.sessions.drop(rng.choice("st"))
        if rng.random() < 0.5:
            cache.end_plan()
        cache.check()
    for sequence in running:
        finish(cache, sequence)
    now_s += 21
    assert cache.sessions.describe() == []
    cache.check()
    assert cache.num_free_pages == max(num_pages - 1, 0)
    assert cache.num_free_slots == max(num_slots - 1, 0)
