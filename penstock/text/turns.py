"""Decides which work runs next: limits how much runs at once, prefers cheap work, and lets none
wait for ever.

Work is due when it arrives, plus a time that grows with its cost; the earliest due runs first. So
cheap work overtakes expensive work, but only if it arrives within that time. Expensive work never
takes the last slot: a cheap request does not wait for an expensive one to end. For threads and for
coroutines. Knows nothing about the work itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

CHEAP = 64 * 1024  # bytes: rendered and tokenised in about 20 ms
SECONDS_PER_BYTE = 0.5e-6  # how much later expensive work is due


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(order=True, slots=True)
class _Turn:
    due_at: float
    number: int
    is_cheap: bool = field(compare=False)
    granted: Future[None] = field(compare=False, default_factory=Future)


class Turns:
    """A cost is the size of a request's body or of a task, in bytes."""

    def __init__(self, max_at_once: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_at_once = max_at_once
        self._max_expensive = max(1, max_at_once - 1)
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # Heaps, by whether their turns are cheap.
        self._waiting: dict[bool, list[_Turn]] = {True: [], False: []}
        self._num_taken = {True: 0, False: 0}

    @contextlib.contextmanager
    def wait(self, cost: int) -> Iterator[None]:
        """For threads: returns when it is this thread's turn, which ends with the block."""
        turn = self._ask(cost)
        try:
            turn.granted.result()
            yield
        finally:
            self._leave(turn)

    @contextlib.asynccontextmanager
    async def wait_async(self, cost: int) -> AsyncIterator[None]:
        turn = self._ask(cost)
        try:
            if not turn.granted.done():
                await asyncio.wrap_future(turn.granted)
            yield
        finally:
            self._leave(turn)

    def _ask(self, cost: int) -> _Turn:
        turn = _Turn(self._clock() + cost * SECONDS_PER_BYTE, next(self._numbers), cost <= CHEAP)
        with self._lock:
            heapq.heappush(self._waiting[turn.is_cheap], turn)
            self._grant()
        return turn

    def _leave(self, turn: _Turn) -> None:
        with self._lock:
            # If cancelled before it was granted, it is skipped when its turn comes.
            if not turn.granted.cancel():
                self._num_taken[turn.is_cheap] -= 1
            self._grant()

    def _grant(self) -> None:
        while sum(self._num_taken.values()) < self._max_at_once:
            turn = self._next()
            if turn is None:
                return
            heapq.heappop(self._waiting[turn.is_cheap])
            if turn.granted.set_running_or_notify_cancel():
                self._num_taken[turn.is_cheap] += 1
                turn.granted.set_result(None)

    def _next(self) -> _Turn | None:
        cheap, expensive = self._waiting[True], self._waiting[False]
        may_be_expensive = self._num_taken[False] < self._max_expensive
        heads = [*cheap[:1], *(expensive[:1] if may_be_expensive else ())]
        return min(heads, default=None)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_THREADS = 8


class Preparation:
    """Runs work that must not block the event loop in threads: templates, tokenising, grammars. A
    few threads are enough: more would only wait for the cores and for Python's lock. Work that has
    begun cannot be interrupted; if its client left, the request ends only with the work, so that
    its bytes count as long as they are in memory.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        # One more than cores: expensive requests leave a thread for cheap ones.
        self._turns = Turns(num_threads or min(num_cpus() + 1, MAX_THREADS))

    async def run(
        self,
        num_bytes: int,  # of the request: an estimate of its cost
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Result:
        async with self._turns.wait_async(num_bytes):
            working = asyncio.ensure_future(asyncio.to_thread(work, *arguments, **options))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                await asyncio.wait({working})
                working.exception()  # its client is gone
                raise
