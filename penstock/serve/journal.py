"""Replies that outlive their server: what a relay in front of it needs to continue them elsewhere.

A relay, such as a door of `penstock.ray`, authenticates with a key. The streams that it gets have
marks between their events: each contains the tokens from which the events since the last mark were
made. If this server is lost, the relay drops what came after the last mark, and sends the request
with these tokens to another server. That server replays them as if an engine had generated them,
sends no events for them, and continues after them as `Fleet` does when an engine is lost. So the
detokenizer, the parser, stop strings, budgets and token counts have the same state as before.

Streams with several replies, or with scores of a prompt, have marks without tokens: they cannot be
resumed. Nor can those of /v1/responses, whose items have random ids.
"""

from __future__ import annotations

import hmac
import re
import time
from contextvars import ContextVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.types import FinishReason, Request, TokenDelta

RELAY_HEADER = "x-penstock-relay"  # the key; to resume, also a reply's id and its tokens' size
MARKS_HEADER = "x-penstock-marks"  # set if an answer has marks
MARK_BEGIN, MARK_END = b"\x1e", b"\n"  # JSON escapes both, and no event contains the first
UNRESUMABLE = ("/v1/responses",)
_REPLY_ID = re.compile(r"[0-9a-f]{32}")


class Said(msgspec.Struct, omit_defaults=True):
    """The tokens of a reply so far or, in a mark, those since the last mark."""

    id: str = ""
    created: int = 0
    seed: int | None = None
    num_cached: int | None = None
    deltas: list[list[int]] = []  # as they came: budgets and loop guards act at their ends
    finish: FinishReason | None = None
    is_lost: bool = False  # it cannot be resumed

    def add(self, mark: Said) -> None:
        self.id, self.created = mark.id or self.id, mark.created or self.created
        self.seed = self.seed if mark.seed is None else mark.seed
        self.num_cached = self.num_cached if mark.num_cached is None else mark.num_cached
        self.deltas += mark.deltas
        self.finish = mark.finish if mark.deltas else self.finish
        self.is_lost |= mark.is_lost


class Journal:
    """Records the tokens of one reply on this server."""

    def __init__(self, reply_id: str) -> None:
        self.replayed: Said | None = None
        self.is_replaying = False
        self.num_cached: int | None = None
        self.created = int(time.time())  # stays the same when another server continues the reply
        self._new = Said(id=reply_id, created=self.created)
        self._deltas: list[list[int]] = []  # since the last mark

    def resume(self, data: bytes) -> None:
        self.replayed = msgspec.json.decode(data, type=Said)
        self.num_cached, self.created = self.replayed.num_cached, self.replayed.created
        self._new = Said()

    def give_up(self) -> None:
        """The reply cannot be resumed."""
        self._new.is_lost = True

    def begin(self, request: Request) -> None:
        self._new.seed = request.sampling.seed
        if request.sampling.prompt_logprobs is not None:
            self.give_up()

    def note(self, delta: TokenDelta) -> None:
        """Records a delta before it becomes text."""
        self._deltas.append(list(delta.token_ids))
        if self.num_cached is None:
            self.num_cached = self._new.num_cached = delta.num_cached_tokens
        self._new.finish = delta.finish

    def marked(self, events: bytes) -> bytes:
        """The events with their mark; nothing during a replay: the client has those events."""
        if self.is_replaying or not events:
            return b""
        return events + self.mark()

    def mark(self) -> bytes:
        new, self._new = self._new, Said()
        new.deltas, self._deltas = self._deltas, []
        return MARK_BEGIN + msgspec.json.encode(new) + MARK_END


_JOURNAL: ContextVar[Journal | None] = ContextVar("journal", default=None)


def current_journal() -> Journal | None:
    """The journal of the request that this task answers; None: it came from no relay."""
    return _JOURNAL.get()


class Relayed:
    """Recognises requests of a relay, and the id of the reply that they resume."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = ""
        if self._key and scope["type"] == "http":
            sent = Headers(scope=scope).get(RELAY_HEADER, "")
        key, *resumed = sent.split(" ")
        if self._key and hmac.compare_digest(key.encode(), self._key.encode()):
            if len(resumed) == 2 and _REPLY_ID.fullmatch(resumed[0]) and resumed[1].isdigit():
                scope["request_id"], scope["said_bytes"] = resumed[0], int(resumed[1])
            scope["is_relayed"] = not scope["path"].startswith(UNRESUMABLE)
        await self._app(scope, receive, send)


def open_journal(scope: Scope) -> None:
    """Called when the request has its id."""
    _JOURNAL.set(Journal(scope["request_id"]) if scope.get("is_relayed") else None)


def without_said(scope: Scope, body: bytes) -> bytes:
    """The client's part of a body, without what a relay put before it."""
    num_bytes: int = scope.get("said_bytes", 0)
    journal = current_journal()
    if num_bytes and journal is not None:
        journal.resume(body[:num_bytes])
    return body[num_bytes:]


class MarkedStream:
    """Splits the bytes of a reply with marks into events for the client and the reply's tokens so
    far."""

    def __init__(self) -> None:
        self.said = Said()
        self._held = bytearray()  # after the last mark: another engine would send it again
        self._decoder = msgspec.json.Decoder(Said)

    @property
    def may_resume(self) -> bool:
        return bool(self.said.id) and not self.said.is_lost

    def take(self, piece: bytes) -> bytes:
        """Returns the events that are already followed by a mark."""
        self._held += piece
        events = bytearray()
        while (begin := self._held.find(MARK_BEGIN)) >= 0:
            end = self._held.find(MARK_END, begin)
            if end < 0:
                break
            self.said.add(self._decoder.decode(self._held[begin + 1 : end]))
            events += self._held[:begin]
            del self._held[: end + 1]
        return bytes(events)

    def end(self) -> bytes:
        """The last events, which have no mark."""
        held, self._held = bytes(self._held), bytearray()
        return held

    def resume(self) -> tuple[str, bytes]:
        """The reply's id and its tokens so far, for another engine."""
        self._held.clear()
        return self.said.id, msgspec.json.encode(self.said)
