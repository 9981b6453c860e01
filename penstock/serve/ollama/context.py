"""The `context` of /api/generate: a conversation as a list of numbers, which the client sends back.

Ollama's contains tokens. Clients do not look inside, so here it contains the messages: the chat
template renders the next prompt from them, as any other.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import RequestError

NUMBER = "H"  # of two bytes: every client's integers can hold it
MARK = b"penstock"  # prefix of all of them


class SaidMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[dict[str, Any]]

    def context_with(self, reply: str) -> list[int]:
        """Without reasoning, which templates leave out of earlier turns."""
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
            "context does not come from this server",
            "A context is an encoded conversation of the server that answered.",
            "Send the context of an answer of this server, or use /api/chat.",
            param="context",
        ) from error
    return [msgspec.to_builtins(message) for message in messages]
