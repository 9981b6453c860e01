"""Conversations that stay in the prefix cache between their turns, as long as the limits allow.

A session pins the pages that its last request registered and, for models with recurrent state, a
few checkpoints among them: the prefix index evicts neither. A session ends when it was unused for a
while, when all sessions together exceed their limit, when a client deletes it, or when a running
request needs its memory; the least recently used one ends first. What an ended session pinned stays
in the index like any other prefix. The table knows digests and counts bytes; it does not know a
session's tokens.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.cache.prefix import PrefixIndex
from penstock.types import SessionInfo

MAX_SESSIONS = 4096  # a conversation shorter than a page takes no bytes

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What all sessions together may hold, and how long an unused one is kept."""

    max_bytes: int = 0  # 0: nothing is kept
    max_idle_s: float = 1800.0
    page_bytes: int = 0
    slot_bytes: int = 0
    max_checkpoints: int = 0


NO_SESSIONS = SessionLimits()


@dataclass(slots=True)
class _Session:
    created_at: float
    used_at: float
    num_tokens: int = 0
    num_hits: int = 0
    page_digests: Sequence[bytes] = ()  # a prefix, from the first page on
    checkpoints: Sequence[bytes] = ()


class Sessions:
    """All sessions of one cache. Every change of pins goes through the index, which moves the
    pages.
    """

    def __init__(
        self, index: PrefixIndex, limits: SessionLimits, clock: Clock = time.monotonic
    ) -> None:
        self.limits = limits
        self._index = index
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_bytes(self) -> int:
        """Pages that sessions share count once."""
        return self._bytes_of(self._index.num_pinned_pages, self._index.checkpoints.num_pinned)

    def use(self, session_id: str, is_hit: bool) -> None:
        """A request of this session begins."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.used_at = self._clock()
            session.num_hits += is_hit
            self._sessions.move_to_end(session_id)

    def keep(
        self,
        session_id: str,
        num_tokens: int,
        page_digests: Sequence[bytes],
        checkpoints: Sequence[bytes],
    ) -> None:
        """A request of this session has ended: from now on the session pins this prefix."""
        if not self.limits.max_bytes:
            return
        now = self._clock()
        session = self._sessions.setdefault(session_id, _Session(created_at=now, used_at=now))
        old_pages, old_checkpoints = session.page_digests, session.checkpoints
        session.page_digests, session.checkpoints = page_digests, checkpoints
        session.num_tokens, session.used_at = num_tokens, now
        self._sessions.move_to_end(session_id)
        # Before the old pins are removed: most are the same.
        self._pin(page_digests, checkpoints)
        self._unpin(old_pages, old_checkpoints)
        self.expire()
        while self._is_over_limit():
            self.evict_oldest()

    def drop(self, session_id: str) -> SessionInfo | None:
        """Ends a session and returns its description. None: there is no such session."""
        self.expire()
        session = self._sessions.get(session_id)
        if session is None:
            return None
        info = self._describe(session_id, session)
        self._end(session_id)
        return info

    def evict_oldest(self) -> bool:
        """Ends the least recently used session."""
        if not self._sessions:
            return False
        self._end(next(iter(self._sessions)))
        return True

    def expire(self) -> None:
        oldest = self._clock() - self.limits.max_idle_s
        while self._sessions and next(iter(self._sessions.values())).used_at < oldest:
            self.evict_oldest()

    def describe(self) -> list[SessionInfo]:
        """The most recently used first."""
        self.expire()
        return [self._describe(id, session) for id, session in reversed(self._sessions.items())]

    def check(self) -> None:
        """Asserts that the index holds exactly the pins of these sessions."""
        sessions = self._sessions.values()
        self._index.check_pins(
            [digest for session in sessions for digest in session.page_digests],
            [digest for session in sessions for digest in session.checkpoints],
        )
        assert not self._is_over_limit(), "sessions exceed their limit"
        used = [session.used_at for session in sessions]
        assert used == sorted(used), "the least recently used session is not the first"

    def _is_over_limit(self) -> bool:
        return (
            self.num_bytes > self.limits.max_bytes
            or self._index.checkpoints.num_pinned > self.limits.max_checkpoints
            or len(self._sessions) > MAX_SESSIONS
        )

    def _describe(self, session_id: str, session: _Session) -> SessionInfo:
        now = self._clock()
        return SessionInfo(
            id=session_id,
            num_tokens=session.num_tokens,
            num_bytes=self._bytes_of(len(session.page_digests), len(session.checkpoints)),
            num_hits=session.num_hits,
            age_s=now - session.created_at,
            idle_s=now - session.used_at,
        )

    def _bytes_of(self, num_pages: int, num_checkpoints: int) -> int:
        return num_pages * self.limits.page_bytes + num_checkpoints * self.limits.slot_bytes

    def _end(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        self._unpin(session.page_digests, session.checkpoints)

    def _pin(self, page_digests: Sequence[bytes], checkpoints: Sequence[bytes]) -> None:
        for digest in page_digests:
            self._index.pin_page(digest)
        for digest in checkpoints:
            self._index.checkpoints.pin(digest)

    def _unpin(self, page_digests: Sequence[bytes], checkpoints: Sequence[bytes]) -> None:
        for digest in reversed(page_digests):  # the index needs the last page to become idle first
            self._index.unpin_page(digest)
        for digest in checkpoints:
            self._index.checkpoints.unpin(digest)
