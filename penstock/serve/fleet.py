"""Several engines that act as one: every request finds an engine, and survives its death.

Owns the replicas and the requests in flight. A request whose engine dies continues on another one:
from its prompt, or from its prompt and the tokens generated so far, which that engine computes
again; the receiver sees no gap. A request that finds no engine waits for one, for a limited time.
client.py talks to one engine, routing.py chooses one, replica.py restarts a dead one.
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
from penstock.digests import PageDigests
from penstock.errors import EngineDeadError, EngineLossError, OverloadedError, PenstockError
from penstock.progress import OnPhase, Phase
from penstock.serve.client import EXIT_GRACE_S, EngineClient, Receiver
from penstock.serve.intake import Intake, Place
from penstock.serve.journal import Journal, Said, current_journal
from penstock.serve.replica import Launch, Replica, ReplicaReport
from penstock.serve.routing import Load, Router
from penstock.types import EngineInfo, FinishReason, Request, SessionInfo, TokenDelta

log = logging.getLogger("penstock.serve")

# A request is given up when it has this much blame since its last progress: two for each engine
# that crashed while it ran, one for each that was killed, which may have another cause.
MAX_BLAME = 4
BLAME_FOR_FAULT, BLAME_FOR_KILL = 2, 1
MAX_FAULTS = 8  # crashes of engines that ran a request, even with progress in between
RESUMED_STEPS_EARLIER = 10  # subtracted from its priority: a client is already reading
LEAVING_POLL_S = 0.02


class InFlight:
    """One request in flight, with everything that is needed to continue on another engine."""

    __slots__ = (
        *("_awaits_token", "_fleet", "_num_cached_tokens", "_num_tokens_due", "_receiver"),
        *("blame", "client", "is_running", "journal", "load", "num_faults", "num_scored"),
        *("request", "said"),
    )

    def __init__(
        self, fleet: Fleet, request: Request, receiver: Receiver, journal: Journal | None = None
    ) -> None:
        self.request = request
        self.journal = journal
        self.said: list[int] = []
        self.num_scored = 0  # tokens of the prompt whose scores have arrived
        self.client: EngineClient | None = None  # None: it waits for one
        self.load: Load | None = None
        self.is_running = False  # False: it waits, in its engine's queue or for an engine
        self.blame = 0  # since its last progress
        self.num_faults = 0  # engines that failed while it ran
        self._fleet = fleet
        self._receiver = receiver
        self._awaits_token = True  # the first from its current engine
        self._num_tokens_due = 0  # prompt tokens that the engine computes before that
        # Cached tokens of the prompt, on its first engine.
        self._num_cached_tokens = None if journal is None else journal.num_cached

    @property
    def is_suspect(self) -> bool:
        return self.blame >= BLAME_FOR_FAULT

    def take(self, delta: TokenDelta) -> None:
        if not (delta.token_ids or delta.prompt_scores or delta.finish):
            self.is_running = True
            return
        self.said += delta.token_ids
        if self.journal is not None:
            self.journal.note(delta)
        if self._awaits_token:
            self._note_first_news(delta)
        # Clients see the number of cached tokens on its first engine.
        if self._num_cached_tokens != delta.num_cached_tokens:
            delta = msgspec.structs.replace(delta, num_cached_tokens=self._num_cached_tokens)
        self._give(delta)

    def replay(self, token_ids: Sequence[int], finish: FinishReason | None) -> None:
        """Passes on these tokens as if an engine had generated them."""
        self.said += token_ids
        num_cached = self._num_cached_tokens or 0
        delta = TokenDelta(
            self.request.id, tuple(token_ids), finish=finish, num_cached_tokens=num_cached
        )
        self._give(delta)

    def _give(self, delta: TokenDelta) -> None:
        try:
            self._receiver.take(delta)
        finally:
            # Only now: after a thinking budget, the receiver continues the reply (`go_on`).
            if delta.finish is not None:
                self._fleet.forget(self)

    def fail(self, error: Exception) -> None:
        if self.client is not None and self.client.failure is not None:
            self._fleet.outlive_engine(self)
        else:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        self._fleet.forget(self)
        self._receiver.fail(error)

    def assign(self, client: EngineClient, load: Load, num_tokens_due: int) -> None:
        self.client, self.load = client, load
        self.is_running = False
        self._awaits_token = True
        self._num_tokens_due = num_tokens_due
        load.num_requests += 1
        load.num_prompt_tokens += num_tokens_due

    def leave(self) -> None:
        if self.load is not None:
            self.load.num_requests -= 1
            self.load.num_prompt_tokens -= self._num_tokens_due
        self.client, self.load, self._num_tokens_due = None, None, 0

    def _note_first_news(self, delta: TokenDelta) -> None:
        """Updates load and blame. Scores of the prompt may come before an engine's first token."""
        assert self.load is not None
        num_scored = len(delta.prompt_scores or ())
        self.num_scored += num_scored
        self._awaits_token = num_scored > 0
        num_computed = (
            min(num_scored, self._num_tokens_due) if self._awaits_token else self._num_tokens_due
        )
        self.load.num_prompt_tokens -= num_computed
        self._num_tokens_due -= num_computed
        if self.blame:
            self.blame = 0
            self._fleet.end_trial(self)
        if self._num_cached_tokens is None:
            self._num_cached_tokens = delta.num_cached_tokens


