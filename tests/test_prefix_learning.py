"""The prefix cache learns where prompts diverge: what is reused, with a fake runner on the host.

Pages have 64 tokens, the default. A hybrid model can resume only from a stored state, so these
tests are about state checkpoints; the fake runner checks that every restored state is the right
one.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_runner import VOCAB_SIZE, Setup, World
from penstock.cache.checkpoints import GUESS, LADDER, PROVEN, Checkpoints
from penstock.types import Request, SamplingParams, Sequence

PAGE = 64
HYBRID = Setup(
    num_pages=600,
    num_slots=33,
    page_size=PAGE,
    max_rows=8,
    max_step_tokens=1024,
    max_model_len=8192,
)
KINDS = pytest.mark.parametrize(
    "setup",
    [HYBRID, replace(HYBRID, depth=1), replace(HYBRID, num_slots=0), replace(HYBRID, num_pages=0)],
    ids=["hybrid", "overlapped", "plain", "recurrent"],
)
ANY_WORTH = float("inf")


def tokens(num_tokens: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.choices(range(VOCAB_SIZE), k=num_tokens))


def ask(name: str, token_ids: tuple[int, ...], max_tokens: int = 2, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(**{"id": name, "token_ids": token_ids, "sampling": sampling, **fields})  # type: ignore[arg-type]


def run(world: World, *requests: Request) -> list[int]:
    """Runs them together. Returns what each has reused; replies are those of the requests alone."""
    sequences = [world.submit(request) for request in requests]
    world.run()
    for request in requests:
        world.require_reply_alone(request)
    return [sequence.num_cached_tokens for sequence in sequences]


def parted(prefix: tuple[int, ...], number: int, num_tokens: int = 350) -> tuple[int, ...]:
    """A prompt behind this prefix; each of twelve numbers gives another next token."""
    return (*prefix, number % VOCAB_SIZE, *tokens(num_tokens - 1, seed=1000 + number))


@KINDS
@pytest.mark.parametrize("num_shared", [512, 575, 1000, 1500, 3333])
def test_the_third_request_behind_a_shared_prefix_reuses_it(setup: Setup, num_shared: int) -> None:
    world, prefix = World(setup), tokens(num_shared, seed=1)
    reused = [run(world, ask(str(i), parted(prefix, i)))[0] for i in range(5)]
    assert reused[2:] == [num_shared // PAGE * PAGE] * 3
    world.require_nothing_owned()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_shared", [512, 1500])
def test_requests_that_come_at_once_compute_what_they_share_once(
    depth: int, num_shared: int
) -> None:
    world, prefix = World(replace(HYBRID, depth=depth)), tokens(num_shared, seed=1)
    reused = run(world, *(ask(str(i), parted(prefix, i)) for i in range(6)))
    assert reused == [0] + [num_shared // PAGE * PAGE] * 5
    world.require_nothing_owned()


@pytest.mark.parametrize("num_steps", range(6))
def test_whenever_the_second_comes_the_third_reuses_what_all_share(num_steps: int) -> None:
    """In every step of the first one, which has not reached the place yet or has passed it."""
    world, prefix = World(replace(HYBRID, max_step_tokens=512, depth=1)), tokens(1500, seed=1)
    world.submit(ask("0", parted(prefix, 0, 900)))
    for _ in range(num_steps):
        world.step()
    run(world, ask("1", parted(prefix, 1)))
    assert run(world, ask("2", parted(prefix, 2))) == [1472]


def test_a_follower_computes_when_its_leader_would_take_longer() -> None:
    """It has found half of the prefix in the cache; the leader started before that was stored."""
    world, prefix = World(replace(HYBRID, max_step_tokens=256)), tokens(2048, seed=1)
    leader = world.submit(ask("leader", parted(prefix, 0)))
    world.step()
    follower = Sequence.start(ask("follower", parted(prefix, 1)), arrival=1)
    world.cache.take_digests(follower)
    hit = world.cache.match(follower)
    assert not world.scheduler._leaders.follow(follower, replace(hit, num_tokens=1024))
    assert world.scheduler._leaders.follow(follower, hit)
    assert leader.targets[2048] == PROVEN


def test_a_follower_waits_less_than_computing_takes() -> None:
    """Steps until its first token, beside a leader that has three quarters of the shared prefix."""

    def steps_until_reply(is_shared: bool) -> int:
        world, prefix = World(replace(HYBRID, max_step_tokens=256)), tokens(2048, seed=1)
        world.submit(ask("leader", parted(prefix, 0, 64)))
        for _ in range(6):
            world.step()
        other = prefix if is_shared else tokens(2048, seed=2)
        world.submit(ask("follower", parted(other, 1, 64)))
        num_steps = 0
        while not world.replies["follower"]:
            world.step()
            num_steps += 1
        return num_steps

    assert steps_until_reply(is_shared=True) <= steps_until_reply(is_shared=False) // 2


def test_n_replies_to_a_prompt_behind_a_shared_prefix_reuse_it() -> None:
    world, prefix = World(HYBRID), tokens(1000, seed=1)
    for i in range(2):
        run(world, *(ask(f"{i}-{n}", parted(prefix, i)) for n in range(3)))
    reused = run(world, *(ask(f"2-{n}", parted(prefix, 2)) for n in range(3)))
    assert reused == [960, 1344, 1344]  # the second and third: all whole pages of the same prompt


def test_a_prefill_that_is_preempted_leaves_what_it_has_learned() -> None:
    world, prefix = World(replace(HYBRID, max_step_tokens=256)), tokens(1200, seed=1)
    run(world, ask("0", parted(prefix, 0)))
    second = world.submit(ask("1", parted(prefix, 1)))
    world.step()
    assert 0 < second.num_computed < 1152
    world.scheduler._preempt(second)
    world.run()
    assert run(world, ask("2", parted(prefix, 2))) == [1152]


def test_tenants_learn_apart() -> None:
    world, prefix = World(HYBRID), tokens(1000, seed=1)
    for i in range(3):
        run(world, ask(f"a{i}", parted(prefix, i), tenant="a"))
    assert run(world, ask("b", parted(prefix, 3), tenant="b")) == [0]
    assert run(world, ask("a3", parted(prefix, 4), tenant="a")) == [960]


def test_a_long_prompt_leaves_a_ladder_for_the_first_that_parts_from_it() -> None:
    setup = replace(HYBRID, num_pages=1000, max_model_len=30_000, max_step_tokens=8192)
    world, prompt = World(setup), tokens(20_000, seed=1)
    run(world, ask("0", prompt))
    assert run(world, ask("1", parted(prompt[:17_000], 1))) == [16_384]
    assert run(world, ask("2", parted(prompt[:9_000], 2))) == [8_192]


def test_nothing_shared_costs_no_chunk_and_decodes_plan_no_checkpoints() -> None:
    """The rows of each step equal those of a model without states, and prompts leave few states."""
    sizes = {}
    for name, setup in (("hybrid", HYBRID), ("plain", replace(HYBRID, num_slots=0))):
        world = World(setup)
        run(world, *(ask(str(i), tokens(3000, seed=i), 70) for i in range(4)))
        sizes[name] = [[row.num_tokens for row in plan.rows] for plan in world.plans]
        if name == "hybrid":
            rows = [row for plan in world.plans for row in plan.rows]
            assert (
                sum(len(row.checkpoints) for row in rows) == 4 * 2
            )  # at the last 512, and at the end
            assert not any(row.checkpoints for row in rows if row.is_decode)
    assert sizes["hybrid"] == sizes["plain"]


def test_places_that_are_used_outlive_a_flood_of_prompts_that_are_not() -> None:
    world, prefix = World(replace(HYBRID, num_slots=17)), tokens(1000, seed=1)
    for i in range(3):
        run(world, ask(str(i), parted(prefix, i)))
    for i in range(16):
        run(world, ask(f"flood{i}", tokens(1300, seed=100 + i)))
    assert world.cache.counters["evicted_checkpoints"] > 16
    assert run(world, ask("again", parted(prefix, 5))) == [960]


def test_places_that_are_not_used_any_more_give_way_to_new_ones() -> None:
    world = World(replace(HYBRID, num_slots=9, max_checkpoints=4, num_pages=1500))
    for topic in range(12):
        prefix = tokens(1000, seed=topic)
        reused = [run(world, ask(f"{topic}-{i}", parted(prefix, i)))[0] for i in range(4)]
        assert max(reused) == 960, f"topic {topic} was never learned"


def test_the_lowest_worth_goes_first_and_a_use_raises_it() -> None:
    checkpoints = Checkpoints()
    for name, saved, chance in (
        (b"rung", 8192, LADDER),
        (b"guess", 1024, GUESS),
        (b"proven", 512, PROVEN),
    ):
        checkpoints.attach(name, slot=len(checkpoints) + 1, base=None, saved=saved, chance=chance)
    assert checkpoints.evict_for(50.0, keep=()) is None  # it would be the lowest itself
    checkpoints.use(b"rung")
    assert [checkpoints.evict_for(ANY_WORTH, keep=()) for _ in range(4)] == [2, 3, 1, None]


def test_checkpoints_above_an_evicted_one_save_more() -> None:
    checkpoints = Checkpoints()
    checkpoints.attach(b"below", 1, base=None, saved=1000, chance=LADDER)
    checkpoints.attach(b"above", 2, base=b"below", saved=64, chance=GUESS)
    checkpoints.attach(b"other", 3, base=None, saved=512, chance=GUESS)
    assert checkpoints.evict_for(ANY_WORTH, keep=(2,)) == 1
    assert checkpoints.evict_for(ANY_WORTH, keep=()) == 3
    checkpoints.check()


def test_a_refused_checkpoint_makes_the_next_one_likelier() -> None:
    checkpoints = Checkpoints()
    checkpoints.attach(b"large", 1, base=None, saved=10_000, chance=PROVEN)
    answers = [checkpoints.evict_for(1000.0, keep=()) for _ in range(10)]
    assert answers == [None] * 9 + [1]


def test_pinned_checkpoints_stay_whatever_comes() -> None:
    checkpoints = Checkpoints()
    checkpoints.attach(b"a", 1, base=None, saved=1, chance=LADDER)
    checkpoints.pin(b"a")
    assert checkpoints.evict_for(ANY_WORTH, keep=()) is None
    checkpoints.unpin(b"a")
    assert checkpoints.evict_for(ANY_WORTH, keep=()) == 1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_the_third_reuses_whatever_the_order_and_the_sizes(seed: int) -> None:
    """Random prefixes, tails, chunks and arrivals, a few at a time, with enough memory."""
    rng = random.Random(seed)
    page = rng.choice([2, 4, 16])
    setup = Setup(
        num_pages=2000,
        num_slots=200,
        page_size=page,
        max_rows=rng.randrange(1, 6),
        max_step_tokens=rng.choice([8, 32, 200]),
        mixed_step_tokens=rng.choice([None, 16]),
        max_model_len=300,
        depth=rng.choice([0, 1, 2]),
    )
    world = World(setup)
    prefix = tokens(rng.randrange(page, 120), seed)
    requests: list[Request] = []
    while len(requests) < 5:
        num_before = len(requests)
        for _ in range(rng.randrange(1, 4)):
            prompt = parted(prefix, len(requests), rng.randrange(2, 90))
            requests.append(ask(str(len(requests)), prompt, rng.randrange(1, 9)))
            world.submit(requests[-1])
            for _ in range(rng.randrange(4)):
                world.step()
        world.run()
        for request in requests[num_before:]:
            world.require_reply_alone(request)
            if num_before >= 2:
                assert world.sequences[request.id].num_cached_tokens >= len(prefix) // page * page
    world.require_nothing_owned()
