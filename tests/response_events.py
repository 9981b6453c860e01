"""Parses streams of the Responses API, and checks the invariants of every stream."""

from __future__ import annotations

import json
import re
from typing import Any

import pydantic
from openai.types.responses import ResponseStreamEvent

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def parse_events(stream: bytes) -> list[dict[str, Any]]:
    """Checks that each event has the openai package's type and the next sequence number."""
    *blocks, rest = stream.decode().split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def transcript(events: list[dict[str, Any]]) -> str:
    """Normalizes events for a recording: deltas are joined, since where the engine cuts a text may
    vary.
    """
    told: list[dict[str, Any]] = []
    for event in without_chance(events):
        del event["sequence_number"]
        if event["type"].endswith(".delta") and told[-1]["type"] == event["type"]:
            told[-1]["delta"] += event["delta"]
        else:
            told.append(event)
    return "".join(f"{json.dumps(event)}\n" for event in told)


def without_chance(value: Any) -> Any:
    """Removes what differs between two equal requests: ids, times, cached tokens."""
    text = json.dumps(value)
    text = re.sub(r'"(resp|msg|rs|fc|ctc)_[0-9a-f]{32}', r'"\1', text)
    text = re.sub(r'"call_[0-9a-f]{24}"', '"call"', text)
    text = re.sub(r'"(created_at|completed_at|cached_tokens)": \d+', r'"\1": 0', text)
    return json.loads(text)


def assert_well_formed(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Checks that one item is open at a time, its deltas are its text, and the response has all
    items.
    """
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    done: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    text = ""
    num_items = 0
    for event in events[2:-1]:
        match event["type"]:
            case "response.output_item.added":
                assert open_item is None
                assert event["output_index"] == num_items
                open_item, text = event["item"], ""
                num_items += 1
            case "response.output_item.done":
                assert open_item is not None
                assert event["item"]["id"] == open_item["id"]
                is_whole = event["item"]["status"] == "completed"
                if (
                    not event["item"]["type"].endswith("call")
                    or is_whole
                    or event["item"] in output
                ):
                    done.append(event["item"])
                open_item = None
            case kind:
                assert open_item is not None
                assert event["item_id"] == open_item["id"]
                if kind.endswith(".delta"):
                    text += event["delta"]
                elif kind.endswith(("text.done", "arguments.done", "input.done")):
                    (said,) = (
                        event[name] for name in ("text", "arguments", "input") if name in event
                    )
                    assert said == text
    assert open_item is None
    assert done == output
    called = [event["item_id"] for event in events if event["type"].endswith("arguments.done")]
    calls = [item for item in output if item["type"] == "function_call"]
    assert called == [item["id"] for item in calls if item["status"] == "completed"]
