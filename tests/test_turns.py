"""Cheap work overtakes expensive work, without starving it or taking the last place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.text.turns import CHEAP, SECONDS_PER_BYTE, Turns

EXPENSIVE = 10 * CHEAP


class World:
    """Coroutines that wait for turns and hold them until the test ends them."""

    def __init__(self, max_at_once: int) -> None:
        self.now = 0.0
        self.turns = Turns(max_at_once, lambda: self.now)
        self.working: list[str] = []
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def ask(self, name: str, cost: int) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._work(name, cost))
        await settled()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await settled()

    async def _work(self, name: str, cost: int) -> None:
        async with self.turns.wait_async(cost):
            self.working.append(name)
            self.order.append(name)
            await self._ends[name].wait()
            self.working.remove(name)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def in_world(max_at_once: int) -> Callable[[Callable[[World], object]], None]:
    def run(scenario: Callable[[World], object]) -> None:
        async def live() -> None:
            await scenario(World(max_at_once))  # type: ignore[misc]

        asyncio.run(asyncio.wait_for(live(), 10.0))

    return run


def test_cheap_work_overtakes_expensive_work_that_waits() -> None:
    async def scenario(world: World) -> None:
        await world.ask("first", 1)
        await world.ask("large", EXPENSIVE)
        await world.ask("small", 1)
        await world.ask("larger than small", 100)
        for name in ("first", "small", "larger than small", "large"):
            await world.end(name)
        assert world.order == ["first", "small", "larger than small", "large"]

    in_world(1)(scenario)


def test_expensive_work_is_overtaken_only_for_a_time_that_grows_with_its_cost() -> None:
    async def scenario(world: World) -> None:
        await world.ask("first", 1)
        await world.ask("large", EXPENSIVE)
        world.now = EXPENSIVE * SECONDS_PER_BYTE * 0.9
        await world.ask("in time", 1)
        world.now = EXPENSIVE * SECONDS_PER_BYTE * 1.1
        await world.ask("too late", 1)
        for name in ("first", "in time", "large", "too late"):
            await world.end(name)
        assert world.order == ["first", "in time", "large", "too late"]

    in_world(1)(scenario)


def test_expensive_work_leaves_a_place_to_cheap_work() -> None:
    async def scenario(world: World) -> None:
        for number in range(4):
            await world.ask(f"large{number}", EXPENSIVE)
        assert world.working == ["large0", "large1"]
        await world.ask("small", 1)
        assert world.working == ["large0", "large1", "small"]
        await world.end("small")
        assert world.working == ["large0", "large1"]
        await world.end("large0")
        assert world.working == ["large1", "large2"]
        for number in range(1, 4):
            await world.end(f"large{number}")

    in_world(3)(scenario)


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_waiter_that_gives_up_takes_no_place(is_granted: bool) -> None:
    async def scenario(world: World) -> None:
        if not is_granted:
            await world.ask("first", 1)
        await world.ask("leaving", 1)
        await world.ask("next", 1)
        world.tasks["leaving"].cancel()
        await settled()
        if not is_granted:
            await world.end("first")
        assert world.working[-1] == "next"
        await world.end("next")
        await world.ask("last", 1)
        assert world.working[-1] == "last"
        await world.end("last")

    in_world(1)(scenario)


def test_threads_and_coroutines_share_turns() -> None:
    turns = Turns(2)
    at_once: list[int] = []
    working: set[int] = set()
    lock = threading.Lock()

    def work(number: int) -> None:
        with turns.wait(number * CHEAP // 8):
            with lock:
                working.add(number)
                at_once.append(len(working))
            with lock:
                working.remove(number)

    async def work_async(number: int) -> None:
        async with turns.wait_async(number * CHEAP // 8):
            with lock:
                working.add(number)
                at_once.append(len(working))
            await asyncio.sleep(0)
            with lock:
                working.remove(number)

    async def scenario() -> None:
        with ThreadPoolExecutor(8) as threads:
            loop = asyncio.get_running_loop()
            in_threads = [loop.run_in_executor(threads, work, number) for number in range(50)]
            await asyncio.gather(*in_threads, *(work_async(number) for number in range(50, 100)))

    asyncio.run(asyncio.wait_for(scenario(), 20.0))
    assert len(at_once) == 100
    assert max(at_once) <= 2
