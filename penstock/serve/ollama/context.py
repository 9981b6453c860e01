"""The `context` of /api/generate: a conversation as a list of numbers, which the client sends back.

Ollama's holds tokens. Clients do not look inside, so here it holds the messages: the next prompt is rendered
from them by the chat template, as every other.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import RequestError

NUMBER = "H"  # of two bytes: every client's integers hold it
MARK = b"penstock"  # what all of them begin with


class SaidMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[dict[str, Any]]

    def context_with(self, reply: str) -> list[int]:
        """Without its thoughts, which templates leave out of what was said before."""
        said = [*self.messages, {"role": "assistant", "content": reply}]
        data = MARK + msgspec.json.encode(said)
        data += b" " * (len(data) % 2)
        return array(NUMBER, data).tolist()


def decode_context(numbers: list[int]) -> list[dict[str, Any]]:
    try:
        data = array(NUMBER, numbers).tobytes()
        if not data.startswith(MARK):
            raise ValueError
        messages = msgspec.json.decode(data[len(MARK) :], type=list[SaidMessage])
    except (ValueError, OverflowError, msgspec.DecodeError) as error:
        raise RequestError(
            "context is none that this server gave",
            "It holds a conversation in a form of its own.",
            "Send the one of an answer from here, or use /api/chat.",
            param="context",
        ) from error
    return [msgspec.to_builtins(message) for message in messages]
