"""The load generator: requests in, timed replies out, at a fixed concurrency or at given times.

The load comes from separate processes (`LoadClients`), which do nothing else while they measure:
they draw no bar, parse no JSON and collect no garbage. `bench serve` and every `eval` with many
replies use it; callers make the requests and interpret the replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import uvloop

from penstock.errors import PenstockError
from penstock.eval.chat_requests import ChatRequests, Request
from penstock.eval.results import Bars
from penstock.eval.stream_client import RawAnswer, StreamedReply, Target, exchange, read_answer
from penstock.progress import Phase, timed

# Between the start signal and the first request, so that all clients begin together.
HEAD_START_S = 0.05
PROGRESS_EVERY_S = 0.25
# After this many consecutive timeouts, and at least one per concurrent request, stop sending.
MIN_HANGING = 3
GIVEN_UP = "Not sent: the requests before it hung."


@dataclass(frozen=True, slots=True)
class LoadProgress:
    num_done: int
    num_failed: int  # in transport or by timeout; other failures are found at the end
    num_pieces: int  # of answers, about one per token
    elapsed_s: float

    def in_words(self, num_requests: int) -> str:
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        rate = self.num_pieces / max(self.elapsed_s, 1e-9)
        return f"{self.num_done} of {num_requests} done{failed}, {rate:,.0f} events/s"


OnProgress = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The requests, their replies in the same order, and whether the clients kept up."""

    requests: Sequence[Request]
    replies: list[StreamedReply]
    wall_s: float = 0.0  # from the first request to the last end
    max_lag_s: float = 0.0  # the longest delay of a request behind its planned time
    client_cpu: float = 0.0  # the busiest client's share of a core
    error: PenstockError | None = None  # why nothing was sent; every reply has it too

    @classmethod
    def of_nothing_sent(cls, requests: Sequence[Request], error: PenstockError) -> LoadResult:
        now_s, message = time.monotonic(), f"{error.what}. {error.why}".strip()
        return cls(requests, [StreamedReply(now_s, now_s, message) for _ in requests], error=error)

    @property
    def pairs(self) -> list[tuple[Request, StreamedReply]]:
        return list(zip(self.requests, self.replies, strict=True))

    def only(self, is_wanted: Callable[[Request], bool]) -> LoadResult:
        """The same load with only the replies to the chosen requests."""
        kept = [(request, reply) for request, reply in self.pairs if is_wanted(request)]
        requests, replies = [request for request, _ in kept], [reply for _, reply in kept]
        return replace(self, requests=requests, replies=replies)


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a load that one client process sends."""

    target: Target
    requests: list[bytes]
    at_s: list[float]
    max_at_once: int  # 0: every request at its own time, however many run
    timeout_s: float


_PartResult = tuple[list[StreamedReply], float, float]  # replies, largest lag, share of a core


@contextlib.contextmanager
def _nothing_imported_from_here() -> Iterator[None]:
    """A spawned process runs `python -c`, which would import from the working directory first."""
    name, before = "PYTHONSAFEPATH", os.environ.get("PYTHONSAFEPATH")
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class LoadClients:
    """Client processes that wait for a load; they end with the context."""

    def __init__(self, num_clients: int = 1) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._counts = [spawning.RawArray("q", 3) for _ in range(num_clients)]
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        for counts in self._counts:
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=_serve_loads, args=(theirs, counts), daemon=True)
            with _nothing_imported_from_here():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> LoadClients:
        return self

    def __exit__(self, *error: object) -> None:
        for process, pipe in zip(self._processes, self._pipes):
            process.terminate()
            process.join()
            pipe.close()

    def measure(
        self,
        name: str,
        api: ChatRequests,
        requests: Sequence[Request],
        *,
        concurrency: int,
        bars: Bars,
        warmups: Sequence[Request] = (),
    ) -> LoadResult:
        """Warms the server up, then measures, and shows the progress of both in `bars`."""
        with bars() as phases:
            if warmups:
                with timed("warm-up", phases):
                    self.run(api, warmups, concurrency=concurrency)
            with timed(name, phases) as report:

                def show(progress: LoadProgress) -> None:
                    words = progress.in_words(len(requests))
                    report(Phase(name, words, progress.num_done / len(requests)))

                return self.run(api, requests, concurrency=concurrency, on_progress=show)

    def run(
        self,
        api: ChatRequests,
        requests: Sequence[Request],
        *,
        concurrency: int,
        on_progress: OnProgress = lambda progress: None,
    ) -> LoadResult:
        """Sends every request: `concurrency` at a time, or with 0 each at its own time.

        A request that fails becomes a reply with an error; a server cannot cause an exception.
        """
        try:
            target = Target.of(api.client.base_url, api.path)
        except PenstockError as error:
            return LoadResult.of_nothing_sent(requests, error)
        num_clients = min(len(self._pipes), len(requests), concurrency or len(requests))
        encoded = [target.encode_request(api.body(request)) for request in requests]
        times = [request.at_s for request in requests]
        for client, pipe in enumerate(self._pipes[:num_clients]):
            mine = slice(client, None, num_clients)
            places = concurrency // num_clients + (client < concurrency % num_clients)
            pipe.send(_Part(target, encoded[mine], times[mine], places, api.timeout_s))
        for client in range(num_clients):
            self._hear(client)  # waits until it has received its part
            self._counts[client][:] = [0, 0, 0]
        start_s = time.monotonic() + HEAD_START_S
        for pipe in self._pipes[:num_clients]:
            pipe.send(start_s)
        parts, lags, cpus = zip(*self._await_parts(num_clients, start_s, on_progress))
        replies: list[Any] = [None] * len(requests)
        for client, part in enumerate(parts):
            replies[client::num_clients] = part
        wall_s = max(reply.ended_s for reply in replies) - min(reply.started_s for reply in replies)
        return LoadResult(requests, replies, wall_s, max(0.0, *lags), max(cpus))

    def _await_parts(
        self, num_clients: int, start_s: float, on_progress: OnProgress
    ) -> list[_PartResult]:
        waiting: dict[Any, int] = {
            pipe: client for client, pipe in enumerate(self._pipes[:num_clients])
        }
        results: dict[int, _PartResult] = {}
        while waiting:
            for pipe in wait(list(waiting), timeout=PROGRESS_EVERY_S):
                client = waiting.pop(pipe)
                results[client] = self._hear(client)
            num_done, num_failed, num_pieces = map(sum, zip(*self._counts[:num_clients]))
            on_progress(LoadProgress(num_done, num_failed, num_pieces, time.monotonic() - start_s))
        return [results[client] for client in range(num_clients)]

    def _hear(self, client: int) -> Any:
        try:
            return self._pipes[client].recv()
        except EOFError as error:
            raise PenstockError(
                "A client process ended in the middle of a load",
                f"Its exit code is {self._processes[client].exitcode}.",
            ) from error


def _serve_loads(pipe: Connection[Any, Any], counts: Any) -> None:
    """The main loop of a client process: parts in, results out, until the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends us
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with contextlib.suppress(EOFError):
        while True:
            part: _Part = pipe.recv()
            pipe.send(None)
            pipe.send(_run_part(part, pipe.recv(), counts))


