"""Invariants of continuous batching, on the host: a fake runner checks every read and write.

Random histories mix everything; the named tests state each rule.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_runner import VOCAB_SIZE, Setup, World, reply_alone
from penstock import digests
from penstock.cache import Cache
from penstock.cache.checkpoints import PROVEN
from penstock.engine.limits import checkpoint_targets
from penstock.engine.scheduler import Scheduler
from penstock.errors import ContextLengthError, RequestError
from penstock.types import (
    PrefixHit,
    Request,
    SamplingParams,
    Sequence,
    StepOutput,
    StepPlan,
    ThoughtLimit,
)

PLAIN = Setup()
HYBRID = Setup(num_slots=13)
KINDS = pytest.mark.parametrize("setup", [PLAIN, HYBRID, Setup(num_pages=0, num_slots=13)], ids=str)
OVERLAP = pytest.mark.parametrize("depth", [0, 1, 2])


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))


def ask(
    name: str, token_ids: tuple[int, ...], max_tokens: int | None = 8, **fields: object
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(**{"id": name, "token_ids": token_ids, "sampling": sampling, **fields})  # type: ignore[arg-type]


def run_all(world: World, requests: list[Request]) -> None:
    for request in requests:
        world.submit(request)
    world.run()
    for request in requests:
        world.require_reply_alone(request)
    world.require_nothing_owned()


def prefill_tokens(plans: list[StepPlan]) -> int:
    return sum(len(row.token_ids) for plan in plans for row in plan.rows)


@KINDS
@OVERLAP
def test_any_batch_equals_alone(setup: Setup, depth: int) -> None:
    requests = [ask(str(i), prompt(3 + 5 * i, seed=i), max_tokens=1 + 3 * i) for i in range(7)]
    run_all(World(replace(setup, depth=depth)), requests)


@KINDS
@OVERLAP
def test_abort_returns_every_page(setup: Setup, depth: int) -> None:
    for num_steps in range(12):
        world = World(replace(setup, depth=depth))
        for i in range(6):
            world.submit(ask(str(i), prompt(14, seed=i)))
        for _ in range(num_steps):
            world.step()
        for i in range(6):
            world.abort(str(i))
        assert set(world.finishes.values()) <= {"abort", "length"}
        world.require_nothing_owned()
        world.run()
        world.require_nothing_owned()


def test_aborting_an_unknown_request_is_harmless() -> None:
    world = World(PLAIN)
    assert world.scheduler.abort("nobody") is None
    request = ask("a", prompt(5))
    run_all(world, [request])
    assert world.scheduler.abort("a") is None


@OVERLAP
def test_a_row_taken_over_never_gets_its_last_owners_tokens(depth: int) -> None:
    world = World(Setup(max_rows=1, depth=depth))
    world.submit(ask("first", prompt(6, seed=1)))
    for _ in range(3):
        world.step()
    world.abort("first")
    second = ask("second", prompt(6, seed=2))
    run_all(world, [second])
    assert {row.row for plan in world.plans for row in plan.rows} == {0}


@KINDS
@OVERLAP
def test_preempted_equals_undisturbed(setup: Setup, depth: int) -> None:
    num_pages = 11 if setup.num_pages else 0
    world = World(replace(setup, num_pages=num_pages, max_model_len=36, depth=depth))
    requests = [ask(str(i), prompt(10, seed=i), max_tokens=24) for i in range(4)]
    run_all(world, requests)
    assert (world.scheduler.num_preemptions > 0) == (num_pages > 0)
    # A readmission is not a hit: only the first admission counts.
    assert [sequence.num_cached_tokens for sequence in world.sequences.values()] == [0] * 4
    assert world.cache.counters["hit"] == 0


def test_preemption_takes_the_latest_of_the_lowest_priority() -> None:
    world = World(Setup(num_pages=11, max_model_len=36))
    late_but_urgent = ask("urgent", prompt(10, seed=9), max_tokens=24, priority=-1)
    requests = [ask(str(i), prompt(10, seed=i), max_tokens=24) for i in range(2)] + [
        late_but_urgent
    ]
    for request in requests:
        world.submit(request)
    while not world.scheduler.num_preemptions:
        world.step()
    assert world.sequences["1"].row is None
    assert world.sequences["0"].row is not None
    assert world.sequences["urgent"].row is not None


@OVERLAP
def test_prefills_never_hold_all_pages_between_them(depth: int) -> None:
    """Decodes may still take pages that an admission has counted on."""
    for seed in range(30):
        rng = random.Random(seed)
        world = World(
            Setup(num_pages=9, max_rows=3, max_step_tokens=4, max_model_len=32, depth=depth)
        )
        requests = [
            ask(
                str(i),
                prompt(rng.randrange(1, 24), seed=100 * seed + i),
                max_tokens=rng.randrange(1, 8),
            )
            for i in range(4)
        ]
        run_all(world, requests)


@KINDS
def test_restored_prefix_reuses_pages(setup: Setup) -> None:
    world = World(setup)
    first = ask("first", prompt(21))
    run_all(world, [first])
    num_plans = len(world.plans)
    second = ask("second", (*prompt(21)[:20], 1, 2, 3))
    run_all(world, [second])
    assert world.sequences["first"].num_cached_tokens == 0
    assert world.sequences["second"].num_cached_tokens == 20
    assert prefill_tokens(world.plans[num_plans:]) == 3
    assert world.cache.counters["hit"] == 1
    assert world.cache.counters["tokens_reused"] == 20


@KINDS
@OVERLAP
def test_a_prompt_that_ends_with_its_first_token_is_reused_too(setup: Setup, depth: int) -> None:
    world = World(replace(setup, depth=depth))
    run_all(world, [ask("first", prompt(9), max_tokens=1)])
    run_all(world, [ask("second", prompt(9), max_tokens=1)])
    assert world.sequences["second"].num_cached_tokens == 8


@pytest.mark.parametrize("num_pages", [33, 0])
def test_divergent_prompt_restores_nearest_checkpoint(num_pages: int) -> None:
    world = World(Setup(num_pages=num_pages, num_slots=25))
    conversation = prompt(33)
    run_all(world, [ask("first", conversation, boundaries=(0, 9, 17, 26))])
    for name, num_shared, num_reused in (("a", 31, 24), ("b", 23, 16), ("c", 15, 8), ("d", 7, 0)):
        other = (
            *conversation[:num_shared],
            (conversation[num_shared] + 1) % VOCAB_SIZE,
            *prompt(5),
        )
        run_all(world, [ask(name, other)])
        assert world.sequences[name].num_cached_tokens == num_reused, name


def test_checkpoints_are_at_ends_and_starts_of_messages_at_the_last_512_and_sparsely_between() -> (
    None
):
    def targets(num_tokens: int, *boundaries: int, page_size: int = 4) -> tuple[int, ...]:
        request = ask("a", prompt(num_tokens), boundaries=boundaries)
        return tuple(checkpoint_targets(request, page_size))

    assert targets(33) == (32,)
    assert targets(32) == (28,)
    assert targets(4) == ()
    assert targets(33, 0, 9, 13, 17, 22, 27) == (8, 20, 24, 32)
    assert targets(33, 0, 3, 31) == (28, 32)
    assert targets(9, 0, 8, 9) == (8,)
    assert targets(600) == (512, 596)
    assert targets(20_000, 0, 70, page_size=64) == (64, 8192, 16384, 19968)


@pytest.mark.parametrize("max_checkpoints", [0, 1, 2, 5])
def test_checkpoints_evicted_before_running_requests_are_refused(max_checkpoints: int) -> None:
    world = World(Setup(num_pages=65, num_slots=5, max_rows=4, max_checkpoints=max_checkpoints))
    for i in range(6):
        run_all(world, [ask(f"old{i}", prompt(9, seed=i), max_tokens=1)])
    requests = [ask(str(i), prompt(4, seed=10 + i)) for i in range(4)]
    for request in requests:
        world.submit(request)
    plan = world.step()
    assert plan is not None
    assert len(plan.admissions) == 4
    world.run()


def test_a_checkpoint_read_by_an_earlier_plan_can_be_evicted() -> None:
    world = World(Setup(num_slots=4, max_step_tokens=64))
    for name in ("writer", "reader"):
        run_all(world, [ask(name, prompt(9), max_tokens=1)])
    assert world.sequences["reader"].num_cached_tokens == 8
    for i in range(3):
        world.submit(ask(str(i), prompt(4, seed=1 + i)))
    world.step()
    assert world.scheduler.num_running == 3
    world.run()


@pytest.mark.parametrize("setup", [PLAIN, HYBRID], ids=str)
@pytest.mark.parametrize("num_prompt", [39, 15])
@OVERLAP
def test_siblings_wait_for_the_leaders_prompt(setup: Setup, num_prompt: int, depth: int) -> None:
    world = World(replace(setup, depth=depth))
    requests = [ask(f"r-{i}", prompt(num_prompt), max_tokens=4 + i) for i in range(4)]
    run_all(world, requests)
    assert prefill_tokens(world.plans) == num_prompt + 3 * 3
    shared = num_prompt - 3
    assert [world.sequences[f"r-{i}"].num_cached_tokens for i in range(4)] == [
        0,
        shared,
        shared,
        shared,
    ]


@pytest.mark.parametrize("setup", [PLAIN, HYBRID], ids=str)
@OVERLAP
def test_siblings_go_on_when_their_leader_is_aborted(setup: Setup, depth: int) -> None:
    world = World(replace(setup, depth=depth))
    requests = [ask(f"r-{i}", prompt(39)) for i in range(3)]
    for request in requests:
        world.submit(request)
    world.step()
    assert world.scheduler.num_waiting == 2
    world.abort("r-0")
    world.run()
    for request in requests[1:]:
        world.require_reply_alone(request)
    world.require_nothing_owned()


def test_a_follower_that_waits_for_its_leader_does_not_delay_others() -> None:
    world = World(PLAIN)
    for name, tokens in (
        ("leader", prompt(39)),
        ("sibling", prompt(39)),
        ("other", prompt(3, seed=5)),
    ):
        world.submit(ask(name, tokens))
    world.step()
    world.step()
    world.step()
    assert world.sequences["sibling"].row is None
    assert world.sequences["other"].row is not None


def test_a_follower_that_shares_the_start_of_a_long_prompt_waits_only_for_that() -> None:
    world = World(Setup(max_step_tokens=10))
    leader = world.submit(ask("leader", prompt(39)))
    follower = world.submit(ask("follower", (*prompt(39)[:8], 1, 2)))
    world.step()
    assert follower.row is None
    world.step()
    assert follower.num_cached_tokens == 8
    assert leader.num_generated == 0
    world.run()


def test_a_waiting_request_is_not_overtaken_by_a_smaller_one() -> None:
    world = World(Setup(num_pages=11, max_model_len=40))
    world.submit(ask("running", prompt(16, seed=1), max_tokens=20))
    world.step()
    world.submit(ask("large", prompt(28, seed=2), max_tokens=2))
    world.submit(ask("small", prompt(2, seed=3), max_tokens=2))
    while "running" not in world.finishes:
        world.step()
        assert world.sequences["small"].row is None
    world.run()


def test_a_prefill_under_way_keeps_the_pages_it_will_need() -> None:
    world = World(Setup(num_pages=9, max_step_tokens=6))
    world.submit(ask("long", prompt(32), max_tokens=1))
    world.submit(ask("short", prompt(1, seed=1), max_tokens=4))
    while "long" not in world.finishes:
        assert world.sequences["short"].row is None
        world.step()
    world.run()
    assert len(world.plans) == 8 + 4


def test_admissions_leave_pages_for_rows_that_decode() -> None:
    world = World(Setup(num_pages=9))
    world.submit(ask("running", prompt(12), max_tokens=8))
    world.step()
    world.submit(ask("waiting", prompt(16, seed=1), max_tokens=2))
    world.run()
    assert world.scheduler.num_preemptions == 0


def test_waiting_requests_are_admitted_by_priority_then_arrival() -> None:
    world = World(Setup(max_rows=1))
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        world.submit(ask(name, prompt(3), max_tokens=1, priority=priority))
    world.run()
    assert [delta.request_id for delta in world.deltas] == ["b", "d", "a", "c"]


@OVERLAP
@pytest.mark.parametrize(
    ("setup", "max_tokens"),
    [(Setup(max_rows=2), 19), (Setup(num_pages=9, max_model_len=28), 8)],
    ids=str,
)
def test_background_work_gives_its_place_to_others(
    setup: Setup, max_tokens: int, depth: int
) -> None:
    """A batch's requests use the capacity that clients leave, and yield when one arrives: for lack
    of rows or of pages.
    """
    world = World(replace(setup, depth=depth))
    batch = [ask(f"batch {i}", prompt(8, seed=i), max_tokens, priority=1000) for i in range(2)]
    for request in batch:
        world.submit(request)
    for _ in range(4):
        world.step()
    client = ask("client", prompt(8, seed=9), max_tokens=6)
    world.submit(client)
    while world.sequences["client"].row is None:
        world.step()
    assert not world.finishes
    assert world.scheduler.num_preemptions > 0
    world.run()
    for request in [*batch, client]:
        world.require_reply_alone(request)
    world.require_nothing_owned()


@OVERLAP
@pytest.mark.parametrize("num_slots", [0, 65])
def test_background_work_has_few_rows_beside_others_and_all_without_them(
    num_slots: int, depth: int
) -> None:
    setup = Setup(num_pages=257, num_slots=num_slots, max_rows=16, max_step_tokens=64, depth=depth)
    world = World(setup)
    batch = [ask(f"batch {i}", prompt(5, seed=i), max_tokens=30, priority=1000) for i in range(20)]
    for request in batch:
        world.submit(request)
    for _ in range(6):
        world.step()
    assert len(world.plans[-1].rows) == 16
    client = ask("client", prompt(5, seed=99), max_tokens=12)
    world.submit(client)
    while "client" not in world.finishes:
        world.step()
    row = world.plans[-1].rows[0].row
    beside = [plan for plan in world.plans[8 : -depth - 1] if row in [one.row for one in plan.rows]]
    assert len(beside) >= 8
    assert {len(plan.rows) for plan in beside} == {1 + 16 // 8}
    num_beside = len(world.plans)
    world.run()
    assert max(len(plan.rows) for plan in world.plans[num_beside:]) == 16
    for request in [*batch, client]:
        world.require_reply_alone(request)
    world.require_nothing_owned()


@OVERLAP
def test_rows_never_exceed_max_rows_and_all_are_used(depth: int) -> None:
    world = World(Setup(num_pages=65, max_rows=3, max_step_tokens=64, depth=depth))
    requests = [ask(str(i), prompt(4, seed=i)) for i in range(7)]
    run_all(world, requests)
    assert max(len(plan.rows) for plan in world.plans) == 3


@pytest.mark.parametrize("max_step_tokens", [1, 4, 7, 16, 64])
def test_budget_is_respected_and_prefill_goes_on(max_step_tokens: int) -> None:
    """The driver checks every plan: the budget, or one page beside the decode rows if the budget is
    smaller.
    """
    world = World(Setup(num_pages=65, max_rows=6, max_step_tokens=max_step_tokens))
    for i in range(5):
        world.submit(ask(f"short{i}", prompt(4, seed=i), max_tokens=50))
    for _ in range(5):
        world.step()
    long = world.submit(ask("long", prompt(40, seed=9)))
    num_steps = 0
    while not world.replies["long"]:
        world.step()
        num_steps += 1
    assert num_steps <= 10
    assert long.num_cached_tokens == 0
    world.run()
    assert max(plan.num_tokens for plan in world.plans) <= max(max_step_tokens, 5 + 4)


def test_prompts_beside_decodes_are_short_until_many_wait() -> None:
    sizes = Setup(
        num_pages=513, max_rows=12, max_step_tokens=64, mixed_step_tokens=8, max_model_len=80
    )
    world = World(sizes)
    world.submit(ask("decodes", prompt(4), max_tokens=70))
    world.step()
    world.submit(ask("one", prompt(40, seed=1), max_tokens=1))
    for _ in range(5):
        world.step()
        assert world.plans[-1].num_tokens == 1 + 8
    for i in range(9):
        world.submit(ask(f"many{i}", prompt(40, seed=2 + i), max_tokens=1))
    world.step()
    assert world.plans[-1].num_tokens == 1 + 44  # an eighth of 360 tokens, rounded to pages
    world.run()


def test_prompts_without_decodes_fill_the_whole_budget() -> None:
    world = World(Setup(num_pages=65, max_step_tokens=40, mixed_step_tokens=4))
    run_all(world, [ask("a", prompt(36), max_tokens=1)])
    assert [plan.num_tokens for plan in world.plans] == [36]


def test_a_lone_prompt_may_take_a_larger_step_than_several_share() -> None:
    sizes = Setup(
        num_pages=129, max_rows=4, max_step_tokens=64, shared_step_tokens=16, max_model_len=80
    )
    world = World(sizes)
    run_all(world, [ask("alone", prompt(60), max_tokens=1)])
    assert [plan.num_tokens for plan in world.plans] == [60]
    world = World(sizes)
    run_all(world, [ask(f"r{n}", prompt(20, seed=n), max_tokens=1) for n in range(3)])
    assert [plan.num_tokens for plan in world.plans] == [16, 16, 16, 12]


def test_chunks_fill_the_budget_with_whole_pages() -> None:
    world = World(Setup(num_pages=65, max_step_tokens=10))
    run_all(world, [ask("a", prompt(21), max_tokens=1)])
    assert [plan.num_tokens for plan in world.plans] == [8, 8, 5]


def test_an_end_token_is_delivered_and_ends_the_reply() -> None:
    tokens, _ = reply_alone(ask("a", prompt(5), max_tokens=20), 64)
    end = tokens[6]
    for depth in (0, 1, 2):
        world = World(Setup(depth=depth))
        run_all(world, [ask("a", prompt(5), max_tokens=20, end_token_ids=(end,))])
        assert world.replies["a"] == tokens[: tokens.index(end) + 1]
        assert world.finishes["a"] == "stop"


@OVERLAP
def test_replies_end_at_max_tokens_and_when_the_context_is_full(depth: int) -> None:
    world = World(Setup(max_model_len=20, depth=depth))
    run_all(
        world,
        [ask("short", prompt(5), max_tokens=3), ask("full", prompt(5, seed=1), max_tokens=None)],
    )
    assert (len(world.replies["short"]), world.finishes["short"]) == (3, "length")
    assert (len(world.replies["full"]), world.finishes["full"]) == (15, "length")
    assert len(world.plans) == 15  # no sequence is planned past its last token


@OVERLAP
def test_min_tokens_forbids_end_tokens_until_then(depth: int) -> None:
    every = tuple(range(1, VOCAB_SIZE))
    world = World(Setup(depth=depth))
    sampling = SamplingParams(max_tokens=20, min_tokens=5)
    run_all(world, [ask("a", prompt(5), sampling=sampling, end_token_ids=every)])
    assert world.replies["a"][:5] == [0] * 5
    assert world.replies["a"][5] != 0
    assert [one.end_token_ids for plan in world.plans for one in plan.admissions] == [every]


def test_logit_biases_come_with_the_admission() -> None:
    world = World(Setup(max_step_tokens=4))
    sampling = SamplingParams(max_tokens=4, logit_bias={7: 100.0})
    run_all(world, [ask("a", prompt(6), sampling=sampling)])
    assert world.replies["a"] == [7] * 4
    assert [admission.sampling.logit_bias for admission in world.plans[0].admissions] == [
        {7: 100.0}
    ]


@KINDS
@OVERLAP
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_prompt_that_is_preempted_while_it_is_scored_has_each_score_once(
    setup: Setup, depth: int, num_steps: int
) -> None:
    world = World(replace(setup, max_step_tokens=8, depth=depth))
    scored = SamplingParams(max_tokens=3, prompt_logprobs=1)
    sequence = world.submit(ask("a", prompt(30), sampling=scored))
    for _ in range(num_steps):
        world.step()
    world.scheduler._preempt(sequence)
    world.run()
    assert world.scores["a"] == list(range(1, 30))


def test_logprobs_are_passed_through() -> None:
    world = World(PLAIN)
    run_all(world, [ask("a", prompt(6), sampling=SamplingParams(max_tokens=3, logprobs=0))])
    assert [logprob.logprob for delta in world.deltas for logprob in delta.logprobs] == [
        -6.0,
        -7.0,
        -8.0,
    ]


def test_seeds_are_given_or_follow_from_the_arrival() -> None:
    def seeds() -> list[int]:
        world = World(Setup(max_step_tokens=64))
        for i in range(3):
            world.submit(ask(str(i), prompt(3, seed=i)))
        world.submit(ask("given", prompt(3), sampling=SamplingParams(seed=-7)))
        plan = world.step()
        assert plan is not None
        return [admission.seed for admission in plan.admissions]

    assert seeds() == seeds()
    assert len(set(seeds())) == 4
    assert seeds()[3] == -7
    assert all(0 <= seed < 2**63 for seed in seeds()[:3])


def test_a_resumed_sequence_keeps_its_seed_and_brings_its_history() -> None:
    world = World(Setup(num_pages=11, max_model_len=36))
    sampling = SamplingParams(max_tokens=24, presence_penalty=1.0)
    requests = [ask(str(i), prompt(10, seed=i), sampling=sampling) for i in range(3)]
    run_all(world, requests)
    admissions = [admission for plan in world.plans for admission in plan.admissions]
    assert len(admissions) > 3
    assert len({admission.seed for admission in admissions}) == 3
    assert max(len(admission.history) for admission in admissions) > 10
    assert {admission.num_prompt_tokens for admission in admissions} == {10}


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    world = World(Setup(num_pages=6, max_model_len=40))
    with pytest.raises(ContextLengthError, match=r"(?s)40 tokens.*is 40"):
        world.scheduler.submit(ask("a", prompt(40)))
    with pytest.raises(ContextLengthError, match=r"(?s)22 tokens.*holds 21 in 5 pages of 4"):
        world.scheduler.submit(ask("b", prompt(12), max_tokens=10))
    with pytest.raises(RequestError, match="no tokens"):
        world.scheduler.submit(ask("c", ()))
    assert not world.scheduler.has_work
    run_all(world, [ask("d", prompt(12), max_tokens=9)])


def test_a_reply_without_a_limit_ends_when_the_pool_is_full() -> None:
    world = World(Setup(num_pages=6, max_model_len=40))
    world.submit(ask("a", prompt(12), max_tokens=None))
    world.run()
    assert (len(world.replies["a"]), world.finishes["a"]) == (9, "length")


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    world = World(PLAIN)
    world.submit(ask("a", prompt(5)))
    with pytest.raises(RequestError, match="already running or queued"):
        world.scheduler.submit(ask("a", prompt(5)))
    world.run()
    del world.finishes["a"]
    run_all(world, [ask("a", prompt(5))])


def test_an_idle_scheduler_holds_no_request() -> None:
    world = World(Setup(num_pages=11, max_model_len=36, depth=1))
    run_all(world, [ask(str(i), prompt(10, seed=i), max_tokens=24) for i in range(4)])
    assert world.scheduler.num_preemptions > 0
    held = {
        name: value
        for name, value in vars(world.scheduler).items()
        if isinstance(value, list | dict | set)
    }
    assert sorted(held.pop("_free_rows")) == [0, 1, 2, 3]
    assert not any(held.values()), held
    assert world.scheduler._leaders.is_empty
    assert (world.scheduler.num_waiting, world.scheduler._waiting.num_tenants) == (0, 0)


def test_without_the_prefix_cache_nothing_is_shared() -> None:
    world = World(Setup(num_slots=9, prefix_cache=False))
    requests = [ask(str(i), prompt(20)) for i in range(3)]
    run_all(world, requests)
    assert prefill_tokens(world.plans) == 60
    assert world.cache.counters["miss_disabled"] == 3


def crowd_behind_a_document(setup: Setup, num_requests: int) -> tuple[Scheduler, list[Request]]:
    """A scheduler that has computed a document of 64k tokens, and requests behind it."""
    cache = Cache(page_size=64, num_pages=setup.num_pages, num_slots=setup.num_slots)
    scheduler = Scheduler(
        cache, max_rows=setup.max_rows, max_step_tokens=16384, max_model_len=2**17
    )
    document = tuple(range(65_536))
    for number in range(2):
        scheduler.submit(ask(f"first{number}", (*document, number, *prompt(100)), max_tokens=1))
        while scheduler.has_work:
            step_blindly(scheduler)
    crowd = [
        ask(str(i), (*document, i % 1000 + 2, *prompt(100, seed=i))) for i in range(num_requests)
    ]
    return scheduler, crowd


def step_blindly(scheduler: Scheduler) -> StepPlan | None:
    plan = scheduler.plan()
    if plan is not None:
        scheduler.commit(StepOutput(plan.step, {row.row: (0,) for row in plan.rows if row.samples}))
    return plan


@pytest.mark.parametrize("num_slots", [0, 600], ids=["plain", "hybrid"])
def test_a_plan_hashes_nothing_and_looks_few_long_prompts_up(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All decoding rows wait for a plan, so a crowd behind one document is admitted gradually."""
    scheduler, crowd = crowd_behind_a_document(
        Setup(num_pages=5000, num_slots=num_slots, max_rows=256), 300
    )
    for request in crowd:
        scheduler.submit(request)
    num_hashed = num_matches = 0
    digest, match = digests.blake2b, Cache.match

    def count_digest(*args: Any, **options: Any) -> Any:
        nonlocal num_hashed
        num_hashed += 1
        return digest(*args, **options)

    def count_match(cache: Cache, sequence: Sequence) -> PrefixHit:
        nonlocal num_matches
        num_matches += 1
        return match(cache, sequence)

    monkeypatch.setattr(digests, "blake2b", count_digest)
    monkeypatch.setattr(Cache, "match", count_match)
    most_matches, longest_s = 0, 0.0
    while scheduler.has_work:
        num_matches, num_before = 0, num_hashed
        began = time.thread_time()
        plan = scheduler.plan()
        longest_s = max(longest_s, time.thread_time() - began)
        assert num_hashed == num_before
        most_matches = max(most_matches, num_matches)
        assert plan is not None
        scheduler.commit(StepOutput(plan.step, {row.row: (0,) for row in plan.rows if row.samples}))
    assert most_matches <= 9
    assert longest_s < 0.3  # milliseconds on an idle machine
    assert scheduler.cache.counters["tokens_reused"] >= 300 * 65_536
    scheduler.cache.check()