class Fleet:
    """Serves once every engine has started, and then while any of them is up."""

    def __init__(self, launches: Sequence[Launch], config: ServeConfig, on_phase: OnPhase) -> None:
        self.failure: PenstockError | None = None  # why no engine can start
        self.intake = Intake(config)
        self._is_draining = False
        self.num_moves = 0
        self._seeds = random.Random(config.sampling_seed)  # None: seeded by the system
        self._config = config
        self._on_phase = on_phase
        self._replicas = [Replica(index, launch, config) for index, launch in enumerate(launches)]
        self._router = Router(len(launches), config.routing)
        self._in_flight: dict[str, InFlight] = {}
        self._waiting: dict[InFlight, asyncio.TimerHandle] = {}
        self._on_trial: InFlight | None = None  # the only suspect that has, or waits for, an engine
        self._suspects: dict[InFlight, None] = {}  # the others, which wait for their trial
        self._replaying: InFlight | None = None
        self._infos: dict[int, EngineInfo] = {}  # the latest, by replica
        self._started = asyncio.Event()  # all have started once, or one never will
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_restarting = False
        self._keepers = [asyncio.create_task(self._keep(replica)) for replica in self._replicas]
        for keeper in self._keepers:
            keeper.add_done_callback(_log_crash)

    @property
    def num_outstanding(self) -> int:
        return len(self._in_flight)

    @property
    def num_rows(self) -> int:
        """Rows of all engines that have started."""
        return sum(info.max_rows for info in self._infos.values())

    @property
    def is_ready(self) -> bool:
        return self.info is not None and self.failure is None

    @property
    def info(self) -> EngineInfo | None:
        """None while no engine is available; with several, the one with the tightest limits."""
        return self._tightest_info() if self._have_all_come_up and self._available() else None

    @property
    def phase(self) -> Phase:
        """The phase of the replica that start-up waits for."""
        for replica in self._replicas:
            if replica.state == "starting":
                assert replica.client is not None
                return replica.client.phase
            if replica.state == "dead":  # its phase ended with it
                return Phase("starting")
        return Phase("ready")

    async def wait_launched(self) -> None:
        """Waits until every engine's first process has connected, or one cannot start."""
        for replica in self._replicas:
            await replica.has_spoken.wait()

    async def wait_ready(self) -> EngineInfo:
        await self._started.wait()
        if self.failure is not None:
            raise self.failure
        return next(iter(self._infos.values()))

    def require_ready(self) -> EngineInfo:
        """Raises an error if a new request would be refused now. A request is accepted while
        engines restart."""
        if self.failure is not None or not self._have_all_come_up:
            raise EngineDeadError(
                "The engine is not running",
                f"Its phase is: {self.phase.name}.",
                "Try again when /health is 200.",
            )
        return self._tightest_info()

    def submit(
        self, receivers: Sequence[tuple[Request, Receiver]], place: Place | None = None
    ) -> None:
        """Accepts all requests, or none of them. `place`: the place that they already have in the
        queue."""
        if self.failure is not None:
            raise self.failure
        place = place or self.intake.reserve(receivers[0][0].tenant)
        try:
            place.hand_over(len(receivers))
        except OverloadedError:
            place.release()
            raise
        journal = current_journal()
        if journal is not None and len(receivers) > 1:
            journal.give_up()
            journal = None
        for request, receiver in receivers:
            assert request.tenant == place.tenant, "a reply releases a place of its tenant"
            request = _with_seed(request, self._seeds, journal)
            inflight = InFlight(self, request, receiver, journal)
            if journal is None or journal.replayed is None:
                self._start(inflight, self._available())
            else:
                self._register(inflight)
                # Later, when the caller is ready for deltas.
                asyncio.get_running_loop().call_soon(self._replay, inflight, journal.replayed)

    def go_on(self, request_id: str, request: Request, receiver: Receiver) -> None:
        """Replaces a request by another, which keeps its place in the queue and its engine."""
        if self.failure is not None:
            raise self.failure
        inflight = self._in_flight.get(request_id)
        journal = None if inflight is None else inflight.journal
        if inflight is not None and request.num_resumed_tokens:  # the same reply, with its seed
            seed = inflight.request.sampling.seed
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        following = InFlight(self, _with_seed(request, self._seeds), receiver, journal)
        same: list[int] = []
        if inflight is not None:
            following.num_faults = inflight.num_faults
            same = [r.index for r in self._replicas if r.client is inflight.client]
        available = [index for index in same if index in self._available()]
        # Even if the queue is full: the replaced request releases its place below.
        self.intake.replies.take(request.tenant)
        if inflight is not None and inflight is self._replaying:
            self._register(following)
            self._replaying = following
        else:
            # Before the other one is aborted, so that this one is next when its row is free.
            self._start(following, available or self._available())
        self.abort(request_id)

    def _start(self, inflight: InFlight, available: list[int]) -> None:
        self._register(inflight)
        self._place(inflight, available)

    def _register(self, inflight: InFlight) -> None:
        """Adds a request that already has a place in the queue."""
        request = inflight.request
        assert request.id not in self._in_flight, f"request id {request.id} is in use"
        self._in_flight[request.id] = inflight
        self._idle.clear()

    def _replay(self, inflight: InFlight, said: Said) -> None:
        """Continues a reply of another server: its receiver first gets the tokens from there."""
        journal = inflight.journal
        assert journal is not None
        self._replaying, journal.is_replaying = inflight, True
        for place, token_ids in enumerate(said.deltas, 1):
            one = self._replaying
            if self._in_flight.get(one.request.id) is not one:
                break  # it has ended, or its client has disconnected
            try:
                one.replay(token_ids, said.finish if place == len(said.deltas) else None)
            except Exception as error:
                one.give_up(error)
        one, self._replaying, journal.is_replaying = self._replaying, None, False
        if self._in_flight.get(one.request.id) is one:
            self.num_moves += 1
            self._place(one, self._available())

    def abort(self, request_id: str) -> None:
        """Ends a request: its receiver gets no more deltas."""
        inflight = self._in_flight.get(request_id)
        if inflight is not None:
            if inflight.client is not None:
                inflight.client.abort(request_id)
            self.forget(inflight)

    async def report(self) -> list[ReplicaReport]:
        loads = self._router.loads
        return await asyncio.gather(
            *(r.report(loads[r.index].num_requests) for r in self._replicas)
        )

    async def num_cached_tokens(self, digests: PageDigests, num_tokens: int) -> int | None:
        """Cached tokens of such a prompt, on the engine that has most; None: no engine answered."""
        found = await asyncio.gather(
            *(replica.num_cached_tokens(digests, num_tokens) for replica in self._replicas)
        )
        return max((n for n in found if n is not None), default=None)

    async def sessions(self) -> list[SessionInfo]:
        """The sessions of all engines; one that has moved is listed once, with its latest use."""
        found = await asyncio.gather(*(replica.sessions() for replica in self._replicas))
        latest = sorted((info for infos in found for info in infos), key=lambda info: -info.idle_s)
        return list({info.id: info for info in latest}.values())[::-1]

    async def drop_session(self, session_id: str) -> bool:
        """Returns whether the session existed."""
        dropped = await asyncio.gather(
            *(replica.drop_session(session_id) for replica in self._replicas)
        )
        return any(dropped)

    async def drain(self) -> None:
        """Returns when the running requests have ended or the drain timeout is over."""
        self._is_draining = True
        await _wait(self._idle, self._config.drain_timeout)

    async def restart(self) -> None:
        """Replaces every engine, one after the other, so that the others serve meanwhile."""
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
        for inflight in list(self._in_flight.values()):
            self.abort(inflight.request.id)
            inflight.give_up(error)
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(
            *(r.client.close(grace_s) for r in self._replicas if r.client is not None)
        )

    def forget(self, inflight: InFlight) -> None:
        if self._in_flight.get(inflight.request.id) is inflight:
            del self._in_flight[inflight.request.id]
            self.intake.replies.release(inflight.request.tenant)
        inflight.leave()
        timer = self._waiting.pop(inflight, None)
        if timer is not None:
            timer.cancel()
        self.end_trial(inflight)
        if not self._in_flight:
            self._idle.set()

    def outlive_engine(self, inflight: InFlight) -> None:
        """Moves a request whose engine died, or gives it up if too many engines died of it."""
        assert inflight.client is not None
        if inflight.is_running:
            inflight.blame += BLAME_FOR_FAULT if inflight.client.is_own_fault else BLAME_FOR_KILL
            inflight.num_faults += inflight.client.is_own_fault
        if inflight.blame >= MAX_BLAME or inflight.num_faults >= MAX_FAULTS:
            inflight.give_up(_unsurvived())
        else:
            self._move(inflight, self._available())

    def end_trial(self, inflight: InFlight) -> None:
        """The request made progress or has ended: the next suspect may be tried."""
        self._suspects.pop(inflight, None)
        if self._on_trial is inflight:
            self._on_trial = None
            if self._suspects:
                # First those whose client is already reading.
                following = min(self._suspects, key=lambda one: not one.said)
                del self._suspects[following]
                self._place(following, self._available())

    def _may_be_placed(self, inflight: InFlight) -> bool:
        """Requests that ran when an engine failed are tried one at a time: if another engine fails,
        the culprit is known, and the others continue."""
        if not inflight.is_suspect:
            return True
        if self._on_trial is None:
            self._on_trial = inflight
        if self._on_trial is not inflight:
            self._suspects[inflight] = None
        return self._on_trial is inflight

    def _move(self, inflight: InFlight, available: list[int]) -> None:
        self.num_moves += 1
        inflight.leave()
        self._place(inflight, available)

    @property
    def _have_all_come_up(self) -> bool:
        return len(self._infos) == len(self._replicas)

    def _tightest_info(self) -> EngineInfo:
        return min(self._infos.values(), key=lambda info: info.max_model_len)

    def _ready(self) -> list[int]:
        return [replica.index for replica in self._replicas if replica.state == "ready"]

    def _available(self) -> list[int]:
        """Falls back to draining replicas when no other is ready."""
        return self._ready() or [one.index for one in self._replicas if one.state == "leaving"]

    def _place(self, inflight: InFlight, available: list[int]) -> None:
        if not self._may_be_placed(inflight):
            return
        if not available:
            loop, timeout_s = asyncio.get_running_loop(), self._config.resume_timeout
            self._waiting[inflight] = loop.call_later(timeout_s, self._end_waiting, inflight)
            return
        request = resumed(inflight.request, inflight.said, inflight.num_scored)
        index, num_tokens_due = self._router.pick(request, available)
        client = self._replicas[index].client
        assert client is not None
        inflight.assign(client, self._router.loads[index], num_tokens_due)
        try:
            client.submit([(request, inflight)])
        except Exception as error:  # this one cannot be sent; others can
            inflight.give_up(error)

    def _end_waiting(self, inflight: InFlight) -> None:
        error = _lost(f"No engine was available within {self._config.resume_timeout:g} s.")
        for suspect in list(self._suspects) if inflight is self._on_trial else ():
            suspect.give_up(error)
        inflight.give_up(error)

    def _place_waiting(self) -> None:
        """Requests that have begun come first: a client is already reading."""
        waiting = sorted(self._waiting, key=lambda inflight: not inflight.said)
        for inflight in waiting:
            self._waiting.pop(inflight).cancel()
            self._place(inflight, self._available())

    async def _keep(self, replica: Replica) -> None:
        """Keeps a replica running: starts another engine whenever one dies."""
        while True:
            started = time.monotonic()
            try:
                self._infos[replica.index] = await replica.start(self._first_phases(replica))
            except Exception as error:
                reason = _reason_of(error)
                if not self._have_all_come_up:  # another attempt would fail for the same reason
                    self._fail(reason)
                    return
                log.error("engine %d did not start: %s", replica.index, reason)
                replica.problem = reason.what
            else:
                self._welcome(replica, time.monotonic() - started)
                await replica.watch()
            await replica.reap()
            # Closed meanwhile: Python 3.11 loses a cancellation that comes with the engine's death.
            if self.failure is not None:
                return
            await replica.wait_before_restart()

    def _welcome(self, replica: Replica, seconds: float) -> None:
        self._router.forget(replica.index)
        if replica.num_restarts:
            log.warning("engine %d serves again after %.1f s", replica.index, seconds)
        elif len(self._replicas) > 1:
            num_up, num_all = len(self._infos), len(self._replicas)
            is_last = num_up == num_all
            detail = f"{num_up} of {num_all} are up"
            self._on_phase(
                Phase("replicas", detail, num_up / num_all, seconds if is_last else None)
            )
        if self._have_all_come_up:
            self._started.set()
        self._place_waiting()

    def _first_phases(self, replica: Replica) -> OnPhase:
        """All engines go through the same phases, so only the first start of one is reported."""
        is_told = replica.index == 0 and replica.num_restarts == 0
        return self._on_phase if is_told else lambda _: None

    def _fail(self, error: PenstockError) -> None:
        self.failure = self.failure or error
        self._started.set()
        for replica in self._replicas:
            replica.has_spoken.set()

    async def _replace(self, replica: Replica) -> None:
        """Waits for running requests, up to the drain timeout, and moves the rest to other engines
        or the new one. If it is the only engine, it accepts new requests until it exits.
        """
        replica.is_leaving = True
        client, load = replica.client, self._router.loads[replica.index]
        assert client is not None
        deadline = time.monotonic() + self._config.drain_timeout
        while load.num_requests and time.monotonic() < deadline and client.failure is None:
            await asyncio.sleep(LEAVING_POLL_S)
        for inflight in [one for one in self._in_flight.values() if one.client is client]:
            client.abort(inflight.request.id)
            self._move(inflight, self._ready())
        await client.close()
        while replica.state != "ready" and not self._is_draining:  # it may take several attempts
            await asyncio.sleep(LEAVING_POLL_S)


