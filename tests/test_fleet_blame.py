"""A request that kills engines: it kills few, gets an error, and all other requests continue."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import EngineDeadError, EngineLossError
from penstock.serve import replica as replica_module
from penstock.serve.client import EngineClient, Receiver
from penstock.serve.error_answers import answer_error
from penstock.serve.fleet import MAX_BLAME, MAX_FAULTS
from penstock.types import PromptScores, Request, TokenDelta
from penstock.wire import Dying, ErrorFields, FromEngine, WireError
from test_fleet import DEATH, FakeEngine, _quick_restarts, ask, settle, whole_reply, world_of

__all__ = ["_quick_restarts"]  # a fixture of every test here


@pytest.mark.parametrize(("is_own_fault", "num_engines_lost"), [(True, 2), (False, 4)])
def test_a_request_that_no_engine_survives_is_given_up_before_it_has_killed_them_all(
    is_own_fault: bool, num_engines_lost: int
) -> None:
    """If the engine itself fails, the request is given up earlier than if the process is killed."""

    async def scenario() -> None:
        async with world_of(8) as world:
            poison, victim = world.submit(ask("poison")), world.submit(ask("victim"))
            num_deaths = 0
            while poison.error is None:
                next(engine for engine in world.alive if "poison" in engine.rows).kill(
                    DEATH, is_own_fault
                )
                num_deaths += 1
            assert num_deaths == num_engines_lost
            assert isinstance(poison.error, EngineLossError)
            assert poison.error.status == 500
            world.finish()
            assert (victim.finish, victim.error) == ("length", None)
            await settle()
            world.assert_nothing_left()

    asyncio.run(scenario())


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("poison_place", [0, 3, 6])
def test_a_request_that_ends_every_engine_ends_two_and_all_others_go_on(
    num_engines: int, poison_place: int
) -> None:
    """Requests that ran beside it are retried alone, so that none is blamed twice for its crash."""

    async def scenario() -> None:
        async with world_of(num_engines) as world:
            names = [f"r{number}" for number in range(6)]
            names.insert(poison_place, "poison")
            requests = {name: ask(name, max_tokens=30) for name in names}
            readers = {}
            for name in names:
                readers[name] = world.submit(requests[name])
            num_deaths = 0
            for _ in range(200):
                for engine in world.alive:
                    if "poison" in engine.rows:
                        engine.kill(DEATH, is_own_fault=True)
                        num_deaths += 1
                    else:
                        engine.step()
                await settle()
            assert num_deaths == 2
            assert isinstance(readers.pop("poison").error, EngineLossError)
            for name, reader in readers.items():
                assert (reader.token_ids, reader.error) == (whole_reply(requests[name]), None)
            world.assert_nothing_left()

    asyncio.run(scenario())


def test_a_request_that_ends_engines_after_each_token_is_given_up_too() -> None:
    async def scenario() -> None:
        async with world_of(1) as world:
            poison = world.submit(ask("poison", max_tokens=100))
            for num_deaths in range(MAX_FAULTS):
                assert poison.error is None, num_deaths
                world.current[0].step()
                world.current[0].kill(DEATH, is_own_fault=True)
                await settle()
            assert isinstance(poison.error, EngineLossError)
            world.assert_nothing_left()

    asyncio.run(scenario())


def test_suspects_that_find_no_engine_are_given_up_together_and_may_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_module, "FIRST_DELAY_S", 10.0)

    async def scenario() -> None:
        async with world_of(1, resume_timeout=0.1) as world:
            readers = {name: world.submit(ask(name)) for name in "abcd"}
            world.current[0].kill(DEATH, is_own_fault=True)
            world.fleet.abort("a")
            world.fleet.abort("c")
            await asyncio.sleep(0.3)
            failed = [
                name
                for name, reader in readers.items()
                if isinstance(reader.error, EngineDeadError)
            ]
            assert failed == ["b", "d"]
            world.assert_nothing_left()

    asyncio.run(scenario())


def test_a_request_that_waited_in_engines_that_died_is_not_blamed_for_it() -> None:
    async def scenario() -> None:
        async with world_of(1) as world:
            request = ask("waits")
            reader = world.submit(request)
            for _ in range(MAX_BLAME):
                world.current[0].kill(DEATH, is_own_fault=True)
                world.next_is_full = True
                await settle()
            assert reader.error is None
            world.finish()
            assert reader.token_ids == whole_reply(request)

    asyncio.run(scenario())


def test_what_cannot_be_sent_to_an_engine_ends_one_request_and_the_engine_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it is submitted, and when the task that supervises the engine resubmits it."""

    async def scenario() -> None:
        async with world_of(1) as world:
            good, bad = world.submit(ask("good")), world.submit(ask("bad"))
            submit = FakeEngine.submit

            def submit_good(
                self: FakeEngine, receivers: Sequence[tuple[Request, Receiver]]
            ) -> None:
                if receivers[0][0].id.startswith("bad"):
                    raise WireError("A message between server and engine is too long")
                submit(self, receivers)

            monkeypatch.setattr(FakeEngine, "submit", submit_good)
            worse = world.submit(ask("bad at once"))
            assert isinstance(worse.error, WireError)
            world.current[0].kill(DEATH)
            await settle()
            assert isinstance(bad.error, WireError)
            world.finish()
            assert (good.finish, good.error) == ("length", None)
            world.assert_nothing_left()
            world.current[0].kill(DEATH)
            await settle()
            assert world.fleet.is_ready

    asyncio.run(scenario())