def test_a_follower_is_not_looked_up_again_until_its_leader_has_come() -> None:
    scheduler, crowd = crowd_behind_a_document(Setup(num_pages=9000, num_slots=600, max_rows=64), 2)
    fresh = [replace(request, id=f"f{request.id}", tenant="other") for request in crowd]
    for request in fresh:
        scheduler.submit(request)
    num_matches = []
    with pytest.MonkeyPatch.context() as patch:
        match, calls = Cache.match, []
        patch.setattr(
            Cache, "match", lambda cache, sequence: calls.append(1) or match(cache, sequence)
        )
        while scheduler.num_waiting:
            calls.clear()
            step_blindly(scheduler)
            num_matches.append(len(calls))
    assert num_matches == [4, 0, 0, 0, 2]  # in turn and out of turn; four steps of 16,384 tokens


def test_digests_that_come_with_a_request_are_those_that_the_engine_would_compute() -> None:
    def submit(page_size: int) -> Sequence:
        world = World(HYBRID)
        given = digests.PageDigests.of(prompt(22), page_size, "tenant")
        return world.submit(ask("a", prompt(22), tenant="tenant", page_digests=given))

    expected = digests.PageDigests.of(prompt(22), 4, "tenant").split()
    assert len(expected) == 5
    assert submit(page_size=4).digests == submit(page_size=8).digests == expected


