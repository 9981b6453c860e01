"""Invariants of the fleet, with engines that are not processes: routing, and rerouting after a
crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.config import EngineConfig, ServeConfig
from penstock.digests import PageDigests
from penstock.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    OverloadedError,
    PenstockError,
)
from penstock.progress import OnPhase, Phase
from penstock.serve import replica as replica_module
from penstock.serve.admission import QueueShares
from penstock.serve.client import Receiver
from penstock.serve.devices import place_engines
from penstock.serve.fleet import MAX_BLAME, Fleet, resumed
from penstock.serve.replica import sum_stats
from penstock.serve.routing import AFFINITY, ROW_TOKENS, PrefixMap, Router
from penstock.types import EngineInfo, EngineStats, Request, SamplingParams, TokenDelta

INFO = EngineInfo("m", "cpu", "float32", 4096, 1024, 64, 16, 33, 9, 10**11, 10**12)


def next_token(tokens: Sequence[int]) -> int:
    """A model whose tokens depend on all tokens before them."""
    return (sum(tokens) * 31 + len(tokens)) % 997


def whole_reply(request: Request) -> list[int]:
    tokens = list(request.token_ids)
    assert request.sampling.max_tokens is not None
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(request.token_ids) :]


class FakeEngine:
    """A simulated EngineClient for the fleet. It advances when a test calls `step`."""

    def __init__(self, failure: PenstockError | None = None, max_model_len: int = 4096) -> None:
        self.info: EngineInfo | None = None
        self.failure = failure
        self.phase = Phase("starting")
        self.num_unanswered_pings = 0
        self.step_s = 0.0
        self.is_hung = False
        self.rows: dict[str, tuple[Request, Receiver, list[int]]] = {}
        self.is_full = False  # requests to it wait
        self.is_own_fault = False
        self.asked: list[Request] = []
        self.max_model_len = max_model_len
        self._dead = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self.info is not None and self.failure is None

    async def wait_ready(self) -> EngineInfo:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.info = EngineInfo("m", "cpu", "float32", self.max_model_len, 1024, 64, 16, 33, 9, 1, 1)
        return self.info

    async def wait_dead(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._dead.wait(), timeout_s)
        return self._dead.is_set()

    def submit(self, receivers: Sequence[tuple[Request, Receiver]]) -> None:
        assert self.is_ready
        for request, receiver in receivers:
            assert request.id not in self.rows
            self.asked.append(request)
            self.rows[request.id] = (request, receiver, list(request.token_ids))
            if not self.is_full:
                receiver.take(TokenDelta(request.id))

    def abort(self, request_id: str) -> None:
        self.rows.pop(request_id, None)

    def ping(self) -> None:
        """Answers a little later, if the event loop of the server runs."""
        self.num_unanswered_pings += 1
        if not self.is_hung:
            asyncio.get_running_loop().call_later(0.05, self._answer)

    def _answer(self) -> None:
        self.num_unanswered_pings = 0

    async def stats(self) -> EngineStats:
        return EngineStats(0, len(self.rows), 3, 4, 5, 6, 7, {"hit": 1})

    async def num_cached_tokens(self, digests: PageDigests, num_tokens: int) -> int:
        if self.is_hung:
            await asyncio.sleep(60.0)
        return sum(one.token_ids[:16] == tuple(range(16)) for one in self.asked) * 16

    def step(self, num_cached_tokens: int = 0) -> None:
        """Sends one token to every request."""
        for id, (request, receiver, tokens) in list(self.rows.items()):
            if id not in self.rows:  # aborted by the one before
                continue
            tokens.append(next_token(tokens))
            assert request.sampling.max_tokens is not None
            is_last = len(tokens) - request.num_prompt_tokens == request.sampling.max_tokens
            if is_last:
                del self.rows[id]
            finish: Any = "length" if is_last else None
            receiver.take(TokenDelta(id, (tokens[-1],), (), finish, num_cached_tokens))

    def kill(self, reason: PenstockError, is_own_fault: bool = False) -> None:
        if self.failure is None:
            self.failure, self.is_own_fault = reason, is_own_fault
        self._dead.set()
        rows, self.rows = self.rows, {}
        for _, receiver, _ in rows.values():
            receiver.fail(EngineDeadError("The engine is not running"))

    async def close(self, grace_s: float = 0.0) -> None:
        self.kill(EngineDeadError("The server is shutting down"))


class Reader:
    """Receives one reply; with `raises`, it fails at its third token."""

    def __init__(self, raises: bool = False) -> None:
        self.token_ids: list[int] = []
        self.num_cached: set[int] = set()
        self.num_scored = 0
        self.finish: str | None = None
        self.error: Exception | None = None
        self._raises = raises

    def take(self, delta: TokenDelta) -> None:
        assert self.finish is None
        assert self.error is None
        self.token_ids += delta.token_ids
        self.num_cached.add(delta.num_cached_tokens)
        self.num_scored += len(delta.prompt_scores or ())
        self.finish = delta.finish
        if self._raises and len(self.token_ids) == 3:
            raise ZeroDivisionError

    def fail(self, error: Exception) -> None:
        assert self.finish is None
        assert self.error is None
        self.error = error


class World:
    """A fleet, and every engine that was ever started, by place."""

    def __init__(self, num_engines: int, **settings: Any) -> None:
        self.engines: list[list[FakeEngine]] = [[] for _ in range(num_engines)]
        self.next_failure: Exception | None = None  # ours: of an engine; others: of its launch
        self.next_is_full = False  # for the next engine
        launches = [self._launch_at(index) for index in range(num_engines)]
        self.fleet = Fleet(launches, ServeConfig(**settings), lambda _: None)  # type: ignore[arg-type]

    def _launch_at(self, index: int) -> Callable[[OnPhase], Awaitable[FakeEngine]]:
        async def launch(on_phase: OnPhase) -> FakeEngine:
            failure, self.next_failure = self.next_failure, None
            if not isinstance(failure, PenstockError | None):
                raise failure
            self.engines[index].append(FakeEngine(failure, max_model_len=4096 - index))
            self.engines[index][-1].is_full = self.next_is_full
            return self.engines[index][-1]

        return launch

    @property
    def current(self) -> list[FakeEngine]:
        return [lives[-1] for lives in self.engines]

    @property
    def alive(self) -> list[FakeEngine]:
        return [engine for engine in self.current if engine.is_ready]

    def submit(self, request: Request, raises: bool = False) -> Reader:
        reader = Reader(raises)
        self.fleet.submit([(request, reader)])
        return reader

    def finish(self) -> None:
        """Steps until every reply is complete."""
        for _ in range(1000):
            for engine in self.alive:
                engine.step()

    def assert_nothing_left(self) -> None:
        assert self.fleet.num_outstanding == 0
        assert all(not engine.rows for engine in self.alive)
        for load in self.fleet._router.loads:
            assert (load.num_requests, load.num_prompt_tokens) == (0, 0)


@contextlib.asynccontextmanager
async def world_of(num_engines: int, **settings: Any) -> AsyncIterator[World]:
    world = World(num_engines, **settings)
    await world.fleet.wait_ready()
    try:
        yield world
    finally:
        await world.fleet.close()


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "FIRST_DELAY_S", 0.0)


def ask(
    id: str, token_ids: Sequence[int] = (1, 2, 3), max_tokens: int = 10, **sampling: Any
) -> Request:
    return Request(
        id=id,
        token_ids=tuple(token_ids),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        page_digests=PageDigests.of(token_ids, 32),
    )


async def settle() -> None:
    """Runs the event loop until no task can continue."""
    for _ in range(20):
        await asyncio.sleep(0)


DEATH = EngineDeadError("killed")


@pytest.mark.parametrize("seed", range(30))
def test_whatever_dies_whenever_every_reply_is_what_it_would_have_been(seed: int) -> None:
    """Steps, deaths, aborts, restarts and new requests in any order; at times all engines are
    dead.
    """
    chance = random.Random(seed)

    async def scenario() -> None:
        async with world_of(chance.choice((1, 2, 4))) as world:
            readers: dict[str, tuple[Request, Reader]] = {}
            aborted: set[str] = set()
            for number in range(300):
                action = chance.random()
                if action < 0.2:
                    request = ask(
                        f"r{number}", range(chance.randrange(1, 200)), chance.randrange(1, 40)
                    )
                    readers[request.id] = request, world.submit(request)
                elif action < 0.24 and world.alive:
                    chance.choice(world.alive).kill(DEATH, is_own_fault=chance.random() < 0.2)
                elif action < 0.28 and readers:
                    id = chance.choice(list(readers))
                    world.fleet.abort(id)
                    if readers[id][1].finish is None:
                        aborted.add(id)
                elif action < 0.3:
                    await settle()
                elif world.alive:
                    chance.choice(world.alive).step(num_cached_tokens=number)
            await settle()
            world.finish()
            for id, (request, reader) in readers.items():
                reply = whole_reply(request)
                if id in aborted:
                    assert reader.token_ids == reply[: len(reader.token_ids)]
                elif reader.error is None:
                    assert (reader.token_ids, reader.finish) == (reply, "length")
                    assert len(reader.num_cached) == 1
            failed = [reader for _, reader in readers.values() if reader.error is not None]
            assert (
                len(failed) <= len(readers) // 20
            )  # those that four engines in a row did not survive
            world.assert_nothing_left()

    asyncio.run(scenario())


def test_a_request_goes_to_the_least_loaded_engine_and_equals_take_turns() -> None:
    async def scenario() -> None:
        async with world_of(3) as world:
            for number in range(9):
                world.submit(ask(f"r{number}"))
            assert [len(engine.rows) for engine in world.current] == [3, 3, 3]
            for id in ("r0", "r3"):
                world.fleet.abort(id)
            for number in range(9, 11):
                world.submit(ask(f"r{number}"))
            assert [len(engine.rows) for engine in world.current] == [3, 3, 3]
            world.finish()
            world.assert_nothing_left()
            before = [len(engine.asked) for engine in world.current]
            for number in range(6):
                world.submit(ask(f"one after the other {number}"))
                world.finish()
            assert [len(engine.asked) - n for engine, n in zip(world.current, before)] == [2, 2, 2]

    asyncio.run(scenario())


def test_a_long_prompt_keeps_others_away_until_its_first_token() -> None:
    router = Router(2)
    busy, _ = router.pick(ask("long", range(10 * ROW_TOKENS)), (0, 1))
    router.loads[busy].num_requests += 1
    router.loads[busy].num_prompt_tokens += 10 * ROW_TOKENS
    for _ in range(5):
        other, _ = router.pick(ask("short", (1,)), (0, 1))
        assert other != busy
        router.loads[other].num_requests += 1
    router.loads[busy].num_prompt_tokens = 0
    assert router.pick(ask("short", (1,)), (0, 1))[0] == busy


def test_a_conversation_returns_to_the_engine_that_knows_it_unless_others_have_much_less_to_do() -> (
    None
):
    def asked(*token_ids: int) -> Request:
        return ask("r", token_ids)

    router = Router(3)
    history = tuple(range(4 * ROW_TOKENS))
    home, num_due = router.pick(asked(*history), (0, 1, 2))
    assert num_due == len(history)
    others = [engine for engine in range(3) if engine != home]
    most_busy = AFFINITY * len(history) // ROW_TOKENS
    router.loads[home].num_requests = most_busy - 1
    engine, num_due = router.pick(asked(*history, 7, 8, 9), (0, 1, 2))
    assert (engine, num_due) == (home, 3)
    router.loads[home].num_requests = most_busy + 1
    assert router.pick(asked(*history, 5), (0, 1, 2))[0] in others
    elsewhere = asked(9, *history)  # the same tokens, but one later
    assert router.pick(elsewhere, others)[1] == len(history) + 1


def picks_of(policy: str) -> list[int]:
    """Three engines: the first has two requests, the second one with a long prompt, the third two
    and the beginning of the new prompt.
    """
    router = Router(3, policy)
    history = tuple(range(8 * ROW_TOKENS))
    assert router.pick(ask("known", history), (2,)) == (2, len(history))
    for load, (num_requests, num_tokens) in zip(
        router.loads, [(2, 0), (1, 6 * ROW_TOKENS), (3, 0)]
    ):
        load.num_requests, load.num_prompt_tokens = num_requests, num_tokens
    return [router.pick(ask("r", (*history, 7)), (0, 1, 2))[0] for _ in range(4)]


@pytest.mark.parametrize(
    ("policy", "picks"),
    [("prefix", [2, 2, 2, 2]), ("least-pending", [1, 1, 1, 1]), ("round-robin", [0, 1, 2, 0])],
)
def test_the_routing_policy_decides_what_counts(policy: str, picks: list[int]) -> None:
    assert picks_of(policy) == picks


def test_the_fleet_routes_by_its_setting() -> None:
    async def scenario(policy: str) -> list[int]:
        async with world_of(2, routing=policy) as world:
            world.submit(ask("long", range(10 * ROW_TOKENS)))
            for number in range(3):
                world.submit(ask(f"short {number}"))
            num_asked = [len(engine.asked) for engine in world.current]
            world.finish()
            return sorted(num_asked)

    assert asyncio.run(scenario("prefix")) == [1, 3]
    for policy in ("least-pending", "round-robin"):
        assert asyncio.run(scenario(policy)) == [2, 2]


def test_a_session_returns_to_its_engine_unless_others_have_less_to_do() -> None:
    router = Router(2)

    def pick(first_token: int) -> int:
        """Prompts that share no page: only the session identifies the engine of the last one."""
        return router.pick(replace(ask("r", (first_token,)), session_id="one"), (0, 1))[0]

    home = pick(0)
    assert [pick(n) for n in range(1, 4)] == [home] * 3
    router.loads[home].num_requests = 1
    assert pick(4) != home
    router.loads[home].num_requests = 0
    assert pick(5) != home, "it has moved"
    router.forget(1 - home)
    router.pick(ask("other", (9,)), (1 - home,))
    assert pick(6) == home, "of equals, the one that waited longest"


def test_an_engine_that_comes_back_is_not_believed_to_know_anything() -> None:
    async def scenario() -> None:
        async with world_of(2) as world:
            history = range(1000)
            world.submit(ask("first", history))
            home = next(place for place, engine in enumerate(world.current) if engine.rows)
            world.current[home].kill(DEATH)
            await settle()
            world.finish()
            world.submit(ask("second", history))
            assert [
                len(engine.rows) for engine in (world.current[home], world.current[1 - home])
            ] == [0, 1]

    asyncio.run(scenario())


def test_draining_lasts_until_the_last_reply_has_ended_or_its_time_is_over() -> None:
    async def scenario() -> None:
        async with world_of(2, drain_timeout=0.3) as world:
            await asyncio.wait_for(world.fleet.drain(), 0.1)
            world.submit(ask("r"))
            draining = asyncio.create_task(world.fleet.drain())
            await asyncio.sleep(0.05)
            assert not draining.done()
            world.finish()
            await asyncio.wait_for(draining, 0.1)
            world.submit(ask("endless", max_tokens=10**6))
            await asyncio.wait_for(world.fleet.drain(), 1.0)
            assert world.fleet.num_outstanding == 1

    asyncio.run(scenario())


def test_what_is_known_of_caches_is_bounded_and_the_latest() -> None:
    def pages_from(first: int, num_tokens: int = 4 * 64) -> list[bytes]:
        return PageDigests.of(range(first, first + num_tokens), 64).split()

    prefixes = PrefixMap(max_pages=100)
    for number in range(50):
        prefixes.add(pages_from(number), engine=number % 3)
    assert len(prefixes) == 100
    latest = pages_from(49, 4 * 64 + 10)
    assert prefixes.num_known_pages(latest, 49 % 3) == 4
    assert prefixes.num_known_pages(latest, 48 % 3) == 0
    assert prefixes.num_known_pages(pages_from(0), 0) == 0


def test_a_stream_that_makes_progress_may_lose_any_number_of_engines() -> None:
    async def scenario() -> None:
        async with world_of(2) as world:
            request = ask("r", max_tokens=40)
            reader = world.submit(request)
            for _ in range(3 * MAX_BLAME):
                engine = next(engine for engine in world.alive if engine.rows)
                engine.step()
                engine.kill(DEATH)
                await settle()
            world.finish()
            assert reader.token_ids == whole_reply(request)
            assert world.fleet.num_moves == 3 * MAX_BLAME

    asyncio.run(scenario())


def test_streams_are_resumed_before_requests_that_have_not_begun() -> None:
    async def scenario() -> None:
        async with world_of(1) as world:
            world.submit(ask("begun"))
            world.current[0].step()
            world.submit(ask("new"))
            world.current[0].kill(DEATH)
            await settle()
            first, second = world.current[0].asked
            assert (first.id, second.id) == ("begun", "new")
            assert first.priority < second.priority

    asyncio.run(scenario())


def test_a_request_that_waits_for_an_engine_waits_only_so_long_and_leaves_nothing() -> None:
    async def scenario() -> None:
        async with world_of(1, resume_timeout=0.1) as world:
            patient, leaving = world.submit(ask("patient")), world.submit(ask("leaving"))
            world.next_failure = CapacityError("no memory")
            world.current[0].kill(DEATH)
            for replica in world.fleet._replicas:
                replica._num_short_lives = 20  # the next start is far away
            world.fleet.abort("leaving")
            assert (world.fleet.info, world.fleet.phase.name) == (None, "starting")
            world.fleet.require_ready()
            started = time.monotonic()
            while patient.error is None:
                await asyncio.sleep(0.01)
                assert time.monotonic() - started < 2.0
            assert isinstance(patient.error, EngineDeadError)
            assert leaving.error is None
            assert world.fleet.num_outstanding == 0
            world.submit(ask("new"))  # waits, as they did
            assert world.fleet.num_outstanding == 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_module, "FIRST_DELAY_S", 0.1)
        asyncio.run(scenario())


def test_a_hung_engine_is_killed_in_time_and_its_replies_go_on_elsewhere() -> None:
    async def scenario() -> None:
        async with world_of(2, hang_timeout=0.5) as world:
            request = ask("r")
            reader = world.submit(request)
            hung = next(engine for engine in world.current if engine.rows)
            hung.step()
            hung.is_hung = True
            started = time.monotonic()
            while hung.failure is None:
                await asyncio.sleep(0.01)
                assert time.monotonic() - started < 1.2
            assert hung.rows == {}
            world.finish()
            assert reader.token_ids == whole_reply(request)
            assert "not answered" in hung.failure.why

    asyncio.run(scenario())


@pytest.mark.parametrize("num_turns", range(8))
def test_an_engine_that_dies_while_the_fleet_closes_is_not_replaced(num_turns: int) -> None:
    """The engine dies at each await of its supervisor: Python 3.11 may lose a cancellation."""

    async def scenario() -> None:
        world = World(1)
        await world.fleet.wait_ready()
        world.current[0].kill(DEATH)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        closing = asyncio.create_task(world.fleet.close())
        done, _ = await asyncio.wait({closing}, timeout=5.0)
        assert done, "it waits for a supervisor that goes on"
        num_started = len(world.engines[0])
        await settle()
        assert len(world.engines[0]) == num_started
        assert not world.alive

    asyncio.run(scenario())


def test_an_engine_is_not_blamed_for_silence_while_the_server_itself_was_held_up() -> None:
    async def scenario() -> None:
        async with world_of(1, hang_timeout=0.5) as world:
            engine = world.current[0]
            await asyncio.sleep(0.3)
            time.sleep(1.5)
            await asyncio.sleep(0.6)
            assert engine.failure is None
            engine.step_s = 61.0
            await asyncio.sleep(0.3)
            assert engine.failure is not None

    asyncio.run(scenario())


def test_a_rolling_restart_replaces_every_engine_while_others_serve_and_loses_nothing() -> None:
    async def scenario() -> None:
        async with world_of(3, drain_timeout=0.1) as world:
            before = world.current
            requests = [ask(f"r{n}", max_tokens=60) for n in range(9)]
            readers = [world.submit(request) for request in requests]
            restarting = asyncio.create_task(world.fleet.restart())
            again = asyncio.create_task(world.fleet.restart())
            while not restarting.done():
                assert len([r for r in world.fleet._replicas if r.state == "ready"]) >= 2
                for engine in world.alive:
                    engine.step()
                await asyncio.sleep(0.01)
            await again
            assert not set(before) & set(world.current)
            assert [len(lives) for lives in world.engines] == [2, 2, 2]
            world.finish()
            for request, reader in zip(requests, readers):
                assert (reader.token_ids, reader.error) == (whole_reply(request), None)
            world.assert_nothing_left()

    asyncio.run(scenario())


@pytest.mark.parametrize(("num_engines", "num_restarts"), [(2 * MAX_BLAME, 3), (1, MAX_BLAME + 2)])
def test_a_rolling_restart_never_gives_a_request_up_however_often_it_moves(
    num_engines: int, num_restarts: int
) -> None:
    async def scenario() -> None:
        async with world_of(num_engines, drain_timeout=0.01) as world:
            reader = world.submit(ask("r"))
            for _ in range(num_restarts):  # without a single token
                await world.fleet.restart()
            assert world.fleet.num_moves > MAX_BLAME
            world.finish()
            assert (reader.finish, reader.error) == ("length", None)

    asyncio.run(scenario())


def test_an_engine_that_is_asked_to_leave_finishes_what_it_has() -> None:
    async def scenario() -> None:
        async with world_of(2) as world:
            reader = world.submit(ask("r", max_tokens=3))
            home = next(engine for engine in world.current if engine.rows)
            restarting = asyncio.create_task(world.fleet.restart())
            await settle()
            for _ in range(3):
                assert home.failure is None
                home.step()
            await restarting
            assert reader.finish == "length"
            assert world.fleet.num_moves == 0

    asyncio.run(scenario())


def test_the_only_engine_is_replaced_without_a_request_refused_or_lost() -> None:
    async def scenario() -> None:
        async with world_of(1, drain_timeout=0.1) as world:
            old, requests, readers = world.current[0], [], []

            def take_another() -> None:
                world.fleet.require_ready()
                requests.append(ask(f"r{len(requests)}", max_tokens=60))
                readers.append(world.submit(requests[-1]))

            take_another()
            restarting = asyncio.create_task(world.fleet.restart())
            await settle()
            take_another()
            assert len(old.rows) == 2  # it has not gone yet
            assert world.fleet.info is not None
            old.step()
            while old.failure is None:
                await asyncio.sleep(0)
            assert (world.fleet.info, world.fleet.phase.name) == (None, "starting")
            take_another()
            await restarting
            assert len(world.engines[0]) == 2
            world.finish()
            for request, reader in zip(requests, readers):
                assert (reader.token_ids, reader.error) == (whole_reply(request), None)
            world.assert_nothing_left()

    asyncio.run(asyncio.wait_for(scenario(), 10.0))


@pytest.mark.parametrize("failure", [CapacityError("no memory"), OSError("no memory")])
def test_an_engine_that_cannot_start_ends_the_fleet_at_first_and_is_tried_again_later(
    failure: Exception,
) -> None:
    is_known = isinstance(failure, PenstockError)
    problem = "no memory" if is_known else "The engine process could not be started"

    async def scenario() -> None:
        world = World(2)
        world.next_failure = failure
        await world.fleet.wait_launched()
        with pytest.raises(CapacityError if is_known else EngineDeadError, match="no memory"):
            await world.fleet.wait_ready()
        await world.fleet.close()

        async with world_of(2) as world:
            world.next_failure = failure
            world.current[0].kill(DEATH)
            await settle()
            assert world.current[0].is_ready
            first, second = await world.fleet.report()
            assert (first.restarts, first.problem, first.state) == (2, problem, "ready")
            assert (second.restarts, second.problem) == (0, None)
            total = sum_stats([first, second])
            assert total is not None
            assert (total.num_pages, total.prefix) == (8, {"hit": 2})

    asyncio.run(asyncio.wait_for(scenario(), 10.0))


def test_a_draft_is_compared_with_the_engine_that_has_the_most_of_it() -> None:
    digests = PageDigests.of(range(40), 16)

    async def scenario() -> None:
        async with world_of(2) as world:
            assert await world.fleet.num_cached_tokens(digests, 40) == 0
            world.submit(replace(ask("r"), token_ids=tuple(range(40))))
            (engine,) = [one for one in world.current if one.asked]
            assert await world.fleet.num_cached_tokens(digests, 40) == 16
            engine.is_hung = True  # the others are not waited for any longer
            assert await world.fleet.num_cached_tokens(digests, 40) == 0

    asyncio.run(asyncio.wait_for(scenario(), 10.0))


def test_a_reply_that_goes_on_keeps_its_place_and_its_engine_however_full_the_queue_is() -> None:
    """For example, after a closed thought: the next request resumes it before its row is reused."""

    async def scenario() -> None:
        async with world_of(2, max_queue=4) as world:
            for number in range(4):
                world.submit(replace(ask(f"r{number}"), tenant="ann"))
            world.submit(
                replace(ask("other"), tenant="ben")
            )  # within its share: now there are five
            (engine,) = [one for one in world.current if "r1" in one.rows]
            rest = replace(ask("r1-answer"), tenant="ann")
            seen_at_abort: list[set[str]] = []
            abort = engine.abort

            def watched(request_id: str) -> None:
                seen_at_abort.append(set(engine.rows))
                abort(request_id)

            engine.abort = watched  # type: ignore[method-assign]
            world.fleet._in_flight["r1"].num_faults = 5
            world.fleet.go_on("r1", rest, Reader())
            assert world.fleet._in_flight["r1-answer"].num_faults == 5, (
                "engines it has cost are not forgotten"
            )
            assert [{"r1", "r1-answer"} <= rows for rows in seen_at_abort] == [True]
            assert "r1" not in engine.rows
            assert world.fleet.num_outstanding == 5
            with pytest.raises(OverloadedError):
                world.submit(replace(ask("new"), tenant="ann"))

    asyncio.run(scenario())


def test_a_resumed_request_that_loses_its_engine_counts_all_its_tokens() -> None:
    request = Request(id="r", token_ids=(1, 2, 3, 4), num_resumed_tokens=2)
    again = resumed(request, [5])
    assert (again.token_ids, again.num_prompt_tokens) == ((1, 2, 3, 4, 5), 2)


def test_the_queue_is_shared_by_tenants_when_it_is_full() -> None:
    places = QueueShares(8, "requests are here")
    places.reserve("ann", 8)  # alone it may have all
    with pytest.raises(OverloadedError, match="full"):
        places.reserve("ann")
    places.reserve("ben", 4)  # half of them is its share
    with pytest.raises(OverloadedError) as error:
        places.require("ben")
    assert "4 of them use this API key, one of 2" in error.value.why
    places.require("cleo", 2)
    places.release("ann", 5)
    places.require("ann")  # there is a place for any tenant again
    with pytest.raises(OverloadedError):
        places.require("ben", 2)
    places.release("ann", 3)
    places.release("ben", 4)
    assert places.num_taken == 0
    places.require("ben", 8)


def test_a_floor_that_would_refuse_requests_without_a_priority_is_refused_itself() -> None:
    assert ServeConfig(min_priority=-5).min_priority == -5
    with pytest.raises(ConfigError, match="min_priority is 1"):
        ServeConfig(min_priority=1)


def test_the_queue_is_bounded_for_all_engines_together_and_the_tightest_context_holds() -> None:
    async def scenario() -> None:
        async with world_of(2, max_queue=4) as world:
            assert world.fleet.require_ready().max_model_len == 4095
            for number in range(4):
                world.submit(ask(f"r{number}"))
            for refuse in (
                lambda: world.fleet.intake.reserve(""),
                lambda: world.submit(ask("one too many")),
            ):
                with pytest.raises(OverloadedError):
                    refuse()
            world.fleet.abort("r0")
            with pytest.raises(OverloadedError):
                world.fleet.submit([(ask("a"), Reader()), (ask("b"), Reader())])
            assert world.fleet.num_outstanding == 3
            world.fleet.intake.reserve("").release()

    asyncio.run(scenario())


def test_a_place_is_held_from_a_requests_head_to_the_end_of_its_last_reply() -> None:
    async def scenario() -> None:
        async with world_of(2, max_queue=4) as world:
            intake = world.fleet.intake
            place = intake.reserve("")
            place.add_bytes(1000)
            place.resize(3)
            with pytest.raises(OverloadedError):
                intake.reserve("other").resize(3)  # more than its half
            world.fleet.submit([(ask(name), Reader()) for name in "abc"], place)
            assert intake.bodies.num_bytes == 0
            place.release()  # at the end of its answer, or before
            assert intake.replies.taken == {"": 3, "other": 1}
            for num_left, name in zip((2, 1, 0), "abc"):
                world.fleet.abort(name)
                world.fleet.abort(name)
                assert intake.replies.taken[""] == num_left
            assert dict(intake.replies.taken) == {"other": 1}

    asyncio.run(scenario())


def test_engines_never_draw_alike_and_a_given_seed_is_kept() -> None:
    async def scenario() -> None:
        async with world_of(2) as world:
            for number in range(2):
                world.submit(ask(f"free{number}", temperature=1.0))
            world.submit(ask("given", temperature=1.0, seed=7))
            world.submit(ask("greedy"))
            asked = {r.id: r.sampling.seed for engine in world.current for r in engine.asked}
            assert asked["free0"] != asked["free1"]
            assert None not in (asked["free0"], asked["free1"])
            assert (asked["given"], asked["greedy"]) == (7, None)

    asyncio.run(scenario())


def test_what_comes_after_a_closed_thought_is_drawn_with_the_seed_of_its_reply() -> None:
    """So another engine that resumes the reply, before or after that point, draws the same."""

    async def scenario() -> None:
        async with world_of(1) as world:
            free = ask("free", temperature=1.0)
            world.submit(free)
            answer = replace(free, id="free-answer", num_resumed_tokens=1)
            world.fleet.go_on("free", answer, Reader())
            world.fleet.go_on("free-answer", ask("other", temperature=1.0), Reader())
            seeds = [request.sampling.seed for request in world.current[0].asked]
            assert None not in seeds
            assert seeds[0] == seeds[1] != seeds[2]

    asyncio.run(scenario())


def test_a_server_with_a_sampling_seed_gives_the_same_seeds_again() -> None:
    async def seeds(**settings: Any) -> list[int | None]:
        async with world_of(1, **settings) as world:
            for number in range(3):
                world.submit(ask(f"free{number}", temperature=1.0))
            return [r.sampling.seed for engine in world.current for r in engine.asked]

    first, again = (asyncio.run(seeds(sampling_seed=5)) for _ in range(2))
    assert first == again
    assert len(set(first)) == 3
    assert asyncio.run(seeds(sampling_seed=6)) != first
    assert asyncio.run(seeds()) != asyncio.run(seeds())


@pytest.mark.parametrize(
    ("engine", "serve", "environ", "num_gpus", "expected"),
    [
        ({}, {}, {}, 4, [{}]),
        (
            {},
            {"gpus": (2, 0)},
            {},
            4,
            [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "0"}],
        ),
        ({}, {"gpus": (1,)}, {"CUDA_VISIBLE_DEVICES": "4,6"}, 8, [{"CUDA_VISIBLE_DEVICES": "6"}]),
        (
            {},
            {"replicas": 2},
            {},
            8,
            [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}],
        ),
        (
            {"tp": 2},
            {"gpus": (0, 1, 3, 2)},
            {},
            4,
            [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "3,2"}],
        ),
        (
            {"tp": 4},
            {"replicas": 2},
            {},
            8,
            [{"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}],
        ),
        ({"tp": 4}, {}, {}, 4, [{}]),
        ({}, {"replicas": 2}, {"OMP_NUM_THREADS": "3"}, 0, [{}, {}]),
        ({"device": "cpu"}, {"replicas": 2}, {"OMP_NUM_THREADS": "3"}, 8, [{}, {}]),
    ],
)
def test_every_engine_has_a_gpu_of_its_own_or_its_share_of_the_cores(
    engine: dict[str, Any],
    serve: dict[str, Any],
    environ: dict[str, str],
    num_gpus: int,
    expected: list[dict[str, str]],
) -> None:
    config, places = place_engines(EngineConfig(**engine), ServeConfig(**serve), environ, num_gpus)
    assert places == expected
    on_gpus = any("CUDA_VISIBLE_DEVICES" in place for place in places)
    assert config.device == ("cuda" if on_gpus else EngineConfig(**engine).device)


@pytest.mark.parametrize(
    ("engine", "serve"),
    [
        ({}, {"gpus": (0, 4)}),
        ({}, {"gpus": (1, 1)}),
        ({}, {"replicas": 5}),
        ({"tp": 2}, {"replicas": 3}),
        ({"tp": 2}, {"gpus": (0, 1, 2)}),
        ({}, {"replicas": 3, "gpus": (0, 1)}),
        ({"device": "cpu"}, {"gpus": (0,)}),
        ({"device": "cuda:1"}, {"replicas": 2}),
    ],
)
def test_gpus_that_cannot_be_given_out_are_refused(
    engine: dict[str, Any], serve: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        place_engines(EngineConfig(**engine), ServeConfig(**serve), {}, num_gpus=4)
    assert "1 engines" not in refusal.value.what


def test_a_receiver_that_breaks_ends_alone() -> None:
    """The client of a real engine catches exceptions of receivers; this tests the fleet's part."""

    async def scenario() -> None:
        async with world_of(1) as world:
            broken, good = world.submit(ask("broken"), raises=True), world.submit(ask("good"))
            _, inflight, _ = world.current[0].rows["broken"]
            for _ in range(2):
                world.current[0].step()
            with pytest.raises(ZeroDivisionError):
                world.current[0].step()
            world.current[0].abort("broken")
            inflight.fail(ZeroDivisionError())
            assert isinstance(broken.error, ZeroDivisionError)
            world.finish()
            assert good.finish == "length"
            world.assert_nothing_left()

    asyncio.run(scenario())
