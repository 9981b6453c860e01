"""A model's reply, and the Qwen3.5 text format of reasoning and tool calls, written and parsed.

A server may split a reply into reasoning, content and tool calls, or return the bare text; both
become the same `Reply`. The checks of conversation.py judge a reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

THOUGHT_END = "</think>"
TURN_END = "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one tool, with arguments of the types in its schema."""

    name: str
    arguments: Mapping[str, Any]

    def equals(self, other: Call) -> bool:
        """Same tool, same arguments, same types: true is not 1, though 2 is 2.0."""
        return (
            self.name == other.name
            and self.arguments.keys() == other.arguments.keys()
            and all(_same(value, other.arguments[name]) for name, value in self.arguments.items())
        )


@dataclass(frozen=True, slots=True)
class Reply:
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str = "stop"
    # With thinking: exactly one block, and it ended. Without: none at all.
    is_thought_closed: bool = True

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        is_thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        finish_reason: str = "stop",
    ) -> Reply:
        """A reply as generated after the prompt, which has already opened thinking if it is on."""
        text = text.removesuffix(TURN_END)
        num_ends = text.count(THOUGHT_END)
        thought, _, answer = text.rpartition(THOUGHT_END)
        if is_thinking and not num_ends:  # cut off inside thinking: there is no answer
            thought, answer = text, ""
        content, calls = parse_calls(answer, tools or ())
        return cls(
            content=content.strip(),
            reasoning=thought.removeprefix("<think>").strip(),
            calls=calls,
            finish_reason=finish_reason,
            is_thought_closed=num_ends == int(is_thinking),
        )

    @classmethod
    def from_message(
        cls,
        message: Mapping[str, Any],
        finish_reason: str,
        *,
        is_thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Reply:
        """A reply as a server returned it over the OpenAI API."""
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        is_in_text = is_thinking and not reasoning
        found = cls.from_text(
            text, is_thinking=is_in_text, tools=tools, finish_reason=finish_reason
        )
        calls = tuple(_call_of(entry["function"]) for entry in message.get("tool_calls") or ())
        return replace(found, reasoning=reasoning or found.reasoning, calls=calls or found.calls)


def write_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """OpenAI's tool calls in the model's own format."""
    return "\n".join(_write_call(call["function"]) for call in calls)


def _write_call(function: Mapping[str, Any]) -> str:
    parameters = "".join(
        f"<parameter={name}>\n{_write_value(value)}\n</parameter>\n"
        for name, value in function["arguments"].items()
    )
    return f"{CALL_START}\n<function={function['name']}>\n{parameters}</function>\n{CALL_END}"


def _write_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[Call, ...]]:
    """The text before the calls, and the calls. A call that cannot be parsed stays text."""
    content, *blocks = text.split(CALL_START)
    types = {
        tool["function"]["name"]: {
            name: schema.get("type", "string")
            for name, schema in tool["function"].get("parameters", {}).get("properties", {}).items()
        }
        for tool in tools
    }
    calls = []
    for block in blocks:
        call = _parse_call(block, types)
        if call is None:
            return text, ()
        calls.append(call)
    return content, tuple(calls)


def _parse_call(block: str, types: Mapping[str, Mapping[str, str]]) -> Call | None:
    body, end, rest = block.partition(CALL_END)
    head, opened, body = body.strip().partition(">\n")
    if not (end and opened and head.startswith("<function=") and body.endswith("</function>")):
        return None
    if rest.strip():
        return None
    name = head.removeprefix("<function=")
    arguments = {}
    for piece in body.removesuffix("</function>").split("</parameter>\n"):
        if not piece.strip():
            continue
        label, opened, value = piece.partition(">\n")
        if not (opened and label.startswith("<parameter=")):
            return None
        parameter = label.removeprefix("<parameter=")
        kind = types.get(name, {}).get(parameter, "string")
        arguments[parameter] = _typed(value.removesuffix("\n"), kind)
    return Call(name, arguments)


READERS: Mapping[str, Callable[[str], Any]] = {
    "integer": int,
    "number": float,
    "boolean": lambda text: {"true": True, "false": False}[text.lower()],
    "array": json.loads,
    "object": json.loads,
}


def _typed(text: str, kind: str) -> Any:
    """The text as a value of the schema's type; if none fits, the text, which no check accepts."""
    try:
        return READERS[kind](text) if kind in READERS else text
    except (ValueError, KeyError):
        return text


def _call_of(function: Mapping[str, Any]) -> Call:
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return Call(function["name"], arguments if isinstance(arguments, dict) else {})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