def thinking(name: str, num_prompt: int, budget: int, num_closing: int = 3) -> Request:
    """It does not end its thinking itself."""
    closing_ids = prompt(num_closing, seed=budget)
    limit = ThoughtLimit(num_tokens=budget, end_id=-1, closing_ids=closing_ids)
    return ask(name, prompt(num_prompt, seed=num_prompt), 24, thought_limit=limit)


@KINDS
@OVERLAP
@pytest.mark.parametrize("decode_tokens", [1, 2, 5])
@pytest.mark.parametrize("num_closing", [1, 3, 9])
def test_a_thought_is_closed_in_its_row_wherever_its_pages_end(
    setup: Setup, depth: int, decode_tokens: int, num_closing: int
) -> None:
    """However many tokens a step brings, none is behind the limit."""
    world = World(replace(setup, depth=depth, decode_tokens=decode_tokens))
    requests = [
        thinking(f"{num_prompt} {budget}", num_prompt, budget, num_closing)
        for num_prompt in range(1, 9)
        for budget in range(2, 11)
    ]
    run_all(world, requests)
    for request in requests:
        closed, _ = reply_alone(request, setup.max_model_len, closes_thought=True)
        assert world.replies[request.id] == closed
    assert world.num_closed == len(requests)
    assert world.scheduler.num_preemptions == 0