def _run_part(part: _Part, start_s: float, counts: Any) -> _PartResult:
    gc.collect()
    gc.disable()  # a collection with a million pieces would look like a gap between tokens
    cpu_s, began_s = time.process_time(), time.monotonic()
    answers = uvloop.run(_Sending(part, start_s, counts).send_all())
    cpu = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
    gc.enable()
    lags = [
        answer.started_s - start_s - at_s for answer, at_s in zip(answers, part.at_s, strict=True)
    ]
    return [read_answer(answer) for answer in answers], 0.0 if part.max_at_once else max(lags), cpu


class _Sending:
    """One part of a load while it is sent."""

    def __init__(self, part: _Part, start_s: float, counts: Any) -> None:
        self._part = part
        self._start_s = start_s
        self._counts = counts  # done, failed, pieces: shared memory that the parent reads
        self._answers: list[RawAnswer | None] = [None] * len(part.requests)
        self._num_hanging = 0  # timeouts since the last complete answer

    async def send_all(self) -> list[RawAnswer]:
        part = self._part
        numbers = iter(range(len(part.requests)))  # shared: each worker takes the next one

        async def work() -> None:
            for number in numbers:
                if (delay_s := self._start_s + part.at_s[number] - time.monotonic()) > 0:
                    await asyncio.sleep(delay_s)
                await self._send(number)

        await asyncio.gather(*(work() for _ in range(part.max_at_once or len(part.requests))))
        return [answer for answer in self._answers if answer is not None]

    async def _send(self, number: int) -> None:
        part = self._part
        if part.max_at_once and self._num_hanging >= max(MIN_HANGING, part.max_at_once):
            now_s = time.monotonic()
            answer = RawAnswer(now_s, now_s, failure=GIVEN_UP)
        else:
            answer = await exchange(
                part.target, part.requests[number], part.timeout_s, self._note_piece
            )
            self._num_hanging = self._num_hanging + 1 if answer.is_timeout else 0
        self._answers[number] = answer
        self._counts[0] += 1
        self._counts[1] += bool(answer.failure) or answer.status != 200

    def _note_piece(self) -> None:
        self._counts[2] += 1
