"""Work that must not block the event loop: templates, tokenising, grammars. In threads, cheap work
first.

There are few threads: more would only wait for the cores and for Python's lock. turns.py decides
which waiting work starts next. Work that has begun cannot be interrupted; if its client left, the
request ends with the work, so that its bytes (intake.py) count as long as they are in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from penstock.text.turns import Turns, num_cpus

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_THREADS = 8


class Preparation:
    def __init__(self, num_threads: int | None = None) -> None:
        # One more than cores: expensive requests leave a thread to the others (turns.py).
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
