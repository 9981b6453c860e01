"""One replica of a fleet: a sequence of engine processes, each started when the last one died.

Starts a process, watches it, and decides how soon to start the next. A dead process is noticed when
its socket closes, a hung one by unanswered pings. Knows no requests: the fleet decides what happens
to those of a dead engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeVar

from penstock.config import ServeConfig
from penstock.digests import PageDigests
from penstock.errors import EngineDeadError
from penstock.progress import OnPhase
from penstock.serve.client import EngineClient
from penstock.types import DraftCount, DraftStats, EngineInfo, EngineStats, SessionInfo

log = logging.getLogger("penstock.serve")

PING_INTERVAL_S = 0.25
# A report without an engine's numbers is better than a late one.
STATS_TIMEOUT_S = 0.5
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 30.0
SHORT_LIFE_S = 10.0  # an engine that served for less than this delays the next one longer

T = TypeVar("T")
Launch = Callable[[OnPhase], Awaitable[EngineClient]]
ReplicaState = Literal["starting", "ready", "leaving", "dead"]


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The state of a replica, for operators."""

    replica: int
    state: ReplicaState
    restarts: int
    requests: int
    problem: str | None  # why the previous engine died
    stats: EngineStats | None  # None: it is not ready, or in a long step


class Replica:
    def __init__(self, index: int, launch: Launch, config: ServeConfig) -> None:
        self.index = index
        self.client: EngineClient | None = None
        self.is_leaving = False  # it finishes its requests and gets no new ones
        self.num_restarts = 0
        self.problem: str | None = None
        self.has_spoken = asyncio.Event()  # its first process has connected, or cannot start
        self._launch = launch
        self._max_unanswered_pings = max(1, round(config.hang_timeout / PING_INTERVAL_S))
        self._hang_timeout = config.hang_timeout
        self._step_timeout = config.step_timeout
        self._num_short_lives = 0
        self._ready_at: float | None = None

    @property
    def state(self) -> ReplicaState:
        if self.client is None or self.client.failure is not None:
            return "dead"
        if self.client.info is None:
            return "starting"
        return "leaving" if self.is_leaving else "ready"

    async def start(self, on_phase: OnPhase) -> EngineInfo:
        """Returns when the engine can serve; raises an error if it cannot start."""
        self.client = None
        self.client = await self._launch(on_phase)
        self.has_spoken.set()
        info = await self.client.wait_ready()
        self._ready_at = time.monotonic()
        return info

    async def watch(self) -> None:
        """Returns when the engine is dead, by itself or because it hung.

        Silence is counted in pings, not in seconds: while this process is delayed it sends none,
        and the engine is not blamed for that.
        """
        client = self.client
        assert client is not None
        while not await client.wait_dead(PING_INTERVAL_S):
            if client.num_unanswered_pings >= self._max_unanswered_pings:
                client.kill(_hung(f"It has not answered for {self._hang_timeout:g} s."))
            elif client.step_s > self._step_timeout:
                why = f"It has been in one step for {client.step_s:.0f} s."
                client.kill(_hung(why), is_own_fault=True)
            else:
                client.ping()

    async def reap(self) -> None:
        """Kills the process if it still runs, and records why the engine died."""
        if self.client is not None:
            await self.client.close(grace_s=0.0)
            assert self.client.failure is not None
            self.problem = None if self.is_leaving else self.client.failure.what

    async def wait_before_restart(self) -> None:
        """Waits longer each time an engine dies soon after its start. An engine that was asked to
        leave is replaced at once."""
        lived_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        was_asked, self.is_leaving, self._ready_at = self.is_leaving, False, None
        self.num_restarts += 1
        if was_asked:
            return
        self._num_short_lives = self._num_short_lives + 1 if lived_s < SHORT_LIFE_S else 0
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(self._num_short_lives, 30))
        log.warning("engine %d restarts in %.1f s", self.index, delay_s)
        await asyncio.sleep(delay_s)

    async def report(self, num_requests: int) -> ReplicaReport:
        return ReplicaReport(
            self.index,
            self.state,
            self.num_restarts,
            num_requests,
            self.problem,
            await self._soon(lambda client: client.stats()),
        )

    async def sessions(self) -> list[SessionInfo]:
        """Empty if the engine is gone: its sessions are gone too."""
        if self.client is None or not self.client.is_ready:
            return []
        with contextlib.suppress(EngineDeadError):
            return await self.client.sessions()
        return []

    async def drop_session(self, session_id: str) -> list[SessionInfo]:
        if self.client is None or not self.client.is_ready:
            return []
        with contextlib.suppress(EngineDeadError):
            return await self.client.drop_session(session_id)
        return []

    async def num_cached_tokens(self, digests: PageDigests, num_tokens: int) -> int | None:
        """None: it is not ready, or in a long step."""
        return await self._soon(lambda client: client.num_cached_tokens(digests, num_tokens))

    async def _soon(self, ask: Callable[[EngineClient], Awaitable[T]]) -> T | None:
        """The engine's answer; None: it is not ready, or in a long step."""
        if self.client is None or not self.client.is_ready:
            return None
        try:
            return await asyncio.wait_for(ask(self.client), STATS_TIMEOUT_S)
        except (TimeoutError, EngineDeadError):
            return None


def _hung(why: str) -> EngineDeadError:
    return EngineDeadError("The engine process hung and was killed", why)


def sum_stats(reports: Sequence[ReplicaReport]) -> EngineStats | None:
    """Totals of all engines; None: none of them answered. Memory and expert heat are not summed:
    engines may share a device, and each has its own slots."""
    parts = [report.stats for report in reports if report.stats is not None]
    if not parts:
        return None
    prefix: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    for part in parts:
        prefix.update(part.prefix)
        experts.update(part.experts)
    apart = ("prefix", "experts", "expert_heat", "drafts", "memory_used", "memory_total")
    counts = [field.name for field in fields(EngineStats) if field.name not in apart]
    return EngineStats(
        prefix=prefix,
        experts=experts,
        drafts=_sum_drafts([part.drafts for part in parts if part.drafts is not None]),
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
    )


def _sum_drafts(parts: Sequence[DraftStats]) -> DraftStats | None:
    if not parts:
        return None
    drafted: Counter[tuple[str, int]] = Counter()
    accepted: Counter[tuple[str, int]] = Counter()
    for part in parts:
        for one in part.counts:
            drafted[one.drafter, one.place] += one.num_drafted
            accepted[one.drafter, one.place] += one.num_accepted
    return DraftStats(
        num_decodes=sum(part.num_decodes for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        saved_s=sum(part.saved_s for part in parts),
        counts=tuple(DraftCount(*key, n, accepted[key]) for key, n in sorted(drafted.items())),
    )
