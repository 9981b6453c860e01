"""Fairness: short prompts behind long ones, and tenants that share an engine.

Time is counted in steps. Here a step takes 16 prompt tokens, and a page has 4 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_runner import Setup, World
from penstock.engine import scheduler as scheduler_module
from penstock.engine.fairness import WaitingLine, by_rank
from penstock.types import Request, SamplingParams, Sequence
from test_scheduler import ask, prompt, run_all

ROOMY: dict[str, Any] = {"num_pages": 1025, "max_rows": 16, "max_model_len": 1024}
LONG = 320  # tokens of a prompt, 20 steps
KINDS = pytest.mark.parametrize("num_slots", [0, 60], ids=["plain", "hybrid"])


def long_prompts(world: World, number: int, **fields: object) -> list[str]:
    names = [f"long{i}" for i in range(number)]
    for i, name in enumerate(names):
        world.submit(ask(name, prompt(LONG, seed=1000 + i), max_tokens=2, **fields))
    return names


def steps_until(world: World, name: str, most: int = 1000) -> int:
    """Steps until the first token of a request."""
    for num_steps in range(most):
        if world.replies[name]:
            return num_steps
        world.step()
    raise AssertionError(f"{name} waits for more than {most} steps")


# Short prompts and long ones


@pytest.mark.thinned
@KINDS
@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("num_before", [0, 3])
def test_a_short_prompt_does_not_wait_for_long_ones(
    num_slots: int, number: int, num_before: int
) -> None:
    """Whether these run already or arrive at the same time."""
    world = World(Setup(**ROOMY, num_slots=num_slots))
    long_prompts(world, number)
    for _ in range(num_before):
        world.step()
    world.submit(ask("short", prompt(4), max_tokens=2))
    world.submit(ask("whole step", prompt(16, seed=1), max_tokens=2))
    assert steps_until(world, "short") == 1
    assert steps_until(world, "whole step") <= 5
    world.run()


def test_a_long_prompt_of_which_little_is_new_is_short() -> None:
    world = World(Setup(**ROOMY))
    run_all(world, [ask("first", prompt(LONG), max_tokens=1)])
    long_prompts(world, 4)
    world.step()
    world.submit(ask("second", (*prompt(LONG)[:-4], 1, 2, 3), max_tokens=1))
    assert steps_until(world, "second") == 1
    world.run()


def test_long_prompts_keep_the_rest_of_every_step() -> None:
    """Whatever the number of short ones: they use three quarters, so a long prompt takes at most a
    third more steps.
    """
    world = World(Setup(**ROOMY))
    (long,) = long_prompts(world, 1)
    num_alone, num_steps = LONG // 16, 0
    while not world.replies[long]:
        for i in range(4):
            world.submit(ask(f"s{num_steps}-{i}", prompt(4, seed=num_steps * 4 + i), max_tokens=1))
        world.step()
        num_steps += 1
    assert num_alone < num_steps <= num_alone * 4 / 3 + 2


def test_the_first_long_prompt_that_waits_finds_a_row() -> None:
    """Short prompts that overtake it leave one row free and share the others with it."""
    world = World(Setup(**{**ROOMY, "max_rows": 3}))
    long_prompts(world, 2)
    num_steps = 0
    while not world.replies["long1"]:
        world.submit(ask(f"s{num_steps}", prompt(4, seed=num_steps), max_tokens=40))
        world.step()
        num_steps += 1
    assert num_steps <= 2 * LONG // 16 * 4 / 3 + 4


def test_the_first_long_prompt_that_waits_finds_its_pages() -> None:
    setup = Setup(num_pages=2 * LONG // 4 + 30, max_rows=16, max_model_len=LONG + 40)
    world = World(setup)
    long_prompts(world, 2)
    num_steps = 0
    while not world.replies["long1"]:
        world.submit(ask(f"s{num_steps}", prompt(4, seed=num_steps), max_tokens=30))
        world.step()
        num_steps += 1
    assert world.scheduler.num_preemptions == 0
    assert num_steps <= 2 * LONG // 16 * 4 / 3 + 4


def plans_of(requests: list[Request], setup: Setup) -> list[list[tuple[int, int, int]]]:
    world = World(setup)
    run_all(world, requests)
    return [[(row.row, row.start, row.num_tokens) for row in plan.rows] for plan in world.plans]


@pytest.mark.thinned
@pytest.mark.parametrize("length", [3, 16, 17, 40, 100])
@pytest.mark.parametrize("mixed", [None, 8])
def test_prompts_of_one_length_are_planned_in_order(
    length: int, mixed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans equal those without a share for short prompts."""
    setup = Setup(**ROOMY, mixed_step_tokens=mixed)
    requests = [ask(str(i), prompt(length, seed=i), max_tokens=6) for i in range(40)]
    shared = plans_of(requests, setup)
    monkeypatch.setattr(scheduler_module, "SHORT_SHARE", 10**9)
    assert plans_of(requests, setup) == shared


