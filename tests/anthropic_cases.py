"""Helpers for tests of Anthropic's API: content blocks as clients send them, and events."""

from __future__ import annotations

import json
import re
from typing import Any

QUESTION: list[Any] = [{"role": "user", "content": "What is 17 + 26? Reply with just the number."}]
NOTE = "<system-reminder>\nBe brief.\n</system-reminder>"
CALL_BLOCK = {
    "type": "tool_use",
    "id": "toolu_1",
    "name": "feed_pet",
    "input": {"pet": "Lena", "grams": 5},
}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}


def billed(hash: str) -> str:
    return (
        f"x-anthropic-billing-header: cc_version=2.1.117.{hash[:3]}; cc_entrypoint=cli; cch={hash};"
    )


IDENTITY = f"You are a coding agent. {'Follow the rules. ' * 40}"


def events_in(stream: str) -> list[tuple[str, dict[str, Any]]]:
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", stream)
    assert "".join(f"event: {kind}\ndata: {data}\n\n" for kind, data in found) == stream
    events = [(kind, json.loads(data)) for kind, data in found]
    assert all(kind == data["type"] for kind, data in events)
    return events


def in_order(events: list[tuple[str, dict[str, Any]]]) -> bool:
    """Checks that blocks are in order and numbered from 0, each with its start, deltas and stop."""
    letters = {"content_block_start": "(", "content_block_delta": "d", "content_block_stop": ")"}
    order = "".join(letters.get(kind, kind[8:] + " ") for kind, _ in events)
    starts = [data["index"] for kind, data in events if kind == "content_block_start"]
    block = -1
    for kind, data in events:
        block += kind == "content_block_start"
        if kind.startswith("content_block") and data["index"] != block:
            return False
    return bool(re.fullmatch(r"start (\(d*\))*delta stop ", order)) and starts == list(
        range(len(starts))
    )