def resumed(request: Request, said: Sequence[int], num_scored: int = 0) -> Request:
    """The request for another engine: it continues after these tokens, and runs before requests
    that have not begun."""
    if num_scored:
        request = replace(request, num_scored_tokens=num_scored)
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
        log.error("the supervisor of an engine crashed", exc_info=task.exception())


def _reason_of(error: Exception) -> PenstockError:
    """Why an engine did not start. Whatever the reason, the next one is started as usual."""
    if isinstance(error, PenstockError):
        return error
    log.error("an engine's start failed unexpectedly", exc_info=error)
    return EngineDeadError(
        "The engine process could not be started", f"{type(error).__name__}: {error}."
    )


def _with_seed(request: Request, seeds: random.Random, journal: Journal | None = None) -> Request:
    """Sets a seed if there is none: engines must not sample the same, and another one may have to
    continue the reply."""
    sampling = request.sampling
    if sampling.temperature != 0 and sampling.seed is None:
        seed = None if journal is None or journal.replayed is None else journal.replayed.seed
        sampling = replace(sampling, seed=seeds.getrandbits(63) if seed is None else seed)
        request = replace(request, sampling=sampling)
    if journal is not None:
        journal.begin(request)
    return request


def _unsurvived() -> EngineLossError:
    return EngineLossError(
        "The request is not retried",
        "Several engines died while they ran it, so it may be the cause.",
        "Tell the operator of this server, whose log has the details, or change the request.",
    )


def _lost(why: str) -> EngineDeadError:
    """The reply has no engine left. Details are only in the log: they may name local paths."""
    return EngineDeadError("The engine of this reply is lost", why, "Try again later.")
