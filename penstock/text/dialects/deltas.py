"""The deltas that a parsed reply consists of, and the reply that they make together.

Between a call's start and its end come only its own arguments, so every delta belongs to the last
thing opened and an encoder needs no memory but that:

                   chat chunk               responses event                  Anthropic event
    ContentDelta   delta.content            output_text.delta                text_delta
    ReasoningDelta delta.reasoning_content  reasoning_text.delta             thinking_delta
    ToolCallStart  tool_calls[i] id, name   output_item.added                content_block_start
    ToolArguments  tool_calls[i] arguments  function_call_arguments.delta    input_json_delta
    ToolCallEnd    (nothing)                arguments.done, output_item.done content_block_stop
    ReplyEnd       finish_reason            response.completed, .incomplete  message_delta

Where items or blocks are numbered, a delta of another kind than the last closes one and opens the
next; such a block may start with white space that the whole content needs and the block does not.

A call is reported while it is written and may still turn out to be invalid. Its end then says
`is_broken`, and everything the model wrote of it is repeated as text. A body that is sent whole
drops such a call, as `ParsedReply` does; a stream that has sent its start can only close it.

A call in which the reply reaches its limit stays a call, as in every API: its arguments are the
beginning of a JSON object, its end says `is_cut`, and nothing of it is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from penstock.types import FinishReason


# Created for every token; a dataclass would take six times as long.
class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """Text of the reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A call of an offered tool. Indices count from 0 and are not used twice."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, gc=False):
    """A part of a call's arguments; joined, the parts are one JSON object, or its beginning if the
    call is cut."""

    index: int
    json: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False):
    """The call is complete, or is invalid, or the reply reached its limit inside it."""

    index: int
    is_broken: bool = False
    is_cut: bool = False


class ReplyEnd(msgspec.Struct, frozen=True, gc=False):
    """The last delta: why the reply ended; "tool_calls" is a stop after at least one complete
    call.
    """

    reason: FinishReason | Literal["tool_calls"]
    stop_string: str | None = None  # the client's stop string that ended the reply
    is_loop: bool = False  # it was ended because it only repeated itself
    stop_token_id: int | None = None  # the client's stop token that ended the reply

    @property
    def stop_reason(self) -> str | int | None:
        """vLLM's field: what stopped the reply; None if the model or a limit ended it."""
        if self.is_loop:
            return "loop_guard"
        return self.stop_token_id if self.stop_string is None else self.stop_string


Delta = ContentDelta | ReasoningDelta | ToolCallStart | ToolArguments | ToolCallEnd | ReplyEnd


@dataclass(slots=True)
class ParsedCall:
    id: str
    name: str
    arguments: str = ""  # JSON


@dataclass(slots=True)
class ParsedReply:
    """All deltas of a reply joined, for answers that are not streamed."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    reason: str | None = None
    stop_reason: str | int | None = None

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> ParsedReply:
        """Joins each text once, so that a long reply in small pieces takes linear time."""
        contents: list[str] = []
        thoughts: list[str] = []
        fragments: list[str] = []
        reply = cls()
        for delta in deltas:
            # Nearly all deltas are text, and `match` takes four times as long.
            if type(delta) is ContentDelta:
                contents.append(delta.text)
                continue
            if type(delta) is ReasoningDelta:
                thoughts.append(delta.text)
                continue
            match delta:
                case ToolCallStart(_, id, name):
                    reply.calls.append(ParsedCall(id, name))
                    fragments.clear()
                case ToolArguments(_, json):
                    fragments.append(json)
                case ToolCallEnd(_, is_broken=True):
                    reply.calls.pop()
                case ToolCallEnd():
                    reply.calls[-1].arguments = "".join(fragments)
                case ReplyEnd(reason):
                    reply.reason, reply.stop_reason = reason, delta.stop_reason
        reply.content, reply.reasoning = "".join(contents), "".join(thoughts)
        return reply

    def message(self) -> dict[str, Any]:
        """The message as in OpenAI's API, which chat templates expect."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message
