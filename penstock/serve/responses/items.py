"""Items, the units of a conversation in the Responses API, and the chat messages that they become.

Messages, calls, results and reasoning are separate items, while a chat template expects turns: the
model's reasoning, text and calls between two other roles are one turn. Clients send the items of a
reply back unchanged, so conversations are stored as items, too. Knows no endpoint.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import RequestError
from penstock.serve.body import wrong_choice
from penstock.serve.instructions import (
    PARAGRAPH,
    PlainMessage,
    place_instructions,
    plain_call,
    replace_attachment,
)
from penstock.text.dialects.json_calls import read_arguments
from penstock.text.json_values import refuse_many_arguments

MAX_ITEMS = 8192  # per conversation
ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
TEXT_PARTS = ("input_text", "output_text", "text")
NO_CALLS: Mapping[str, str] = {}
ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
SEAL = "penstock:"  # prefix of text that Penstock sealed; other text cannot be unsealed
COMPACTED = "Summary of our conversation before this message:\n\n"
CUSTOM_INPUT = "input"  # the only parameter of the function that represents a custom tool


class Part(msgspec.Struct, omit_defaults=True):
    """A part of content; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, omit_defaults=True):
    """Any item; its type decides which fields it has. Without a type it is a message or, with an id
    and no role, a reference to a stored item."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None  # for functions
    input: str | None = None  # for custom tools
    output: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None  # `seal`ed reasoning or summary

    @property
    def is_reference(self) -> bool:
        return self.type == "item_reference" or (
            self.type is None and self.role is None and self.id is not None
        )


Items = Annotated[list[Item], Meta(min_length=1, max_length=MAX_ITEMS)]


def plain_messages(
    history: list[Item],
    items: list[Item],
    instructions: str | None,
    called: Mapping[str, str] = NO_CALLS,
    field: str = "input",
    omitted: list[str] | None = None,
) -> list[PlainMessage]:
    """The conversation as chat templates expect it: instructions, stored items, sent items.

    `called`: names of tools by the ids of earlier calls; `field`: the field with the items. Adds to
    `omitted` what tool results contained besides text.
    """
    whole = [*history, *items]
    _check_size(whole, field)
    conversation = _Conversation(instructions, called, [] if omitted is None else omitted)
    for index, item in enumerate(whole, -len(history)):
        stored = f"The stored item {item.id}"
        conversation.add(item, f"{field}[{index}]" if index >= 0 else stored)
    return conversation.messages()


def items_of(messages: list[PlainMessage]) -> list[Item]:
    """The reverse of `plain_messages`: messages of a chat as items."""
    items: list[Item] = []
    for message in messages:
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            items.append(
                Item(type="function_call_output", call_id=call_id, output=message["content"])
            )
            continue
        if thought := message.get("reasoning_content"):
            items.append(Item(type="reasoning", content=[Part("reasoning_text", thought)]))
        calls = message.get("tool_calls", ())
        if message["content"] or not calls:
            items.append(Item(type="message", role=message["role"], content=message["content"]))
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if not isinstance(arguments, str):
                arguments = msgspec.json.encode(arguments).decode()
            items.append(
                Item(type="function_call", call_id=call["id"], name=name, arguments=arguments)
            )
    return items


def seal(text: str) -> str:
    """Text as an opaque string that clients send back unchanged. It is not encrypted: clients may
    read it."""
    return SEAL + base64.b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """None: this server did not seal it."""
    if not sealed.startswith(SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(SEAL), validate=True).decode()
    except ValueError:
        return None


def shown(item: Item) -> dict[str, Any]:
    """A stored item, as the API lists it."""
    fields: dict[str, Any] = msgspec.to_builtins(item)
    kind = item.type or "message"
    fields = {"type": kind, "status": "completed", **fields}
    if kind == "message":
        voice = "output_text" if item.role == "assistant" else "input_text"
        parts = (
            [{"type": voice, "text": item.content}]
            if isinstance(item.content, str)
            else fields["content"]
        )
        fields["content"] = [
            {**part, "annotations": [], "logprobs": []} if part["type"] == "output_text" else part
            for part in parts
        ]
    elif kind == "reasoning":
        fields = {"summary": [], **fields}
    elif kind == "compaction":
        del fields["status"]
    return fields


def _check_size(items: list[Item], field: str) -> None:
    """Raises an error for a conversation that would delay other requests."""
    if len(items) > MAX_ITEMS:
        raise RequestError(
            f"The conversation has {len(items)} items",
            f"The limit is {MAX_ITEMS}, including stored items.",
            "Send a shorter one.",
            param=field,
        )
    refuse_many_arguments(
        [item.arguments.encode() for item in items if item.arguments is not None], field
    )


class _Message:
    """A message that may grow: its content by paragraphs, its reasoning by pieces."""

    def __init__(self, role: str, *paragraphs: str, **others: str) -> None:
        self.role = role
        self.paragraphs = list(paragraphs)
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self._others = others

    def plain(self) -> PlainMessage:
        message = {"role": self.role, "content": PARAGRAPH.join(self.paragraphs), **self._others}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        return message | ({"tool_calls": self.calls} if self.calls else {})


class _Conversation:
    """The messages so far; the last one may be the model's open turn."""

    def __init__(
        self, instructions: str | None, called: Mapping[str, str], omitted: list[str]
    ) -> None:
        self._messages: list[_Message] = []
        self._omitted = omitted
        self._called = dict(called)  # names by call id
        if instructions:
            self._messages.append(_Message("system", instructions))

    def messages(self) -> list[PlainMessage]:
        return place_instructions([message.plain() for message in self._messages])

    def add(self, item: Item, where: str) -> None:
        kind = item.type or "message"
        if kind == "message" and item.role is not None:
            self._add_message(item, where)
        elif kind == "reasoning":
            self._add_thought(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(item, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._add_result(item, where)
        elif kind == "compaction":
            self._add_compaction(item, where)
        elif kind == "message":
            raise RequestError(f"{where} has neither a type nor a role", param=where)
        else:
            raise RequestError(
                f"{where}.type is {kind[:32]!r}",
                f"Items are {', '.join(ID_PREFIXES)} and item_reference.",
                param=f"{where}.type",
            )

    def _add_message(self, item: Item, where: str) -> None:
        assert item.role is not None
        if item.role not in ROLES:
            raise wrong_choice(f"{where}.role", item.role, ROLES)
        if item.content is None:
            raise RequestError(f"{where} has no content", param=f"{where}.content")
        role, text = ROLES[item.role], _text(item.content, f"{where}.content")
        if role == "assistant":
            self._say(text)
        else:
            self._messages.append(_Message(role, text))

    def _say(self, text: str) -> None:
        turn = self._turn()
        if turn.paragraphs and not turn.calls:
            turn = self._begin_turn()
        if text:
            turn.paragraphs.append(text)

    def _add_thought(self, item: Item, where: str) -> None:
        """Reasoning that was not sent back, as when only its summary is known, is left out."""
        text = _text(item.content or "", f"{where}.content", ("reasoning_text",))
        text = text or unseal(item.encrypted_content or "") or ""
        if not text:
            return
        turn = self._turn()
        if turn.paragraphs or turn.calls:
            turn = self._begin_turn()
        turn.thoughts.append(text)

    def _add_call(self, item: Item, where: str) -> None:
        is_custom = item.type == "custom_tool_call"
        written = item.input if is_custom else item.arguments
        if item.call_id is None or item.name is None or written is None:
            raise RequestError(
                f"{where} is incomplete",
                f"A {item.type} has call_id, name and {'input' if is_custom else 'arguments'}.",
                param=where,
            )
        arguments = {CUSTOM_INPUT: written} if is_custom else read_arguments(written)
        self._turn().calls.append(plain_call(item.call_id, item.name, arguments))
        self._called[item.call_id] = item.name

    def _add_compaction(self, item: Item, where: str) -> None:
        summary = unseal(item.encrypted_content or "")
        if summary is None:
            raise RequestError(
                f"{where} is not a compaction of this server",
                "Its encrypted_content can be read only by the server that created it.",
                "Send the items that were compacted, or compact them with /v1/responses/compact "
                "here.",
                param=f"{where}.encrypted_content",
            )
        self._messages.append(_Message("user", COMPACTED + summary))

    def _add_result(self, item: Item, where: str) -> None:
        if item.call_id is None or item.call_id not in self._called:
            raise RequestError(
                f"{where} has no matching call",
                f"No function_call before it has the call_id {(item.call_id or '')[:64]!r}.",
                "Send the call's item first, or the previous_response_id of the reply that had it.",
                param=f"{where}.call_id",
            )
        if item.output is None:
            raise RequestError(f"{where} has no output", param=f"{where}.output")
        output = item.output
        if not isinstance(output, str):
            output = "".join(
                self._result_text(p, f"{where}.output[{i}]") for i, p in enumerate(output)
            )
        name = self._called[item.call_id]
        self._messages.append(_Message("tool", output, tool_call_id=item.call_id, name=name))

    def _result_text(self, part: Part, where: str) -> str:
        if part.type in TEXT_PARTS:
            return _text([part], where)
        return replace_attachment(part.type, where, self._omitted)

    def _turn(self) -> _Message:
        """The model's open turn; a new one after another role."""
        if self._messages and self._messages[-1].role == "assistant":
            return self._messages[-1]
        return self._begin_turn()

    def _begin_turn(self) -> _Message:
        self._messages.append(_Message("assistant"))
        return self._messages[-1]


def _text(content: str | list[Part], where: str, types: tuple[str, ...] = TEXT_PARTS) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type not in (*types, "refusal"):
            raise RequestError(
                f"{where}[{index}] is of type {part.type[:32]!r}",
                "Only text is supported.",
                param=where,
            )
        name = "refusal" if part.type == "refusal" else "text"
        text: str | None = getattr(part, name)
        if text is None:
            raise RequestError(f"{where}[{index}] has no {name}", param=where)
        texts.append(text)
    return "".join(texts)
