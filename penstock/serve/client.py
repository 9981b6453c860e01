"""The server's view of one engine process: starts it, talks to it, and notices when it dies.

Owns the process and its socket, and knows which receiver belongs to which request. Knows nothing of
text, HTTP or other engines: the fleet decides what happens to the requests of a dead one. A step's
deltas go from the wire to their receivers in plain calls: no task is woken for a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from penstock import wire
from penstock.child_python import module_command
from penstock.config import EngineConfig
from penstock.digests import PageDigests
from penstock.errors import EngineDeadError, PenstockError
from penstock.progress import OnPhase, Phase
from penstock.types import EngineInfo, EngineStats, Request, SessionInfo, TokenDelta

log = logging.getLogger("penstock.serve")

KILLED_BY = (signal.SIGKILL, signal.SIGTERM)
EXIT_GRACE_S = 5.0
EXIT_NOTICE_S = 0.5  # how long to wait for an exit code before a death is reported


class Receiver(Protocol):
    """Receives the deltas of one request. Called while the wire is being read, so it must never
    block."""

    def take(self, delta: TokenDelta) -> None:
        """Raises to end the request: it is aborted, and the error comes back through `fail`."""

    def fail(self, error: Exception) -> None:
        """No more deltas will come, because of this error."""


class EngineClient:
    """One engine process. `launch` returns when the process has connected, `wait_ready` when it can
    serve."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: wire.ServerChannel,
        on_phase: OnPhase,
        ranks_folder: str | None = None,
    ) -> None:
        self.phase = Phase("starting")
        self.info: EngineInfo | None = None
        self.failure: PenstockError | None = None  # why the engine is dead
        self.is_own_fault = False  # it failed by itself; no signal from outside killed it
        self.num_unanswered_pings = 0
        self.step_s = 0.0  # how long its current step had run at its last answer to a ping
        self._process = process
        self._ranks_folder = ranks_folder  # removed here: a killed process leaves it behind
        self._on_phase = on_phase
        self._channel = channel
        self._settled = asyncio.Event()  # ready or dead
        self._dead = asyncio.Event()
        self._receivers: dict[str, Receiver] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._query_ids = itertools.count()
        self._closing = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def launch(
        cls, config: EngineConfig, on_phase: OnPhase, environment: Mapping[str, str] | None = None
    ) -> EngineClient:
        """Starts a process; `environment`: variables in addition to our own."""
        loop = asyncio.get_running_loop()
        connected: asyncio.Future[wire.ServerChannel] = loop.create_future()
        ranks_folder = None
        try:
            if config.tp > 1:
                ranks_folder = wire.new_socket_folder(wire.RANKS_PREFIX)
            with _socket_path() as path:
                words = ["--socket", path]
                words += [] if ranks_folder is None else ["--ranks-folder", ranks_folder]
                listener = await loop.create_unix_server(
                    lambda: wire.ServerChannel(connected.set_result), path
                )
                with contextlib.closing(listener):
                    process = await _start_worker(words, config, environment or {})
                    channel = await _wait_connected(process, connected)
        except BaseException as error:
            _remove(ranks_folder)
            if not isinstance(error, OSError):
                raise
            raise EngineDeadError(
                "The engine process could not be started",
                f"{error}.",
                "If the path is the problem, set TMPDIR to an existing folder with a short path.",
            ) from error
        return cls(process, channel, on_phase, ranks_folder)

    @property
    def is_ready(self) -> bool:
        return self.info is not None and self.failure is None

    @property
    def num_outstanding(self) -> int:
        return len(self._receivers)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self) -> EngineInfo:
        """Raises the reason if the engine dies before it is ready."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure
        assert self.info is not None
        return self.info

    async def wait_dead(self, timeout_s: float) -> bool:
        """Waits for the engine's death, and returns whether it died."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._dead.wait(), timeout_s)
        return self._dead.is_set()

    def submit(self, receivers: Sequence[tuple[Request, Receiver]]) -> None:
        """Sends all requests, or none of them."""
        self.require_ready()
        for request, receiver in receivers:
            assert request.id not in self._receivers, f"request id {request.id} is in use"
            self._channel.send(wire.Submit(request))
            self._receivers[request.id] = receiver

    def abort(self, request_id: str) -> None:
        """Ends a request: its receiver gets no more deltas."""
        if self._receivers.pop(request_id, None) is not None:
            self._channel.send(wire.Abort(request_id))

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._ask(wire.StatsQuery)
        return stats

    async def sessions(self) -> list[SessionInfo]:
        sessions: list[SessionInfo] = await self._ask(wire.ListSessions)
        return sessions

    async def drop_session(self, session_id: str) -> list[SessionInfo]:
        """The dropped session, if there was one."""
        dropped: list[SessionInfo] = await self._ask(
            lambda query_id: wire.DropSession(query_id, session_id)
        )
        return dropped

    async def num_cached_tokens(self, digests: PageDigests, num_tokens: int) -> int:
        """How many tokens of such a prompt the prefix cache has now."""
        num_cached: int = await self._ask(
            lambda query_id: wire.CachedQuery(query_id, digests, num_tokens)
        )
        return num_cached

    async def _ask(self, make_query: Callable[[int], wire.ToEngine]) -> Any:
        self.require_ready()
        query_id = next(self._query_ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        try:
            self._channel.send(make_query(query_id))
            return await answer
        finally:
            del self._queries[query_id]

    def ping(self) -> None:
        """The answer sets `num_unanswered_pings` back to 0."""
        self.num_unanswered_pings += 1
        self._channel.send(wire.Ping())

    def kill(self, reason: PenstockError, is_own_fault: bool = False) -> None:
        """Ends a process that cannot be trusted to end itself. Its last messages are ignored."""
        self._die(reason, is_own_fault)
        if self._process.returncode is None:
            self._process.kill()

    async def close(self, grace_s: float = EXIT_GRACE_S) -> None:
        """Asks the process to exit and, after the grace period, kills it."""
        self._closing = True
        self._die(EngineDeadError("The server is shutting down"))
        self._channel.send(wire.Shutdown())
        await asyncio.wait({self._listening}, timeout=grace_s)
        if self._process.returncode is None:
            self._process.kill()
        await self._listening

    def require_ready(self) -> EngineInfo:
        if self.failure is not None:
            raise _dead_engine()
        if self.info is None:
            raise EngineDeadError(
                "The engine is still starting",
                f"Its phase is: {self.phase.name}.",
                "Try again when /health is 200.",
            )
        return self.info

    async def _listen(self) -> None:
        try:
            await self._channel.listen(self._take)
        except wire.WireError as error:
            self._die(error, is_own_fault=True)
        finally:
            self._channel.close()
            await self._reap()

    async def _reap(self) -> None:
        """Waits for the process to exit after its channel was closed, and kills it if it hangs."""
        ending = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({ending}, timeout=EXIT_NOTICE_S)
        returncode = self._process.returncode
        was_killed = returncode is not None and -returncode in KILLED_BY
        self._die(
            EngineDeadError(f"The engine process ended ({_describe_exit(returncode)})"),
            not was_killed,
        )
        await asyncio.wait({ending}, timeout=EXIT_GRACE_S)
        if not ending.done():
            self._process.kill()
        await ending
        _remove(self._ranks_folder)

    def _take(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Deltas(deltas):
                for delta in deltas:
                    self._hand_over(delta)
            case wire.Rejected(request_id, error):
                receiver = self._receivers.pop(request_id, None)
                if receiver is not None:
                    receiver.fail(error.to_error())
            case (
                wire.StatsAnswer(query_id, found)
                | wire.SessionsAnswer(query_id, found)
                | wire.CachedAnswer(query_id, found)
            ):
                answer = self._queries.get(query_id)
                if answer is not None and not answer.done():
                    answer.set_result(found)
            case wire.Pong(step_s):
                self.num_unanswered_pings = 0
                self.step_s = step_s
            case wire.Progress(phase):
                self.phase = phase
                self._on_phase(phase)
            case wire.Ready(info):
                self.info = info
                self._settled.set()
            case wire.Dying(error):
                self._die(error.to_error(), is_own_fault=True)

    def _hand_over(self, delta: TokenDelta) -> None:
        receiver = self._receivers.get(delta.request_id)
        if receiver is None:  # aborted while this was in transit
            return
        if delta.finish is not None:
            del self._receivers[delta.request_id]
        try:
            receiver.take(delta)
        except Exception as error:  # whatever it is, other requests continue
            self.abort(delta.request_id)
            receiver.fail(error)

    def _die(self, error: PenstockError, is_own_fault: bool = False) -> None:
        if self.failure is None:
            self.failure, self.is_own_fault = error, is_own_fault
            if self.info is not None and not self._closing:  # before that, wait_ready reports it
                log.error("%s", error)
        self._settled.set()
        self._dead.set()
        receivers = list(self._receivers.values())
        self._receivers.clear()  # so that no abort is sent
        for receiver in receivers:
            receiver.fail(_dead_engine())
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(_dead_engine())


def _dead_engine() -> EngineDeadError:
    """The error that clients get. The reason is only in /health and the log: it may contain paths
    of this machine."""
    return EngineDeadError(
        "The engine is not running", "Its process ended.", "Ask the operator of this server."
    )


@contextlib.contextmanager
def _socket_path() -> Iterator[str]:
    """Removing the socket and its folder opens no file, so it works even when file descriptors run
    out."""
    folder = wire.new_socket_folder("penstock-")
    path = os.path.join(folder, "engine.sock")
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


async def _wait_connected(
    process: asyncio.subprocess.Process, connected: asyncio.Future[wire.ServerChannel]
) -> wire.ServerChannel:
    exited = asyncio.ensure_future(process.wait())
    either: set[asyncio.Future[Any]] = {connected, exited}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if connected.done():
            return connected.result()
        raise EngineDeadError(
            f"The engine process did not start ({_describe_exit(process.returncode)})",
            "It ended before it connected.",
            "See its log.",
        )
    finally:
        exited.cancel()
        if not connected.done() and process.returncode is None:
            process.kill()


async def _start_worker(
    words: Sequence[str], config: EngineConfig, environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *module_command("penstock.engine.worker", *words),
        stdin=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,  # the terminal's Ctrl-C reaches only the server
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    return process


def _describe_exit(returncode: int | None) -> str:
    if returncode is None:
        return "still running"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"
