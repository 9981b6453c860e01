"""A chat's messages as OpenAI's clients send them, checked one by one and converted for chat
templates.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import RequestError
from penstock.serve.body import wrong_choice
from penstock.serve.instructions import (
    PlainMessage,
    place_instructions,
    plain_call,
    replace_attachment,
)

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class ContentPart(msgspec.Struct):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct):
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the same, by OpenRouter's and vLLM's name
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


def plain_messages(messages: list[Message], omitted: list[str]) -> list[PlainMessage]:
    """The messages as chat templates expect them: plain values, and content that is text.

    Adds to `omitted` what tool results contained besides text.
    """
    plain = [_plain_message(m, f"messages[{i}]", omitted) for i, m in enumerate(messages)]
    return place_instructions(plain)


def _plain_message(message: Message, where: str, omitted: list[str]) -> PlainMessage:
    if message.role not in ROLES:
        raise wrong_choice(f"{where}.role", message.role, ROLES)
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{where} has no content", param=f"{where}.content")
    plain: PlainMessage = {
        "role": ROLES[message.role],
        "content": _plain_content(message, where, omitted),
    }
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.reasoning_content is None and isinstance(message.reasoning, str):
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            plain_call(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    return plain


def _plain_content(message: Message, where: str, omitted: list[str]) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts = []
    for index, part in enumerate(message.content):
        if part.type == "text" and part.text is not None:
            texts.append(part.text)
        elif message.role == "tool" and part.type != "text":
            texts.append(replace_attachment(part.type, f"{where}.content[{index}]", omitted))
        else:
            raise RequestError(
                f"{where}.content[{index}] is of type {part.type[:32]!r}",
                "Only text parts are supported.",
                param=f"{where}.content",
            )
    return "".join(texts)
