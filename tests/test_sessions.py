"""Sessions keep the prefix of a conversation for its next turn, and never block other work."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fake_runner import VOCAB_SIZE, Setup, World
from penstock.cache import sessions as session_table
from penstock.types import Request, SamplingParams, Sequence

PLAIN = Setup(session_bytes=100)
HYBRID = Setup(num_slots=13, session_bytes=100)
RECURRENT = Setup(num_pages=0, num_slots=13, session_bytes=100)
KINDS = pytest.mark.parametrize(
    "setup", [PLAIN, HYBRID, RECURRENT], ids=["plain", "hybrid", "recurrent"]
)
OVERLAP = pytest.mark.parametrize("depth", [0, 1, 2])


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))


def say(
    world: World,
    name: str,
    token_ids: tuple[int, ...],
    session_id: str | None = "chat",
    max_tokens: int = 8,
    priority: int = 0,
) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    return world.submit(
        Request(
            id=name,
            token_ids=token_ids,
            sampling=sampling,
            session_id=session_id,
            priority=priority,
        )
    )


def run(world: World, *turn: object, **fields: object) -> Sequence:
    sequence = say(world, *turn, **fields)  # type: ignore[arg-type]
    world.run()
    return sequence


def flood(world: World, num_requests: int = 12) -> None:
    """Other requests that need all memory, one after the other."""
    for number in range(num_requests):
        run(world, f"flood {world.now_s} {number}", prompt(40, seed=1000 + number), None)


def next_turn(sequence: Sequence) -> tuple[int, ...]:
    return (*sequence.tokens, *prompt(3, seed=7))


@KINDS
@OVERLAP
def test_the_next_turn_goes_on_where_the_last_reply_ended_whatever_came_between(
    setup: Setup, depth: int
) -> None:
    world = World(replace(setup, depth=depth))
    first = run(world, "first", prompt(9), max_tokens=14)
    flood(world)
    second = run(world, "second", next_turn(first))
    num_computed = len(first.tokens) - 1  # the last reply token was never computed
    assert second.num_cached_tokens == num_computed // setup.page_size * setup.page_size == 20
    world.require_reply_alone(second.request)
    world.require_nothing_owned()


@KINDS
def test_without_a_session_other_traffic_takes_the_memory(setup: Setup) -> None:
    world = World(setup)
    first = run(world, "first", prompt(9), None, max_tokens=14)
    flood(world)
    assert run(world, "second", next_turn(first), None).num_cached_tokens == 0


@KINDS
def test_a_session_ends_when_it_is_deleted_or_was_not_used_for_too_long(setup: Setup) -> None:
    world = World(replace(setup, session_s=60))
    first = run(world, "first", prompt(9), "old", max_tokens=14)
    world.now_s += 50
    run(world, "second", prompt(9, seed=1), "new")
    assert [info.id for info in world.cache.sessions.describe()] == ["new", "old"]
    world.now_s += 30
    assert [info.id for info in world.cache.sessions.describe()] == ["new"]
    dropped = world.cache.sessions.drop("new")
    assert dropped is not None
    assert dropped.id == "new"
    assert world.cache.sessions.drop("new") is None
    assert world.cache.sessions.num_bytes == 0
    world.cache.check()
    assert (
        run(world, "third", next_turn(first)).num_cached_tokens == 20
    )  # still there, but unprotected like any prefix


@KINDS
def test_sessions_say_what_they_hold_and_how_often_it_served(setup: Setup) -> None:
    world = World(setup)
    first = run(world, "first", prompt(9), max_tokens=14)
    world.now_s += 100
    run(world, "second", next_turn(first), max_tokens=2)
    (info,) = world.cache.sessions.describe()
    pages, states = {PLAIN: (6, 0), HYBRID: (6, 1), RECURRENT: (0, 1)}[setup]
    assert (info.num_tokens, info.num_hits, info.num_bytes) == (28, 1, pages + 2 * states)
    assert info.age_s > 100 > info.idle_s
    assert world.cache.sessions.num_bytes == info.num_bytes


@KINDS
def test_the_least_recently_used_session_goes_when_all_hold_too_much(setup: Setup) -> None:
    world = World(replace(setup, session_bytes=13, num_slots=25 if setup.num_slots else 0))
    for name in ("a", "b", "c"):
        run(world, name, prompt(13, seed=ord(name)), name, max_tokens=4)
    run(world, "a again", (*world.sequences["a"].tokens, *prompt(2)), "a", max_tokens=1)
    for name in ("d", "e", "f", "g"):
        if "b" not in {info.id for info in world.cache.sessions.describe()}:
            break
        run(world, name, prompt(13, seed=ord(name)), name, max_tokens=4)
    assert "a" in {info.id for info in world.cache.sessions.describe()}
    assert world.cache.sessions.num_bytes <= 13


def test_a_session_that_is_larger_than_all_may_be_is_not_kept() -> None:
    world = World(replace(PLAIN, session_bytes=3))
    run(world, "small", prompt(8), "small", max_tokens=4)
    run(world, "large", prompt(30, seed=1), "large")
    assert world.cache.sessions.describe() == []
    run(world, "fits", prompt(9), "fits", max_tokens=1)
    assert [info.id for info in world.cache.sessions.describe()] == ["fits"]


def test_sessions_too_short_to_hold_anything_are_bounded_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_table, "MAX_SESSIONS", 3)
    world = World(PLAIN)
    for number in range(5):
        run(world, str(number), (number,), f"session {number}", max_tokens=1)
    assert [info.id for info in world.cache.sessions.describe()] == [
        "session 4",
        "session 3",
        "session 2",
    ]


def test_sessions_share_a_prefix_and_its_bytes() -> None:
    world = World(PLAIN)
    for name in ("a", "b"):
        run(world, name, (*prompt(16), *prompt(5, seed=ord(name))), name, max_tokens=1)
    assert [info.num_bytes for info in world.cache.sessions.describe()] == [5, 5]
    assert world.cache.sessions.num_bytes == 6
    world.cache.sessions.drop("a")
    assert world.cache.sessions.num_bytes == 5
    world.cache.check()


@OVERLAP
def test_sessions_end_before_a_running_request_is_preempted(depth: int) -> None:
    world = World(Setup(num_pages=12, session_bytes=100, max_model_len=40, depth=depth))
    for name in ("a", "b"):
        run(world, name, prompt(13, seed=ord(name)), name, max_tokens=4)  # four pages each
    long = run(world, "long", prompt(9, seed=5), None, max_tokens=24)  # nine pages, of eleven
    assert [info.id for info in world.cache.sessions.describe()] == []
    assert world.scheduler.num_preemptions == 0
    world.require_reply_alone(long.request)


def test_a_waiting_request_ends_a_session_only_when_no_other_runs() -> None:
    world = World(Setup(num_pages=12, session_bytes=100, max_model_len=44))
    run(world, "a", prompt(21), "chat", max_tokens=4)  # six pages
    say(world, "runs", prompt(5, seed=1), None, max_tokens=8)
    waiting = say(world, "waits", prompt(25, seed=2), None, max_tokens=4)
    for _ in range(6):
        world.step()
        assert waiting.row is None
        assert len(world.cache.sessions) == 1
    world.run()
    assert len(world.cache.sessions) == 0
    world.require_reply_alone(waiting.request)


def test_a_prefill_that_has_begun_takes_the_pages_that_sessions_keep() -> None:
    world = World(Setup(num_pages=12, session_bytes=100, max_model_len=44, max_step_tokens=4))
    talks = say(world, "talks", prompt(3), "chat", max_tokens=10)  # ends with all its pages full
    reads = say(world, "reads", prompt(33, seed=1), None, max_tokens=2)
    world.run()
    for sequence in (talks, reads):
        world.require_reply_alone(sequence.request)
    world.require_nothing_owned()


@KINDS
@OVERLAP
def test_a_session_survives_an_aborted_turn(setup: Setup, depth: int) -> None:
    world = World(replace(setup, depth=depth))
    first = run(world, "first", prompt(9), max_tokens=14)
    for num_steps in range(6):
        say(world, f"aborted {num_steps}", next_turn(first))
        for _ in range(num_steps):
            world.step()
        world.abort(f"aborted {num_steps}")
        world.run()
    flood(world)
    last = run(world, "last", next_turn(first))
    assert last.num_cached_tokens >= 20
    world.require_reply_alone(last.request)
    world.require_nothing_owned()


@KINDS
@OVERLAP
def test_a_turn_asked_again_or_shown_without_its_thoughts_goes_on_from_its_prompt(
    setup: Setup, depth: int
) -> None:
    for differing in (0, 2):  # tokens at the end of the prompt that a later turn does not repeat
        world = World(replace(setup, depth=depth))
        sampling = SamplingParams(max_tokens=14)
        first = Request(
            id="first",
            token_ids=prompt(18),
            sampling=sampling,
            boundaries=(4, 16),
            session_id="chat",
        )
        world.submit(first)
        world.run()
        flood(world)
        again = (*prompt(18)[: 18 - differing], *prompt(6, seed=3))
        assert run(world, "again", again).num_cached_tokens == 16


@KINDS
def test_a_turn_that_takes_another_way_leaves_nothing_of_the_old_one_pinned(setup: Setup) -> None:
    world = World(setup)
    first = run(world, "first", prompt(20), max_tokens=9)
    held = world.cache.sessions.num_bytes
    run(world, "edited", (*first.tokens[:6], *prompt(3, seed=4)), max_tokens=1)
    assert 0 < world.cache.sessions.num_bytes < held or not setup.num_pages
    world.cache.check()
    world.require_nothing_owned()


def test_reply_states_without_a_session_take_at_most_half_of_the_checkpoints() -> None:
    world = World(Setup(num_slots=13, max_checkpoints=4, max_rows=6, max_step_tokens=64))
    for number in range(6):
        say(world, str(number), prompt(3, seed=number), None, max_tokens=20)
    for _ in range(12):
        world.step()
    assert sum(s.reply_checkpoint is not None for s in world.sequences.values()) == 2
    world.run()
    world.require_nothing_owned()


def test_only_states_of_prompts_are_kept_where_replies_would_round_otherwise() -> None:
    world = World(HYBRID)
    world.cache._reply_states = False
    first = run(world, "first", prompt(9), max_tokens=14)
    assert run(world, "second", next_turn(first)).num_cached_tokens == 8


def test_an_urgent_request_overtakes_those_of_the_last_seconds_only() -> None:
    world = World(Setup(max_rows=1))
    patient = say(world, "patient", prompt(3), None, max_tokens=1, priority=3)
    for number in range(100):
        say(world, f"urgent {number}", prompt(3, seed=number), None, max_tokens=1)
        world.step()
        if patient.finish is not None:
            break
    assert 20 < number < 40
