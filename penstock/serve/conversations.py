"""The messages that sessions hold, so that a chat continues when only its new messages are sent.

The rule: a request that contains an assistant message, or begins with the session's first message,
is a whole history and replaces what is held. Any other request is appended; it may begin with the
session's last reply, as a tool result does if its call is sent with it. A system prompt that is
sent replaces the held one. A turn is added when its reply has ended, by the same rule; a reply that
failed or was aborted changes nothing.

Held in memory only, up to limits of bytes, sessions and idle minutes. Beyond them, the least
recently used session of the tenant that holds most is evicted. Ids of ended sessions are
remembered, so that a request for one gets the reason. Messages are stored as JSON, so their size is
known exactly. Knows no HTTP.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from penstock.errors import RequestError
from penstock.text.json_values import MAX_VALUES, has_more_values

MAX_BYTES = 256 * 1024**2
MAX_IDLE_S = 30 * 60.0
MAX_SESSIONS = 4096
MAX_ENDED = 4096  # ids that are remembered
MAX_MESSAGES = 4096  # per session: as many as a request may have
SHORTEN = "Send a shorter history in its place, or delete the session."

Message = dict[str, Any]  # as chat templates expect it
Key = tuple[str, str]  # a tenant, and the id that it gave its session
WhyEnded = Literal["deleted", "expired", "evicted"]
# How a request relates to its session: it is the first, it continues the held messages, it sent a
# whole history, or it starts again because the held messages are gone.
Status = Literal["new", "continued", "history", "deleted", "expired", "evicted"]


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """What a session holds."""

    id: str
    num_messages: int
    num_bytes: int
    num_tokens: int  # in the last prompt and its reply
    age_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Packed:
    """Messages as JSON, without brackets: joining them decodes nothing."""

    json: bytes = b""
    num_messages: int = 0

    @classmethod
    def of(cls, messages: list[Message]) -> Packed:
        return cls(msgspec.json.encode(messages)[1:-1], len(messages))

    def unpack(self) -> list[Message]:
        messages: list[Message] = msgspec.json.decode(b"[%b]" % self.json)
        return messages

    def __add__(self, other: Packed) -> Packed:
        json = b",".join(part.json for part in (self, other) if part.num_messages)
        return Packed(json, self.num_messages + other.num_messages)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session until its reply has ended: what it sent, without held messages."""

    key: Key
    status: Status
    system: Packed  # system messages at the start
    said: Packed  # all other messages
    first: Message | None  # the first of `said`
    has_assistant: bool
    number: int  # orders all turns and ended sessions
    tools: Packed = Packed()  # held only for threads
    replaces: Key | None = None  # the session that ends when this turn is added


@dataclass(frozen=True, slots=True)
class Thread:
    """What comes before a turn that continues a session under a new name, and replaces it."""

    previous: Key | None = None  # None: a new thread
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(slots=True)
class _Conversation:
    created_at: float
    used_at: float
    system: Packed = Packed()
    said: Packed = Packed()
    tools: Packed = Packed()
    first: Message | None = None
    last: Message | None = None  # the last reply
    num_tokens: int = 0

    @property
    def num_messages(self) -> int:
        return self.system.num_messages + self.said.num_messages

    @property
    def num_bytes(self) -> int:
        return len(self.system.json) + len(self.said.json) + len(self.tools.json)

    def is_history(self, first: Message | None, has_assistant: bool) -> bool:
        """Whether the messages are a whole conversation, which replaces this one."""
        return has_assistant or first == self.first

    def add(self, turn: Turn, reply: Message) -> None:
        if self.is_history(turn.first, turn.has_assistant):
            self.system = self.said = Packed()
        self.system = turn.system if turn.system.num_messages else self.system
        self.first = self.first if self.said.num_messages else turn.first
        self.said = self.said + turn.said + Packed.of([reply])
        self.tools = turn.tools
        self.last = reply