def test_a_plan_looks_up_few_of_many_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Setup(**ROOMY))
    long_prompts(world, 100)
    world.step()
    num_lookups = 0
    match = world.cache.match

    def counted(sequence: Sequence) -> Any:
        nonlocal num_lookups
        num_lookups += 1
        return match(sequence)

    monkeypatch.setattr(world.cache, "match", counted)
    world.step()
    assert num_lookups <= scheduler_module.MAX_LOOKUPS + 1


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_crowds_of_all_lengths_and_urgencies_are_served_as_if_alone(seed: int) -> None:
    """Step sizes change, so that a short prompt becomes long and the reverse."""
    rng = random.Random(seed)
    sizes: dict[str, Any] = {"max_step_tokens": 64, "mixed_step_tokens": rng.choice([8, 16, 24])}
    sizes["bulk_share"] = rng.choice([1.0, 0.25])
    world = World(Setup(**{**ROOMY, **sizes, "num_pages": 300, "depth": rng.choice([0, 1])}))
    requests = []
    for i in range(30):
        length = rng.choice([2, 7, 15, 30, 60, 200])
        priority = rng.choice([0, 0, -9, 9, 1000])
        fields: dict[str, Any] = {"max_tokens": rng.choice([1, 3, 9]), "priority": priority}
        requests.append(ask(str(i), prompt(length, seed=i), tenant=rng.choice("aab"), **fields))
        world.submit(requests[-1])
        for _ in range(rng.choice([0, 0, 1, 3])):
            world.step()
    world.run()
    for request in requests:
        world.require_reply_alone(request)


# Tenants


def test_a_tenant_with_one_request_is_next_whatever_others_have_waiting() -> None:
    world = World(Setup(**{**ROOMY, "max_rows": 2}))
    for i in range(100):
        world.submit(ask(f"a{i}", prompt(4, seed=i), max_tokens=10, tenant="ann"))
    for _ in range(5):
        world.step()
    world.submit(ask("b", prompt(4, seed=200), max_tokens=10, tenant="ben"))
    assert steps_until(world, "b") <= 10
    world.run()


def test_tenants_with_much_to_do_get_equal_parts() -> None:
    """One tenant sends ten times as many requests with longer replies; both get as many tokens."""
    world = World(Setup(**{**ROOMY, "max_rows": 4}))
    for i in range(200):
        world.submit(ask(f"a{i}", prompt(12, seed=i), max_tokens=40, tenant="ann"))
        world.submit(ask(f"b{i}", prompt(12, seed=500 + i), max_tokens=8, tenant="ben"))
    for _ in range(400):
        world.step()
    served = {tenant: sum(map(len, replies_of(world, tenant))) for tenant in "ab"}
    assert 0.7 < served["a"] / served["b"] < 1.5, served


def replies_of(world: World, initial: str) -> Iterator[list[int]]:
    return (reply for name, reply in world.replies.items() if name.startswith(initial))


def test_alone_a_tenant_uses_every_row() -> None:
    world = World(Setup(**{**ROOMY, "max_rows": 8, "max_step_tokens": 64}))
    for i in range(20):
        world.submit(ask(str(i), prompt(4, seed=i), max_tokens=20, tenant="ann"))
    world.step()
    assert world.scheduler.num_running == 8
    world.run()
    assert world.scheduler.num_preemptions == 0