@KINDS
@OVERLAP
def test_a_reply_continues_elsewhere_before_its_thought_is_closed_or_after_that(
    setup: Setup, depth: int
) -> None:
    """Where it stops at its limit, no token is left to sample before it is closed: it is not."""
    for budget in (2, 5, 8):
        whole = thinking("x", 6, budget)
        closed, _ = reply_alone(whole, setup.max_model_len, closes_thought=True)
        for cut in [*range(1, budget + 1), *range(budget + 3, len(closed))]:
            world = World(replace(setup, depth=depth))
            token_ids = (*whole.token_ids, *closed[:cut])
            run_all(world, [replace(whole, token_ids=token_ids, num_resumed_tokens=cut)])
            if cut < budget - 1 or cut > budget:
                assert world.replies["x"] == closed[cut:]
            if cut == budget:
                assert world.num_closed == 0


@KINDS
@OVERLAP
def test_a_reply_that_continues_elsewhere_after_its_thought_is_not_closed(
    setup: Setup, depth: int
) -> None:
    whole = thinking("x", 6, 8)
    said, _ = reply_alone(whole, setup.max_model_len)
    limit = ThoughtLimit(num_tokens=8, end_id=said[3], closing_ids=(1,))
    assert said[3] not in said[4:8], "it would end its thinking again: choose another prompt"
    for cut in range(4, 8):
        world = World(replace(setup, depth=depth))
        token_ids = (*whole.token_ids, *said[:cut])
        one = replace(whole, token_ids=token_ids, num_resumed_tokens=cut, thought_limit=limit)
        run_all(world, [one])
        assert world.replies["x"] == said[cut:]