def test_scores_of_a_prompt_that_have_come_are_not_asked_for_again() -> None:
    async def scenario() -> None:
        async with world_of(1) as world:
            request = ask("r", range(100))
            reader = world.submit(request)
            for num_scored in (40, 30):
                engine = world.current[0]
                scores = PromptScores(bytes(4 * num_scored), bytes(4 * num_scored))
                engine.rows["r"][1].take(TokenDelta("r", prompt_scores=scores))
                engine.kill(DEATH)
                await settle()
            assert [one.asked[0].num_scored_tokens for one in world.engines[0]] == [0, 40, 70]
            world.finish()
            assert (reader.token_ids, reader.num_scored) == (whole_reply(request), 70)
            world.assert_nothing_left()

    asyncio.run(scenario())


class EndedProcess:
    """A process and its channel, both at their end; `words` are its last messages."""

    def __init__(self, returncode: int, words: list[FromEngine]) -> None:
        self.returncode = returncode
        self._words = words

    async def wait(self) -> int:
        return self.returncode

    async def listen(self, take: Callable[[FromEngine], None]) -> None:
        for message in self._words:
            take(message)

    def close(self) -> None:
        pass


DYING = Dying(ErrorFields("EngineDeadError", "The engine stopped: AssertionError"))


@pytest.mark.parametrize(
    ("returncode", "words", "is_own_fault"),
    [
        (1, [DYING], True),
        (1, [], True),
        (-signal.SIGSEGV, [], True),
        (-signal.SIGABRT, [], True),
        (-signal.SIGKILL, [], False),
        (-signal.SIGTERM, [], False),
    ],
)
def test_an_engine_is_at_fault_unless_it_was_killed_from_outside(
    returncode: int, words: list[FromEngine], is_own_fault: bool
) -> None:
    async def scenario() -> None:
        ended: Any = EndedProcess(returncode, words)
        client = EngineClient(ended, ended, lambda _: None)
        assert await client.wait_dead(5.0)
        assert client.is_own_fault == is_own_fault

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_an_error_in_the_apis_format_says_that_a_retry_will_not_help(path: str) -> None:
    scope = {"path": path, "record": SimpleNamespace(id="r")}
    answer = answer_error(
        scope, EngineLossError("The request is not retried", "Why.", "What to do.")
    )
    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"
    error = json.loads(bytes(answer.body))["error"]
    assert error["message"] == "The request is not retried\nWhy.\nWhat to do."
    assert error["type"] == ("api_error" if path == "/v1/messages" else "server_error")