@dataclass(slots=True)
class _Shelf:
    """The sessions of one tenant."""

    sessions: OrderedDict[str, _Conversation] = field(
        default_factory=OrderedDict
    )  # least recently used first
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Ended:
    why: WhyEnded
    number: int


class Conversations:
    def __init__(
        self,
        max_bytes: int = MAX_BYTES,  # 0: nothing is kept
        max_idle_s: float = MAX_IDLE_S,
        max_sessions: int = MAX_SESSIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_idle_s = max_idle_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}  # by tenant; none is empty
        self._ended: OrderedDict[Key, _Ended] = OrderedDict()  # newest last
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(len(shelf.sessions) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def num_bytes_of(self, key: Key) -> int:
        """Size of what is held, before it is decoded."""
        conversation = self._find(key)
        return 0 if conversation is None else conversation.num_bytes

    def names_of_calls(self, key: Key) -> dict[str, str]:
        """The called tools, by the ids of their calls."""
        conversation = self._find(key)
        return {} if conversation is None else names_of_calls(_unpack(conversation))

    @property
    def is_keeping(self) -> bool:
        return self._max_bytes > 0

    def thread(self, key: Key) -> Thread | None:
        """None: there is no such session."""
        conversation = self._find(key)
        if conversation is None:
            return None
        messages = (*conversation.system.unpack(), *_unpack(conversation))
        return Thread(key, messages, tuple(conversation.tools.unpack()))

    def begin(self, key: Key, sent: list[Message]) -> tuple[Turn, list[Message], list[Message]]:
        """A request with these messages arrives. Returns its turn, the held messages before them,
        and all messages of the prompt."""
        system, said = _split_system(sent)
        conversation = self._find(key)
        if (
            conversation is not None
            and len(said) > 1
            and _is_same_reply(said[0], conversation.last)
        ):
            said = said[1:]
        first = said[0] if said else None
        has_assistant = any(message["role"] == "assistant" for message in said)
        status: Status
        held: list[Message] = []
        if has_assistant or (
            conversation is not None and conversation.is_history(first, has_assistant)
        ):
            status = "history"
        elif conversation is None:
            status = self.why_ended(key) or "new"
        else:
            status = "continued"
            _require_room(conversation, len(sent))
            held_said = _unpack(conversation)
            names = names_of_calls(held_said)
            said = [_named(message, names) for message in said]
            held = [*([] if system else conversation.system.unpack()), *held_said]
        self._touch(key)
        number = next(self._numbers)
        turn = Turn(key, status, Packed.of(system), Packed.of(said), first, has_assistant, number)
        return turn, held, [*system, *held, *said]

    def end(self, turn: Turn, reply: Message, num_tokens: int) -> None:
        """Adds a turn whose reply has ended. A session deleted meanwhile stays deleted."""
        ended = self._ended.get(turn.key)
        is_deleted = ended is not None and ended.why == "deleted" and ended.number > turn.number
        if is_deleted or not self._max_bytes:
            return
        self._expire()
        if turn.replaces is not None:
            self.delete(turn.replaces)
        tenant, id = turn.key
        shelf = self._shelves.setdefault(tenant, _Shelf())
        now = self._clock()
        conversation = shelf.sessions.setdefault(id, _Conversation(created_at=now, used_at=now))
        num_bytes_before = conversation.num_bytes
        conversation.add(turn, reply)
        conversation.num_tokens = num_tokens
        shelf.num_bytes += conversation.num_bytes - num_bytes_before
        self._ended.pop(turn.key, None)
        self._touch(turn.key)
        self._evict_surplus()

    def describe(self, tenant: str) -> list[ConversationInfo]:
        """The tenant's sessions, the most recently used first."""
        self._expire()
        shelf, now = self._shelves.get(tenant, _Shelf()), self._clock()
        return [
            ConversationInfo(
                id=id,
                num_messages=one.num_messages,
                num_bytes=one.num_bytes,
                num_tokens=one.num_tokens,
                age_s=now - one.created_at,
                idle_s=now - one.used_at,
            )
            for id, one in reversed(shelf.sessions.items())
        ]

    def delete(self, key: Key) -> bool:
        """Returns whether the session existed. Replies in progress are no longer added to it."""
        if self._find(key) is None:
            return False
        self._end(key, "deleted")
        return True

    def why_ended(self, key: Key) -> WhyEnded | None:
        """None: the session exists, never existed, or ended long ago."""
        self._expire()
        ended = self._ended.get(key)
        return None if ended is None else ended.why

    def _find(self, key: Key) -> _Conversation | None:
        self._expire()
        tenant, id = key
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.sessions.get(id)

    def _touch(self, key: Key) -> None:
        tenant, id = key
        conversation = self._find(key)
        if conversation is not None:
            conversation.used_at = self._clock()
            self._shelves[tenant].sessions.move_to_end(id)

    def _expire(self) -> None:
        oldest = self._clock() - self._max_idle_s
        for tenant, shelf in list(self._shelves.items()):
            while shelf.sessions:
                id, conversation = next(iter(shelf.sessions.items()))
                if conversation.used_at >= oldest:
                    break
                self._end((tenant, id), "expired")

    def _evict_surplus(self) -> None:
        while self.num_bytes > self._max_bytes:
            self._evict_of(max(self._shelves, key=lambda tenant: self._shelves[tenant].num_bytes))
        while len(self) > self._max_sessions:
            self._evict_of(
                max(self._shelves, key=lambda tenant: len(self._shelves[tenant].sessions))
            )

    def _evict_of(self, tenant: str) -> None:
        self._end((tenant, next(iter(self._shelves[tenant].sessions))), "evicted")

    def _end(self, key: Key, why: WhyEnded) -> None:
        tenant, id = key
        shelf = self._shelves[tenant]
        shelf.num_bytes -= shelf.sessions.pop(id).num_bytes
        if not shelf.sessions:
            del self._shelves[tenant]
        self._ended[key] = _Ended(why, next(self._numbers))
        self._ended.move_to_end(key)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _split_system(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """System messages at the start, and the rest; later ones are part of the conversation."""
    said = list(itertools.dropwhile(lambda message: message["role"] == "system", messages))
    return messages[: len(messages) - len(said)], said


def _is_same_reply(message: Message, reply: Message | None) -> bool:
    """Calls are compared by their ids; the text beside them and the thinking before need not be
    sent again."""
    if reply is None or message["role"] != "assistant":
        return False
    calls, sent = ([call["id"] for call in one.get("tool_calls", ())] for one in (reply, message))
    if calls or sent:
        return calls == sent
    return bool(message["content"].strip() == reply["content"].strip())


def _require_room(conversation: _Conversation, num_sent: int) -> None:
    if conversation.num_messages + num_sent > MAX_MESSAGES:
        raise _full(f"The limit is {MAX_MESSAGES:,}, including the new ones.", conversation)


def _unpack(conversation: _Conversation) -> list[Message]:
    """The held messages. Decoding them blocks the server."""
    if has_more_values([conversation.said.json]):
        raise _full(f"The limit is {MAX_VALUES:,} values.", conversation)
    return conversation.said.unpack()


def _full(why: str, conversation: _Conversation) -> RequestError:
    return RequestError(
        f"The session holds {conversation.num_messages} messages and cannot continue",
        why,
        SHORTEN,
        param="session_id",
    )


def names_of_calls(messages: Sequence[Message]) -> dict[str, str]:
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return {call["id"]: call["function"]["name"] for call in calls if call["id"] is not None}


def _named(message: Message, names: dict[str, str]) -> Message:
    """Adds the tool's name to a result, as if its call had been sent with it."""
    if message["role"] != "tool" or "name" in message or message.get("tool_call_id") not in names:
        return message
    return {**message, "name": names[message["tool_call_id"]]}