@OVERLAP
def test_no_row_is_preempted_for_the_end_of_a_thought(depth: int) -> None:
    """The closing tokens need a page while another row holds the last ones: the server closes."""
    world = World(Setup(num_pages=7, max_step_tokens=32, depth=depth))
    limit = ThoughtLimit(num_tokens=3, end_id=-1, closing_ids=prompt(3))
    first = ask("thinking", prompt(5), 12, thought_limit=limit)
    run_all(world, [first, ask("other", prompt(13, seed=1), max_tokens=3)])
    assert (world.scheduler.num_preemptions, world.num_closed) == (0, 0)


@KINDS
@OVERLAP
def test_an_abort_around_the_end_of_a_thought_returns_everything(setup: Setup, depth: int) -> None:
    for num_steps in range(5, 14):
        world = World(replace(setup, depth=depth))
        requests = [thinking(str(budget), 6, budget) for budget in (5, 6, 7)]
        for request in requests:
            world.submit(request)
        for _ in range(num_steps):
            world.step()
        for request in requests:
            world.abort(request.id)
        world.run()
        for request in requests:
            world.require_part_of_reply(request)
        world.require_nothing_owned()


def random_setup(rng: random.Random) -> Setup:
    page_size = rng.choice([2, 4])
    kind = rng.choice(["plain", "plain", "hybrid", "hybrid", "hybrid", "recurrent"])
    max_rows = rng.randrange(1, 6)
    return Setup(
        num_pages=0 if kind == "recurrent" else rng.choice([8, 10, 12, 20, 40]),
        num_slots=0 if kind == "plain" else rng.randrange(2, 3 + 2 * max_rows),
        page_size=page_size,
        max_rows=max_rows,
        max_step_tokens=rng.choice([1, 3, 8, 16, 64]),
        shared_step_tokens=rng.choice([None, None, 4]),
        mixed_step_tokens=rng.choice([None, 4, 8]),
        max_model_len=rng.choice([14, 24, 40]),
        max_checkpoints=rng.choice([None, None, 0, 1, 3]),
        prefix_cache=rng.random() < 0.9,
        session_bytes=rng.choice([0, 3, 8, 40]),
        session_s=rng.choice([6, 1000]),
        depth=rng.choice([0, 1, 1, 2, 3]),
        decode_tokens=rng.choice([1, 1, 2, 5]),
    )


