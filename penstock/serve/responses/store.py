"""Responses that are kept, so that they can be read again and conversations can go on from them.

In memory only: up to a number of responses, of bytes and of hours, whichever is reached first. What is too
old goes; for what is too much, the oldest of the tenant who has most, so that nobody's requests make others'
responses go while they have fewer. Each is kept with its whole conversation, as JSON: none depends on
another, and what it takes is known exactly. Ids are drawn at random: only whoever was answered knows one.
Knows no HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from penstock.errors import RequestError
from penstock.serve.responses.items import Item

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 1024 * 1024
MAX_AGE_S = 24 * 3600.0


class UnknownResponseError(RequestError):
    """A response that was never kept here, or no longer is."""

    status = 404
    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str  # others do not find it
    body: bytes  # the response as it was sent
    items: bytes  # its conversation, with the reply
    at: float

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.items)


@dataclass(slots=True)
class _Shelf:
    """What one tenant has here."""

    ids: OrderedDict[str, None] = field(default_factory=OrderedDict)  # the oldest first
    num_bytes: int = 0


def new_id() -> str:
    return f"resp_{secrets.token_hex(16)}"


class ResponseStore:
    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the oldest first
        self._shelves: dict[str, _Shelf] = {}  # by tenant; none is empty
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, id: str, body: bytes, items: list[Item], tenant: str = "") -> None:
        kept = _Kept(tenant, body, msgspec.json.encode(items), self._clock())
        self._kept[id] = kept
        self.num_bytes += kept.num_bytes
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.ids[id] = None
        shelf.num_bytes += kept.num_bytes
        self._forget_old()
        self._forget_surplus()

    def body_of(self, id: str, tenant: str = "") -> bytes:
        return self._find(id, tenant).body

    def items_of(self, id: str, param: str, tenant: str = "") -> list[Item]:
        """`param`: the field that named the response."""
        return msgspec.json.decode(self._find(id, tenant, param).items, type=list[Item])

    def num_bytes_of(self, id: str, param: str, tenant: str = "") -> int:
        """Of its conversation, before it is decoded."""
        return len(self._find(id, tenant, param).items)

    def delete(self, id: str, tenant: str = "") -> None:
        self._find(id, tenant)
        self._forget(id)

    def _find(self, id: str, tenant: str, param: str | None = None) -> _Kept:
        self._forget_old()
        kept = self._kept.get(id)
        if kept is None or kept.tenant != tenant:
            raise UnknownResponseError(
                f"There is no response {id[:64]!r} here",
                f"Up to {self._max_responses} are kept for {self._max_age_s / 3600:.0f} hours, in up to "
                f"{self._max_bytes} bytes of memory; those asked for with store: false are not.",
                "Send the conversation as input.",
                param=param,
            )
        return kept

    def _forget_old(self) -> None:
        oldest_at = self._clock() - self._max_age_s
        while self._kept:
            id, kept = next(iter(self._kept.items()))
            if kept.at >= oldest_at:
                return
            self._forget(id)

    def _forget_surplus(self) -> None:
        while self.num_bytes > self._max_bytes:
            self._forget_oldest_of(max(self._shelves.values(), key=lambda shelf: shelf.num_bytes))
        while len(self._kept) > self._max_responses:
            self._forget_oldest_of(max(self._shelves.values(), key=lambda shelf: len(shelf.ids)))

    def _forget_oldest_of(self, shelf: _Shelf) -> None:
        self._forget(next(iter(shelf.ids)))

    def _forget(self, id: str) -> None:
        kept = self._kept.pop(id)
        self.num_bytes -= kept.num_bytes
        shelf = self._shelves[kept.tenant]
        del shelf.ids[id]
        shelf.num_bytes -= kept.num_bytes
        if not shelf.ids:
            del self._shelves[kept.tenant]
