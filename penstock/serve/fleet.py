"""Several engines that look like one: every request finds an engine, and outlives it if it must.

Owns the replicas and the requests under way. A request whose engine dies goes on with another one: from its
prompt if it had said nothing yet, otherwise from its prompt and all it has said, which that engine computes
again; whoever receives the reply sees no seam. A request that finds no engine waits for one, for a while.
How one engine is spoken to is client.py's business, which one to choose routing.py's, and how a dead one
comes back replica.py's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from penstock.config import ServeConfig
from penstock.errors import EngineDeadError, PenstockError
from penstock.progress import OnPhase, Phase
from penstock.serve.admission import QueueShares
from penstock.serve.client import EXIT_GRACE_S, EngineClient, Receiver
from penstock.serve.replica import Launch, Replica, ReplicaReport
from penstock.serve.routing import Load, Router
from penstock.types import EngineInfo, Request, SessionInfo, TokenDelta

log = logging.getLogger("penstock.serve")

MAX_ENGINES_LOST = 3  # a request that kills engines must not kill them all
RESUMED_STEPS_EARLIER = 10  # of priority: somebody is reading already
LEAVING_POLL_S = 0.02


class Journey:
    """One request on its way through the fleet, with all that is needed to go on elsewhere."""

    __slots__ = (
        "_awaits_token",
        "_fleet",
        "_num_cached_tokens",
        "_num_tokens_due",
        "_receiver",
        "client",
        "load",
        "num_engines_lost",
        "request",
        "said",
    )

    def __init__(self, fleet: Fleet, request: Request, receiver: Receiver) -> None:
        self.request = request
        self.said: list[int] = []
        self.client: EngineClient | None = None  # None: it waits for one
        self.load: Load | None = None
        self.num_engines_lost = 0  # since its last token
        self._fleet = fleet
        self._receiver = receiver
        self._awaits_token = True  # the first from its present engine
        self._num_tokens_due = 0  # that the engine computes before that
        self._num_cached_tokens: int | None = None  # of the prompt, by the engine that spoke first

    def take(self, delta: TokenDelta) -> None:
        self.said += delta.token_ids
        if self._awaits_token:
            self._note_first_token(delta)
        if self._num_cached_tokens != delta.num_cached_tokens:  # its first engine's is what a client is told
            delta = msgspec.structs.replace(delta, num_cached_tokens=self._num_cached_tokens)
        if delta.finish is not None:
            self._fleet.forget(self)
        self._receiver.take(delta)

    def fail(self, error: Exception) -> None:
        if self.client is not None and self.client.failure is not None:
            self._fleet.outlive_engine(self)
        else:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        self._fleet.forget(self)
        self._receiver.fail(error)

    def settle(self, client: EngineClient, load: Load, num_tokens_due: int) -> None:
        self.client, self.load = client, load
        self._awaits_token = True
        self._num_tokens_due = num_tokens_due
        load.num_requests += 1
        load.num_prompt_tokens += num_tokens_due

    def leave(self) -> None:
        if self.load is not None:
            self.load.num_requests -= 1
            self.load.num_prompt_tokens -= self._num_tokens_due
        self.client, self.load, self._num_tokens_due = None, None, 0

    def _note_first_token(self, delta: TokenDelta) -> None:
        assert self.load is not None
        self.load.num_prompt_tokens -= self._num_tokens_due
        self._num_tokens_due = 0
        self._awaits_token = False
        self.num_engines_lost = 0
        if self._num_cached_tokens is None:
            self._num_cached_tokens = delta.num_cached_tokens


class Fleet:
    """Serves from the moment when every engine has come up once, and then while any of them is up."""

    def __init__(self, launches: Sequence[Launch], config: ServeConfig, on_phase: OnPhase) -> None:
        self.failure: PenstockError | None = None  # why there never will be an engine
        self._is_draining = False
        self.num_moves = 0
        self._config = config
        self._on_phase = on_phase
        self._replicas = [Replica(index, launch, config) for index, launch in enumerate(launches)]
        self._router = Router(len(launches))
        self._places = QueueShares(config.max_queue)
        self._journeys: dict[str, Journey] = {}
        self._waiting: dict[Journey, asyncio.TimerHandle] = {}
        self._infos: dict[int, EngineInfo] = {}  # of every replica that has come up, as it last did
        self._settled = asyncio.Event()  # all have come up once, or one never will
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_restarting = False
        self._keepers = [asyncio.create_task(self._keep(replica)) for replica in self._replicas]
        for keeper in self._keepers:
            keeper.add_done_callback(_log_crash)

    @property
    def num_outstanding(self) -> int:
        return len(self._journeys)

    @property
    def is_ready(self) -> bool:
        return self.info is not None and self.failure is None

    @property
    def info(self) -> EngineInfo | None:
        """None while there is no engine; of several the tightest limit holds."""
        return self._tightest_info() if self._have_all_come_up and self._available() else None

    @property
    def phase(self) -> Phase:
        """Where the replica is that everybody waits for."""
        for replica in self._replicas:
            if replica.state == "starting":
                assert replica.client is not None
                return replica.client.phase
            if replica.state == "dead":  # and what it was at has ended with it
                return Phase("starting")
        return Phase("ready")

    async def wait_launched(self) -> None:
        """Until every engine's process has begun, or one cannot."""
        for replica in self._replicas:
            await replica.has_spoken.wait()

    async def wait_ready(self) -> EngineInfo:
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure
        return next(iter(self._infos.values()))

    def require_ready(self, tenant: str = "") -> EngineInfo:
        """Raises why a new request would not be taken now. One that finds no engine for a while is."""
        if self.failure is not None or not self._have_all_come_up:
            raise EngineDeadError(
                "The engine is not running", f"It is at: {self.phase.name}.", "Try again when /health is 200."
            )
        self._places.require(tenant)
        return self._tightest_info()

    def submit(self, receivers: Sequence[tuple[Request, Receiver]]) -> None:
        """Takes all the requests, or none of them."""
        if self.failure is not None:
            raise self.failure
        if receivers:
            self._places.require(receivers[0][0].tenant, len(receivers))  # they are of one client
        for request, receiver in receivers:
            self._start(Journey(self, _with_seed(request), receiver), self._available())

    def go_on(self, request_id: str, request: Request, receiver: Receiver) -> None:
        """Goes on with another request in the place of one: in the queue, and with the same engine."""
        if self.failure is not None:
            raise self.failure
        journey = self._journeys.get(request_id)
        same = [r.index for r in self._replicas if journey is not None and r.client is journey.client]
        available = [index for index in same if index in self._available()]
        # Before the other ends: its row is free then, and this one the next to have it.
        self._start(Journey(self, _with_seed(request), receiver), available or self._available())
        self.abort(request_id)

    def _start(self, journey: Journey, available: list[int]) -> None:
        request = journey.request
        assert request.id not in self._journeys, f"request id {request.id} is in use"
        self._journeys[request.id] = journey
        self._places.take(request.tenant)
        self._idle.clear()
        self._place(journey, available)

    def abort(self, request_id: str) -> None:
        """Its receiver hears no more of it."""
        journey = self._journeys.get(request_id)
        if journey is not None:
            if journey.client is not None:
                journey.client.abort(request_id)
            self.forget(journey)

    async def report(self) -> list[ReplicaReport]:
        loads = self._router.loads
        return await asyncio.gather(*(r.report(loads[r.index].num_requests) for r in self._replicas))

    async def sessions(self) -> list[SessionInfo]:
        """Those of every engine; one that has moved is told once, as it was used last."""
        found = await asyncio.gather(*(replica.sessions() for replica in self._replicas))
        latest = sorted((info for infos in found for info in infos), key=lambda info: -info.idle_s)
        return list({info.id: info for info in latest}.values())[::-1]

    async def drop_session(self, session_id: str) -> bool:
        """Says whether there was one."""
        dropped = await asyncio.gather(*(replica.drop_session(session_id) for replica in self._replicas))
        return any(dropped)

    async def drain(self) -> None:
        """Returns when the running requests have ended or had their time."""
        self._is_draining = True
        await _wait(self._idle, self._config.drain_timeout)

    async def restart(self) -> None:
        """Replaces every engine by a new one, one after the other, so that the others serve meanwhile."""
        if self._is_restarting or self._is_draining:
            return
        self._is_restarting = True
        try:
            for replica in self._replicas:
                if replica.state == "ready":
                    await self._replace(replica)
        finally:
            self._is_restarting = False

    async def close(self, grace_s: float = EXIT_GRACE_S) -> None:
        error = EngineDeadError("The server is shutting down")
        self._fail(error)
        for keeper in self._keepers:
            keeper.cancel()
        for journey in list(self._journeys.values()):
            self.abort(journey.request.id)
            journey.give_up(error)
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(r.client.close(grace_s) for r in self._replicas if r.client is not None))

    def forget(self, journey: Journey) -> None:
        if self._journeys.get(journey.request.id) is journey:
            del self._journeys[journey.request.id]
            self._places.release(journey.request.tenant)
        journey.leave()
        timer = self._waiting.pop(journey, None)
        if timer is not None:
            timer.cancel()
        if not self._journeys:
            self._idle.set()

    def outlive_engine(self, journey: Journey) -> None:
        """Goes on with another engine, or gives a request up that no engine has survived."""
        journey.num_engines_lost += 1
        if journey.num_engines_lost > MAX_ENGINES_LOST:
            journey.give_up(_lost(f"{journey.num_engines_lost} engines ended while they worked on it."))
        else:
            self._move(journey, self._available())

    def _move(self, journey: Journey, available: list[int]) -> None:
        self.num_moves += 1
        journey.leave()
        self._place(journey, available)

    @property
    def _have_all_come_up(self) -> bool:
        return len(self._infos) == len(self._replicas)

    def _tightest_info(self) -> EngineInfo:
        return min(self._infos.values(), key=lambda info: info.max_model_len)

    def _ready(self) -> list[int]:
        return [replica.index for replica in self._replicas if replica.state == "ready"]

    def _available(self) -> list[int]:
        """Who is about to leave is asked as well, if there is nobody else."""
        return self._ready() or [one.index for one in self._replicas if one.state == "leaving"]

    def _place(self, journey: Journey, available: list[int]) -> None:
        if not available:
            loop, timeout_s = asyncio.get_running_loop(), self._config.resume_timeout
            error = _lost(f"No engine came back within {timeout_s:g} s.")
            self._waiting[journey] = loop.call_later(timeout_s, journey.give_up, error)
            return
        request = resumed(journey.request, journey.said)
        index, num_tokens_due = self._router.pick(request.token_ids, available)
        client = self._replicas[index].client
        assert client is not None
        journey.settle(client, self._router.loads[index], num_tokens_due)
        client.submit([(request, journey)])

    def _place_waiting(self) -> None:
        """Those first who have begun: somebody is reading."""
        waiting = sorted(self._waiting, key=lambda journey: not journey.said)
        for journey in waiting:
            self._waiting.pop(journey).cancel()
            self._place(journey, self._available())

    async def _keep(self, replica: Replica) -> None:
        """Has an engine live at this place, one after the other."""
        while True:
            started = time.monotonic()
            try:
                self._infos[replica.index] = await replica.start(self._first_phases(replica))
            except Exception as error:
                reason = _reason_of(error)
                if not self._have_all_come_up:  # what keeps it from starting will do so again
                    self._fail(reason)
                    return
                log.error("engine %d did not start: %s", replica.index, reason)
                replica.problem = reason.what
            else:
                self._welcome(replica, time.monotonic() - started)
                await replica.watch()
            await replica.bury()
            await replica.wait_before_restart()

    def _welcome(self, replica: Replica, seconds: float) -> None:
        self._router.forget(replica.index)
        if replica.num_restarts:
            log.warning("engine %d serves again after %.1f s", replica.index, seconds)
        elif len(self._replicas) > 1:
            num_up, num_all = len(self._infos), len(self._replicas)
            is_last = num_up == num_all
            detail = f"{num_up} of {num_all} are up"
            self._on_phase(Phase("replicas", detail, num_up / num_all, seconds if is_last else None))
        if self._have_all_come_up:
            self._settled.set()
        self._place_waiting()

    def _first_phases(self, replica: Replica) -> OnPhase:
        """One engine's start is like another's: the first one's is told, once."""
        is_told = replica.index == 0 and replica.num_restarts == 0
        return self._on_phase if is_told else lambda _: None

    def _fail(self, error: PenstockError) -> None:
        self.failure = self.failure or error
        self._settled.set()
        for replica in self._replicas:
            replica.has_spoken.set()

    async def _replace(self, replica: Replica) -> None:
        """What runs may end, up to a time; what is left then goes on elsewhere, or with the next engine here.
        The only engine there is takes new requests until it goes."""
        replica.is_leaving = True
        client, load = replica.client, self._router.loads[replica.index]
        assert client is not None
        deadline = time.monotonic() + self._config.drain_timeout
        while load.num_requests and time.monotonic() < deadline and client.failure is None:
            await asyncio.sleep(LEAVING_POLL_S)
        for journey in [one for one in self._journeys.values() if one.client is client]:
            client.abort(journey.request.id)
            self._move(journey, self._ready())
        await client.close()
        while replica.state != "ready" and not self._is_draining:  # it may take several attempts
            await asyncio.sleep(LEAVING_POLL_S)


