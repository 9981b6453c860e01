"""Stored responses and conversations, to be read again and continued; and the items in them.

Stored in memory only, with limits of records, bytes and hours. Old records are dropped; if there
are too many, the oldest one of the tenant that has most, so that no tenant's requests evict the
records of a tenant with fewer. A record is a response or a conversation: its JSON, and its items by
id.

Items are stored once, as JSON, however many records of a tenant list them: an agent's tenth
response contains the items of nine others. An item is dropped with the last record that lists it;
until then it can be referenced by its id. Ids of records are random: only the client that got the
answer knows its id. Knows no HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from penstock.errors import RequestError
from penstock.serve.responses.items import ID_PREFIXES, Item
from penstock.text.json_values import MAX_VALUES, has_more_values

MAX_RECORDS = 4096
MAX_BYTES = 256 * 1024 * 1024
MAX_AGE_S = 24 * 3600.0
PREFIXES = {"response": "resp", "conversation": "conv"}  # of their ids
LISTING_BYTES = 16  # a record's cost for each item that it lists, besides the item


Kind = Literal["response", "conversation"]


class UnknownResponseError(RequestError):
    """A response that was never stored here, or is no longer."""

    status = 404
    code = "response_not_found"


class UnknownConversationError(RequestError):
    status = 404
    code = "conversation_not_found"


class UnknownItemError(RequestError):
    status = 404
    code = "item_not_found"


@dataclass(slots=True)
class _Record:
    tenant: str  # other tenants do not find it
    body: bytes  # the response as it was sent, or the fields of the conversation
    item_ids: list[str]  # the conversation, including the reply
    num_inputs: int | None  # number of items before the reply
    at: float

    @property
    def num_bytes(self) -> int:
        return len(self.body) + LISTING_BYTES * len(self.item_ids)


@dataclass(slots=True)
class _KeptItem:
    id: str
    json: bytes
    num_users: int = 0  # how often records list it


@dataclass(slots=True)
class _Shelf:
    """The records of one tenant."""

    ids: OrderedDict[str, None] = field(default_factory=OrderedDict)  # of records, oldest first
    items: dict[str, _KeptItem] = field(default_factory=dict)
    num_bytes: int = 0

    def use(self, item: Item, new_id: str) -> str:
        """Stores an item if it is new; returns the id by which it is listed. A new one gets
        `new_id`: an id that a client chose could be guessed, and then referenced, by others."""
        kept = self.items.get(item.id or "")
        if kept is None or kept.json != msgspec.json.encode(item):
            json = msgspec.json.encode(msgspec.structs.replace(item, id=new_id))
            kept = self.items[new_id] = _KeptItem(new_id, json)
            self.num_bytes += len(json)
        kept.num_users += 1
        return kept.id

    def drop(self, item_ids: Sequence[str]) -> None:
        for id in item_ids:
            kept = self.items[id]
            kept.num_users -= 1
            if kept.num_users == 0:
                self.num_bytes -= len(kept.json)
                del self.items[id]


def _use_all(shelf: _Shelf, items: Sequence[Item], num_inputs: int | None) -> list[str]:
    token = secrets.token_hex(16)
    item_ids = []
    for index, item in enumerate(items):
        id = f"{ID_PREFIXES.get(item.type or 'message', 'item')}_{token}_{index}"
        is_reply = num_inputs is not None and index >= num_inputs
        item_ids.append(shelf.use(item, item.id if is_reply and item.id else id))
    return item_ids


def new_id(prefix: str = "resp") -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


class ResponseStore:
    def __init__(
        self,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._kept: OrderedDict[str, _Record] = OrderedDict()  # the oldest first
        self._shelves: dict[str, _Shelf] = {}  # by tenant; none is empty

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def keep(
        self,
        id: str,
        body: bytes,
        items: Sequence[Item],
        tenant: str = "",
        num_inputs: int | None = None,
    ) -> None:
        """Items after `num_inputs` belong to a reply, and have ids of this server."""
        shelf = self._shelves.setdefault(tenant, _Shelf())
        item_ids = _use_all(shelf, items, num_inputs)
        record = self._kept[id] = _Record(tenant, body, item_ids, num_inputs, self._clock())
        shelf.ids[id] = None
        shelf.num_bytes += record.num_bytes
        self._forget_old()
        self._forget_surplus()

    def extend(
        self, id: str, items: Sequence[Item], tenant: str = "", num_inputs: int | None = None
    ) -> list[str]:
        """Adds items to a conversation, which becomes the youngest record; returns their ids.
        Raises an error if it is too large to be kept."""
        record = self._find(id, tenant)
        shelf = self._shelves[tenant]
        item_ids = _use_all(shelf, items, num_inputs)
        record.item_ids += item_ids
        shelf.num_bytes += LISTING_BYTES * len(item_ids)
        record.at = self._clock()
        self._kept.move_to_end(id)
        shelf.ids.move_to_end(id)
        self._forget_surplus()
        self._find(id, tenant)  # it may have grown beyond the limit of all records
        return item_ids

    def remove_item(self, id: str, item_id: str, tenant: str = "") -> None:
        """Removes an item from a conversation."""
        record = self._find(id, tenant)
        if item_id not in record.item_ids:
            raise self._unknown_item(item_id)
        record.item_ids.remove(item_id)
        shelf = self._shelves[tenant]
        shelf.num_bytes -= LISTING_BYTES
        shelf.drop([item_id])

    def replace_body(self, id: str, body: bytes, tenant: str = "") -> None:
        record = self._find(id, tenant)
        self._shelves[tenant].num_bytes += len(body) - len(record.body)
        record.body = body

    def require(self, id: str, kind: Kind, tenant: str = "", param: str | None = None) -> None:
        """Raises an error if there is no such record of this kind; `param`: the field with the
        id."""
        if not (id.startswith(f"{PREFIXES[kind]}_") and id in self._kept):
            raise self._unknown(id, kind, param)
        self._find(id, tenant, param)

    def body_of(self, id: str, tenant: str = "", param: str | None = None) -> bytes:
        return self._find(id, tenant, param).body

    def items_of(self, id: str, param: str | None, tenant: str = "") -> list[Item]:
        return self.items_by_id(self._find(id, tenant, param).item_ids, tenant)

    def item_ids_of(self, id: str, tenant: str = "", *, is_input: bool = False) -> list[str]:
        """The ids of all items, or of those before the reply."""
        record = self._find(id, tenant)
        return record.item_ids[: record.num_inputs] if is_input else record.item_ids

    def num_bytes_of(self, id: str, param: str | None, tenant: str = "") -> int:
        """Size of its items, before they are decoded."""
        return self.num_bytes_of_items(self._find(id, tenant, param).item_ids, tenant)

    def num_bytes_of_items(
        self, item_ids: Sequence[str], tenant: str = "", param: str | None = None
    ) -> int:
        """Size of these items, before they are decoded; raises an error if one is missing."""
        self._forget_old()
        items = self._shelves[tenant].items if tenant in self._shelves else {}
        for id in item_ids:
            if id not in items:
                raise self._unknown_item(id, param)
        return sum(len(items[id].json) for id in item_ids)

    def delete(self, id: str, tenant: str = "") -> None:
        self._find(id, tenant)
        self._forget(id)

    def items_by_id(self, item_ids: Sequence[str], tenant: str = "") -> list[Item]:
        """Items of the tenant; all of them must exist."""
        if not item_ids:
            return []
        items = self._shelves[tenant].items
        jsons = [items[id].json for id in item_ids]
        if has_more_values(jsons):  # decoding them blocks the server
            raise RequestError(
                f"The conversation has {len(item_ids)} items with too many values",
                f"The limit is {MAX_VALUES:,} values in all.",
                "Send a shorter conversation as input.",
                param="input",
            )
        return msgspec.json.decode(b"[%b]" % b",".join(jsons), type=list[Item])

    def _find(self, id: str, tenant: str, param: str | None = None) -> _Record:
        self._forget_old()
        record = self._kept.get(id)
        if record is not None and record.tenant == tenant:
            return record
        kind: Kind = "conversation" if id.startswith(PREFIXES["conversation"]) else "response"
        raise self._unknown(id, kind, param)

    def _unknown(self, id: str, kind: Kind, param: str | None) -> RequestError:
        error = UnknownConversationError if kind == "conversation" else UnknownResponseError
        return error(
            f"No {kind} has the id {id[:64]!r}",
            f"Up to {self._max_records} are stored for {self._max_age_s / 3600:.0f} hours, in up "
            f"to {self._max_bytes} bytes of memory; those with store: false are not stored.",
            "Send the conversation as input.",
            param=param,
        )

    def _unknown_item(self, id: str, param: str | None = None) -> UnknownItemError:
        return UnknownItemError(
            f"Item with id {id[:64]!r} not found.",
            "Items are stored with the responses and conversations that list them, for "
            f"{self._max_age_s / 3600:.0f} hours, unless store was false.",
            "Send the item itself, or omit it.",
            param=param,
        )

    def _forget_old(self) -> None:
        oldest_at = self._clock() - self._max_age_s
        while self._kept:
            id, record = next(iter(self._kept.items()))
            if record.at >= oldest_at:
                return
            self._forget(id)

    def _forget_surplus(self) -> None:
        while self.num_bytes > self._max_bytes:
            self._forget_oldest_of(max(self._shelves.values(), key=lambda shelf: shelf.num_bytes))
        while len(self._kept) > self._max_records:
            self._forget_oldest_of(max(self._shelves.values(), key=lambda shelf: len(shelf.ids)))

    def _forget_oldest_of(self, shelf: _Shelf) -> None:
        self._forget(next(iter(shelf.ids)))

    def _forget(self, id: str) -> None:
        record = self._kept.pop(id)
        shelf = self._shelves[record.tenant]
        del shelf.ids[id]
        shelf.num_bytes -= record.num_bytes
        shelf.drop(record.item_ids)
        if not shelf.ids:
            del self._shelves[record.tenant]