def random_request(
    rng: random.Random, name: str, setup: Setup, stems: list[tuple[int, ...]]
) -> Request:
    stem = rng.choice(stems)
    tokens = stem[: rng.randrange(len(stem) + 1)] if rng.random() < 0.5 else stem
    tokens = (*tokens, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 6))))
    num_tokens = len(tokens)
    sampling = SamplingParams(
        max_tokens=rng.choice([1, 2, 5, 9, 16, 24]),
        min_tokens=rng.choice([0, 0, 1, 3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        logit_bias={rng.randrange(VOCAB_SIZE): 30.0} if rng.random() < 0.2 else {},
        logprobs=rng.choice([None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0, 2]),
    )
    is_taken_over = sampling.prompt_logprobs is not None and rng.random() < 0.3
    return Request(
        id=name,
        token_ids=tokens,
        sampling=sampling,
        end_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1, 2]))),
        boundaries=tuple(sorted(rng.sample(range(num_tokens), min(num_tokens, rng.randrange(4))))),
        priority=rng.choice([0, 0, 0, -1, 1, 1000]),
        session_id=rng.choice([None, "s", "t", "u"]),
        num_scored_tokens=rng.randrange(num_tokens) if is_taken_over else 0,
        tenant=rng.choice(["", "", "", "ann", "ben"]),
        thought_limit=random_limit(rng),
    )