def resumed(request: Request, said: Sequence[int]) -> Request:
    """What another engine is asked: to go on after these tokens, before those that have not begun."""
    if not said:
        return request
    return replace(
        request,
        token_ids=(*request.token_ids, *said),
        num_resumed_tokens=request.num_resumed_tokens + len(said),
        priority=request.priority - RESUMED_STEPS_EARLIER,
    )


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait({waiting}, timeout=timeout_s)
    waiting.cancel()


def _log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("nobody keeps this engine any more", exc_info=task.exception())


def _reason_of(error: Exception) -> PenstockError:
    """Why an engine did not start. Whatever it is, the next one is tried as after any other."""
    if isinstance(error, PenstockError):
        return error
    log.error("an engine's start failed unexpectedly", exc_info=error)
    return EngineDeadError("The engine process could not be started", f"{type(error).__name__}: {error}.")


def _with_seed(request: Request) -> Request:
    """A seed for who has none: two engines must not draw alike, and a third may have to go on."""
    if request.sampling.temperature == 0 or request.sampling.seed is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=random.getrandbits(63)))


def _lost(why: str) -> EngineDeadError:
    """The reply has no engine any more. Why its engine died stays in the log: it may name paths of ours."""
    return EngineDeadError("The engine of this reply is gone", why, "Try again later.")
