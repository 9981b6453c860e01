"""A conversation whose last turn is the assistant's, with the check that accepts a right turn.

All messages before the last are the prompt; the last is the target of training and the expected
answer of a gate. Messages and tools are OpenAI's dicts and shared between conversations: they must
not be changed. As JSON, a conversation is a line of `assets/held_out.jsonl.gz`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgspec

from penstock.eval.reply import CALL_START, THOUGHT_END, TURN_END, Call, Reply, write_calls

Message = dict[str, Any]
Tool = dict[str, Any]


class Check(Protocol):
    def accepts(self, reply: Reply) -> bool: ...


@dataclass(frozen=True, slots=True)
class FinalNumber:
    """The number after the last `####` is this one."""

    value: int

    def accepts(self, reply: Reply) -> bool:
        _, mark, number = reply.content.rpartition("####")
        return bool(mark) and number.strip().replace(",", "").lstrip("$") == str(self.value)


@dataclass(frozen=True, slots=True)
class ExactText:
    """The content is this text and no tool is called."""

    text: str

    def accepts(self, reply: Reply) -> bool:
        return not reply.calls and reply.content.strip() == self.text


@dataclass(frozen=True, slots=True)
class ExactCalls:
    """Exactly these calls are made, in any order."""

    calls: tuple[Call, ...]

    def accepts(self, reply: Reply) -> bool:
        left = list(reply.calls)
        for wanted in self.calls:
            match = next((call for call in left if wanted.equals(call)), None)
            if match is None:
                return False
            left.remove(match)
        return not left


@dataclass(frozen=True, slots=True)
class Mentions:
    """The answer is text, contains each of `values` as separate words, and none of `others`.

    Without `others`, a model that recites the whole prompt would seem to know the answer. A call
    that cannot be parsed is not text either.
    """

    values: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def accepts(self, reply: Reply) -> bool:
        said = f" {_spaced(reply.content)} "
        wanted = [_spaced(value) for value in self.values]
        # If "Sky Blue" is expected and "Blue" is one of the others, "Blue" inside the expected
        # value is not a second answer.
        others = [
            other
            for other in map(_spaced, self.others)
            if not any(other in value for value in wanted)
        ]
        return (
            not reply.calls
            and CALL_START not in reply.content
            and bool(said.strip())
            and all(f" {value} " in said for value in wanted)
            and not any(f" {other} " in said for other in others)
        )


CHECKS: dict[str, type[Check]] = {
    kind.__name__: kind for kind in (FinalNumber, ExactText, ExactCalls, Mentions)
}


@dataclass(frozen=True, slots=True)
class Conversation:
    kind: str
    messages: tuple[Message, ...]
    check: Check
    enable_thinking: bool
    tools: tuple[Tool, ...] | None = None

    @property
    def prompt(self) -> tuple[Message, ...]:
        return self.messages[:-1]

    @property
    def completion(self) -> str:
        """The last turn as the model must write it after the generation prompt, with its end."""
        turn = self.messages[-1]
        text: str = turn["content"]
        if calls := turn.get("tool_calls"):
            text = f"{text}\n\n{write_calls(calls)}" if text else write_calls(calls)
        if self.enable_thinking:
            text = f"{turn['reasoning_content']}\n{THOUGHT_END}\n\n{text}"
        return text + TURN_END

    def as_json(self) -> dict[str, Any]:
        check = {"type": type(self.check).__name__, **asdict(self.check)}  # type: ignore[call-overload]
        fields = {"kind": self.kind, "thinking": self.enable_thinking, "check": check}
        return fields | {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Conversation:
        tools = fields.get("tools")
        return cls(
            kind=fields["kind"],
            messages=tuple(fields["messages"]),
            check=msgspec.convert(fields["check"], CHECKS[fields["check"]["type"]]),
            enable_thinking=fields["thinking"],
            tools=tuple(tools) if tools else None,
        )

    def accepts(self, text: str) -> bool:
        """Whether `text`, written after the generation prompt, is a right last turn."""
        return self.check.accepts(self.read(text))

    def read(self, text: str) -> Reply:
        return Reply.from_text(text, is_thinking=self.enable_thinking, tools=self.tools)


def _spaced(text: str) -> str:
    """The text with everything except letters, digits, - and _ replaced by single spaces."""
    kept = "".join(c if c.isalnum() or c in "-_" else " " for c in text)
    return " ".join(kept.split())