def random_limit(rng: random.Random) -> ThoughtLimit | None:
    closing_ids = tuple(rng.choices(range(VOCAB_SIZE), k=rng.randrange(1, 6)))
    return rng.choice(
        [
            None,
            ThoughtLimit(
                num_tokens=rng.randrange(1, 14),
                end_id=rng.choice([-1, -1, *range(VOCAB_SIZE)]),
                closing_ids=closing_ids,
            ),
        ]
    )


def run_history(seed: int) -> World:
    """Random arrivals (often several similar ones, or further turns), aborts and sizes, and
    sessions that end in every way; everything is checked in between.
    """
    rng = random.Random(seed)
    setup = random_setup(rng)
    world = World(setup)
    stems = [
        prompt(rng.randrange(1, setup.max_model_len - 6), seed=rng.randrange(99)) for _ in range(2)
    ]
    requests: list[Request] = []
    for _ in range(rng.randrange(1, 6)):
        request = random_request(rng, str(len(requests)), setup, stems)
        for _ in range(rng.choice([1, 2, 3])):
            request = replace(request, id=str(len(requests)))
            try:
                world.submit(request)
            except ContextLengthError:
                break
            requests.append(request)
        for _ in range(rng.randrange(5)):
            world.step()
            if requests and rng.random() < 0.1:
                world.abort(rng.choice(requests).id)
            if rng.random() < 0.05:
                world.cache.sessions.drop(rng.choice("stu"))
        ended = [
            name
            for name in world.finishes
            if len(world.sequences[name].tokens) < setup.max_model_len - 6
        ]
        if ended:
            stems[rng.randrange(2)] = tuple(world.sequences[rng.choice(ended)].tokens)
    num_steps_alone = sum(len(r.token_ids) + (r.sampling.max_tokens or 0) for r in requests)
    # One after the other, they take fewer steps than tokens; preemption repeats work, but not
    # often.
    world.run(max_steps=20 + 4 * num_steps_alone)
    for request in requests:
        if world.finishes[request.id] == "abort":
            world.require_part_of_reply(request)
        else:
            world.require_reply_alone(request)
    world.num_sessions = len(world.cache.sessions)
    world.require_nothing_owned()
    return world