@pytest.mark.thinned
@KINDS
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_tenant_without_rows_gets_its_share_of_them(num_slots: int, depth: int) -> None:
    """Another tenant has held all of them for a hundred steps."""
    sizes = {
        "max_rows": 8,
        "max_step_tokens": 64,
        "num_slots": num_slots,
        "depth": depth,
        "num_pages": 600,
    }
    world = World(Setup(**{**ROOMY, **sizes}))
    requests = [ask(f"a{i}", prompt(4, seed=i), max_tokens=120, tenant="ann") for i in range(8)]
    requests += [
        ask(f"b{i}", prompt(4, seed=50 + i), max_tokens=120, tenant="ben") for i in range(8)
    ]
    for request in requests[:8]:
        world.submit(request)
    for _ in range(20):
        world.step()
    assert world.scheduler.num_running == 8
    for request in requests[8:]:
        world.submit(request)
    assert steps_until(world, "b0") <= 5
    assert steps_until(world, "b3") <= 10
    for _ in range(20):
        world.step()
        running = [name for name, sequence in world.sequences.items() if sequence.row is not None]
        assert sorted(name[0] for name in running) == ["a"] * 4 + ["b"] * 4
    assert {f"a{i}" for i in range(4)} <= set(running), "the latest go first"
    assert world.scheduler.num_preemptions == 4
    world.run(max_steps=4000)
    for request in requests:
        world.require_reply_alone(request)


def test_a_tenant_that_holds_all_pages_with_few_rows_gives_some_back() -> None:
    world = World(Setup(num_pages=65, max_rows=16, max_step_tokens=64, max_model_len=128))
    for i in range(4):
        world.submit(ask(f"a{i}", prompt(48, seed=i), max_tokens=70, tenant="ann"))
    for _ in range(10):
        world.step()
    world.submit(ask("b", prompt(16, seed=50), max_tokens=4, tenant="ben"))
    assert steps_until(world, "b") <= 6
    world.run()


def test_a_tenants_only_sequence_is_never_preempted_for_another() -> None:
    world = World(Setup(num_pages=33, max_rows=4, max_step_tokens=64, max_model_len=128))
    world.submit(ask("a", prompt(96), max_tokens=20, tenant="ann"))
    world.step()
    for i in range(10):
        world.submit(ask(f"b{i}", prompt(12, seed=i), max_tokens=4, tenant="ben"))
    while "a" not in world.finishes:
        world.step()
        assert world.sequences["a"].num_preemptions == 0
    world.run()


def test_one_tenants_wait_for_memory_delays_another_only_after_a_while() -> None:
    world = World(Setup(num_pages=65, max_rows=8, max_step_tokens=256, max_model_len=256))
    world.submit(ask("a running", prompt(120), max_tokens=100, tenant="ann"))
    world.step()
    world.submit(ask("a large", prompt(140, seed=1), max_tokens=2, tenant="ann"))
    world.step()
    assert world.sequences["a large"].row is None
    world.submit(ask("a small", prompt(4, seed=2), max_tokens=2, tenant="ann"))
    world.submit(ask("b", prompt(4, seed=3), max_tokens=2, tenant="ben"))
    assert steps_until(world, "b") <= 2
    assert world.sequences["a small"].row is None
    num_passed = 0
    while "a large" not in world.finishes:
        world.submit(
            ask(f"b{num_passed}", prompt(4, seed=10 + num_passed), max_tokens=50, tenant="ben")
        )
        world.step()
        num_passed += 1
        assert num_passed < 400
    assert world.sequences["a running"].num_preemptions == 0
    world.run()


def test_without_pages_the_tenant_that_has_most_rows_gives_one_up() -> None:
    """The preempted row need not be the newest."""
    world = World(Setup(num_pages=17, max_rows=8, max_step_tokens=64, max_model_len=60))
    for i in range(4):
        world.submit(ask(f"a{i}", prompt(8, seed=i), max_tokens=40, tenant="ann"))
    world.submit(ask("b", prompt(8, seed=50), max_tokens=20, tenant="ben"))
    while "b" not in world.finishes:
        world.step()
        assert world.sequences["b"].num_preemptions == 0
    assert world.scheduler.num_preemptions > 0
    world.run()


def test_urgency_counts_within_a_tenant_and_patience_between_them() -> None:
    world = World(Setup(**{**ROOMY, "max_rows": 1}))
    world.submit(ask("running", prompt(4), max_tokens=5, tenant="ann"))
    world.step()
    world.submit(ask("a", prompt(4, seed=1), max_tokens=5, tenant="ann"))
    world.submit(ask("a urgent", prompt(4, seed=2), max_tokens=5, tenant="ann", priority=-50))
    world.submit(ask("b patient", prompt(4, seed=3), max_tokens=5, tenant="ben", priority=2))
    world.submit(ask("c", prompt(4, seed=4), max_tokens=5, tenant="cleo"))
    world.run()
    assert list(world.finishes) == ["running", "c", "a urgent", "a", "b patient"]


