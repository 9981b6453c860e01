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
    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct):
    function: CalledFunction | None = None
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
    refusal: str | None = None  # an assistant's text, if it refused
    function_call: Any = None
    audio: Any = None


UNSUPPORTED = {
    "function_call": "Tool calls replaced it: use tool_calls, and the role tool for its result.",
    "audio": "This model reads only text: send what was said as content.",
}


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
    for name, advice in UNSUPPORTED.items():
        if getattr(message, name):
            param = f"{where}.{name}"
            raise RequestError(f"{param} is not supported", advice, param=param)
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
            _plain_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _plain_call(call: ToolCall, where: str) -> dict[str, Any]:
    if call.function is None:
        raise RequestError(
            f"{where} has no function"
            + ("" if call.type in (None, "function") else f", its type is {call.type[:32]!r}"),
            "Only calls of functions are supported.",
            param=f"{where}.function",
        )
    return plain_call(call.id, call.function.name, call.function.arguments)


def _plain_content(message: Message, where: str, omitted: list[str]) -> str:
    if message.content is None:
        return message.refusal or ""
    if isinstance(message.content, str):
        return message.content + (message.refusal or "")
    texts = [
        _part_text(part, message.role, f"{where}.content[{index}]", omitted)
        for index, part in enumerate(message.content)
    ]
    return "".join([*texts, message.refusal or ""])


def _part_text(part: ContentPart, role: str, where: str, omitted: list[str]) -> str:
    is_refusal = part.type == "refusal" and role == "assistant"
    if part.type != "text" and not is_refusal:
        if role == "tool":
            return replace_attachment(part.type, where, omitted)
        raise RequestError(
            f"{where} is of type {part.type[:32]!r}", "Only text parts are supported.", param=where
        )
    text = part.refusal if is_refusal else part.text
    if text is None:
        raise RequestError(f"{where} has no {part.type}", param=where)
    return text
