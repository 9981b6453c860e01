"""Work that must not hold up the event loop: templates, tokenising, grammars. In threads, cheap work first.

Few threads: more of them would only make each other wait for the processors and for Python. Who waits is let
in as turns.py says. Work that has begun cannot be interrupted; a request whose client has left ends with it,
so that what it holds (intake.py) is counted while it is there.
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
        # One more than processors: expensive requests leave a thread to the others (turns.py).
        self._turns = Turns(num_threads or min(num_cpus() + 1, MAX_THREADS))

    async def run(
        self,
        num_bytes: int,  # of the request: the measure of what it will cost
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
                working.exception()  # nobody is there to be told
                raise