def test_a_reply_that_has_begun_is_admitted_before_all_others() -> None:
    world = World(Setup(**{**ROOMY, "max_rows": 1}))
    world.submit(ask("running", prompt(4), max_tokens=5, tenant="ann"))
    world.step()
    world.submit(ask("b", prompt(4, seed=1), max_tokens=2, tenant="ben", priority=-5))
    begun = SamplingParams(max_tokens=8)
    world.submit(ask("a", prompt(10, seed=2), sampling=begun, tenant="ann", num_resumed_tokens=6))
    world.run()
    assert list(world.finishes) == ["running", "a", "b"]
    assert len(world.replies["a"]) == 2


@pytest.mark.parametrize("depth", [0, 1])
def test_a_thought_that_is_closed_keeps_its_row_and_penalties_count_it(depth: int) -> None:
    """As in the server: the request that resumes the reply is submitted before the other is
    aborted.
    """
    world = World(Setup(**{**ROOMY, "max_rows": 1, "depth": depth}))
    sampling = SamplingParams(max_tokens=20, presence_penalty=1.0)
    question, waiting = (
        prompt(6),
        ask("waiting", prompt(4, seed=1), max_tokens=2, tenant="ben", priority=-3),
    )
    world.submit(ask("thinks", question, sampling=sampling, tenant="ann"))
    world.step()
    world.submit(waiting)
    while len(world.replies["thinks"]) < 5:
        world.step()
    thought = (*world.replies["thinks"], 7, 7)
    fields: dict[str, Any] = {
        "num_resumed_tokens": len(thought),
        "age_s": world.now_s,
        "tenant": "ann",
    }
    world.submit(ask("answers", (*question, *thought), sampling=sampling, **fields))
    world.abort("thinks")
    world.run()
    assert list(world.finishes) == ["thinks", "answers", "waiting"]
    assert len(world.replies["answers"]) == 20 - len(thought)
    (admission,) = [one for plan in world.plans for one in plan.admissions if len(one.history) > 6]
    assert admission.num_prompt_tokens == 6
    assert admission.history == (*question, *thought)


def test_a_request_is_due_by_its_age() -> None:
    world = World(Setup(**{**ROOMY, "max_rows": 1}))
    for name, age_s in (("running", 0.0), ("new", 0.0), ("old", 5.0)):
        world.submit(ask(name, prompt(4), max_tokens=2, age_s=age_s))
        world.step()
    world.run()
    assert list(world.finishes) == ["running", "old", "new"]


def waiting_line(rng: random.Random) -> tuple[WaitingLine, list[Sequence]]:
    line, sequences = WaitingLine(), []
    for arrival in range(rng.randrange(1, 30)):
        request = ask(
            str(arrival),
            (1,) * rng.randrange(1, 9),
            tenant=rng.choice(["", "a", "b", "c"]),
            num_resumed_tokens=rng.choice([0, 0, 0, 1]),
        )
        sequence = Sequence.start(request, arrival, rng.choice([0.0, 1.0, 2.0]))
        line.enter(sequence)
        line.charge(sequence, rng.randrange(50), is_decode=False)
        sequences.append(sequence)
    return line, sequences


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_every_request_is_queued_once_and_tenants_keep_their_order(seed: int) -> None:
    rng = random.Random(seed)
    line, sequences = waiting_line(rng)
    for _ in range(2):
        for now_s in (0.0, 1.5, 9.0):
            turns = list(line.in_turn(now_s))
            assert sorted(turns, key=id) == sorted(line, key=id) == sorted(sequences, key=id)
            assert len(line) == len(sequences)
            for tenant in "abc":
                own = [
                    one
                    for one in turns
                    if one.request.tenant == tenant and not one.request.num_resumed_tokens
                ]
                assert own == sorted(own, key=lambda one: (one.due_s, one.arrival))
        for sequence in rng.sample(sequences, len(sequences) // 2):
            line.remove(sequence)
            line.leave(sequence)
            sequences.remove(sequence)
    for sequence in sequences:
        line.remove(sequence)
        line.leave(sequence)
    assert (len(line), line.num_tenants, list(line.in_turn(0.0))) == (0, 0, [])


def test_rank_is_by_turns_of_tenants() -> None:
    def running(names: str) -> list[Sequence]:
        return [Sequence.start(ask(str(i), (1,), tenant=name), i) for i, name in enumerate(names)]

    for names, places in (("aaab", [0, 3, 1, 2]), ("aaa", [0, 1, 2]), ("abcab", [0, 1, 2, 3, 4])):
        assert [one.arrival for one in by_rank(running(names))] == places