def has_learned(world: World) -> bool:
    """Whether a hit resumed from a place that only another prompt can have taught."""
    places = {
        n for s in world.sequences.values() for n, chance in s.targets.items() if chance == PROVEN
    }
    return any(sequence.num_cached_tokens in places for sequence in world.sequences.values())


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_histories_found_by_search_keep_every_law(seed: int) -> None:
    run_history(seed)


def test_five_hundred_random_histories_keep_every_law() -> None:
    worlds = [run_history(seed) for seed in range(500)]
    # The histories cover the intended paths.
    assert sum(world.scheduler.num_preemptions > 0 for world in worlds) > 25
    assert sum(world.cache.counters["hit"] > 0 for world in worlds) > 125
    assert sum(world.cache.counters["evicted_checkpoints"] > 0 for world in worlds) > 50
    assert sum(world.cache.counters["evicted_pages"] > 0 for world in worlds) > 50
    assert sum("abort" in world.finishes.values() for world in worlds) > 50
    assert sum(world.num_sessions > 0 for world in worlds) > 75
    assert sum(has_learned(world) for world in worlds) > 50
    assert sum(world.num_closed > 0 for world in worlds) > 40
    assert sum("stop" in world.finishes.values() for world in worlds) > 125
    assert sum(any(len(d.token_ids) > 1 for d in world.deltas) for world in worlds) > 125
