"""Compaction: a long conversation becomes its user messages and the model's summary of the rest.

The summary is an opaque item that clients send back like any other. The oldest messages are left
out if all of them do not fit the context.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from penstock.errors import PenstockError
from penstock.serve.answer import Choice
from penstock.serve.body import decode_body
from penstock.serve.fields import COMPACT, FieldTable
from penstock.serve.responses.items import Item, Items, seal, shown
from penstock.serve.responses.replies import usage_fields
from penstock.serve.responses.requests import Reasoning, ResponseBody, sent_items
from penstock.serve.responses.store import new_id
from penstock.serve.text_stream import ReplyDelta, Usage
from penstock.text.dialects import ParsedReply

ASK = (
    "Summarise our conversation for someone who goes on with it and has not read it: the goal, "
    "what was done and found, decisions with their reasons, names, paths and numbers that are "
    "still needed, and what is left to do. Reply with the summary alone."
)
KEPT_ROLES = ("user", "system", "developer")


class CompactBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None


def parse_compact(body: bytes, table: FieldTable = COMPACT) -> ResponseBody:
    """The request for a summary."""
    fields = decode_body(body, CompactBody, table=table)
    asked = ResponseBody(
        input=fields.input,
        instructions=fields.instructions,
        previous_response_id=fields.previous_response_id,
        prompt_cache_key=fields.prompt_cache_key,
        reasoning=Reasoning(effort="none"),
        truncation="auto",
        store=False,
    )
    asked.input = [*sent_items(asked), Item(role="user", content=ASK)]
    return asked


class CompactionFormat:
    """A compacted response; it is not streamed."""

    def __init__(self, items: Sequence[Item]) -> None:
        *said, _ = items  # the last item is `ASK`
        self._kept = [item for item in said if item.role in KEPT_ROLES]

    def encode_body(self, choices: dict[int, Choice], usage: Usage) -> bytes:
        summary = ParsedReply.of(choices[0].deltas).content
        token = new_id("cmp")
        compaction = {"id": token, "type": "compaction", "encrypted_content": seal(summary)}
        messages = [
            {**shown(item), "id": item.id or f"msg_{token.removeprefix('cmp_')}_{index}"}
            for index, item in enumerate(self._kept)
        ]
        return msgspec.json.encode(
            {
                "id": new_id(),
                "object": "response.compaction",
                "created_at": int(time.time()),
                "output": [*messages, compaction],
                "usage": usage_fields(usage),
            }
        )

    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        raise NotImplementedError

    def encode_heartbeat(self) -> bytes:
        raise NotImplementedError

    def encode_end(self, usage: Usage) -> bytes:
        raise NotImplementedError

    def encode_failure(self, error: PenstockError) -> bytes:
        raise NotImplementedError
