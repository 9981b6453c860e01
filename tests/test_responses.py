"""The Responses API without a server: items and turns, the machine that makes events, the store."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState

from penstock.errors import ContextLengthError, DeadlineError, OverloadedError, PenstockError, RequestError
from penstock.serve.answer import Choice
from penstock.serve.responses.items import Item, plain_messages
from penstock.serve.responses.replies import ResponseReplyFormat
from penstock.serve.responses.requests import parse_response, response_request
from penstock.serve.responses.store import ResponseStore, UnknownResponseError
from penstock.serve.text_stream import ReplyDelta, Usage
from penstock.text.dialects import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ReplyEnd,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
)
from response_events import EVENT, assert_well_formed, parse_events, without_chance


@pytest.mark.parametrize(
    ("effort", "switch", "budget"),
    [
        (None, None, None),
        ("none", False, None),
        ("minimal", False, None),
        ("low", True, 2048),
        ("medium", True, 8192),
        ("high", True, None),
    ],
)
def test_effort_is_a_switch_and_a_budget(effort: str | None, switch: bool | None, budget: int | None) -> None:
    body = json.dumps({"input": "x", "reasoning": {"effort": effort}}).encode()
    chat = response_request(parse_response(body), []).chat
    assert chat.template_arguments.get("enable_thinking") == switch
    assert (chat.thinking_budget, chat.effort_budget) == (None, budget)


@pytest.mark.parametrize(("sent", "used"), [(-1, 0), (0, 0), (7, 7)])
def test_a_top_k_of_minus_one_is_off_as_in_chats(sent: int, used: int) -> None:
    body = json.dumps({"input": "x", "top_k": sent}).encode()
    assert response_request(parse_response(body), []).chat.sampling.top_k == used


def test_the_model_is_told_of_functions_only() -> None:
    """As agents offer them, among tools that a vendor's server would run."""
    tools = [
        {"type": "web_search"},
        {"type": "function", "name": "read_file", "parameters": {"type": "object"}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "custom", "name": "apply_patch"},
    ]
    chat = response_request(parse_response(json.dumps({"input": "x", "tools": tools}).encode()), []).chat
    assert chat.tools is not None
    assert [tool["function"]["name"] for tool in chat.tools] == ["read_file"]


def test_the_store_keeps_its_limits_of_number_bytes_and_age() -> None:
    now = 0.0
    items = [Item(role="user", content="x" * 50)]
    store = ResponseStore(max_responses=3, max_bytes=1000, max_age_s=60.0, clock=lambda: now)
    for number in range(5):
        store.keep(f"resp_{number}", b"{}", items)
    assert len(store) == 3
    assert store.items_of("resp_4", "x") == items
    with pytest.raises(UnknownResponseError):
        store.body_of("resp_1")
    now = 59.0
    store.keep("resp_5", b"y" * 700, [])
    assert len(store) == 3
    store.keep("resp_6", b"z" * 500, [])
    assert (len(store), store.body_of("resp_6")) == (1, b"z" * 500)
    now = 118.0
    assert store.body_of("resp_6")
    now = 120.0
    with pytest.raises(UnknownResponseError):
        store.body_of("resp_6")
    store.keep("resp_7", b"y" * 1001, [])
    assert (len(store), store.num_bytes) == (0, 0)


def test_who_keeps_most_makes_nobody_elses_responses_go() -> None:
    small = [Item(role="user", content="x")]
    store = ResponseStore(max_responses=8, max_bytes=10_000)
    for name in ("few_0", "few_1"):
        store.keep(name, b"{}", small, tenant="few")
    for number in range(20):
        store.keep(f"many_{number}", b"{}", small, tenant="many")
    assert len(store) == 8
    assert store.items_of("many_14", "x", "many")
    for number in range(20):
        store.keep(f"large_{number}", b"y" * 3000, [], tenant="large")
    store.keep("huge", b"z" * 10_001, [], tenant="huge")
    assert store.body_of("few_0", "few") == store.body_of("few_1", "few") == b"{}"
    assert store.body_of("large_19", "large")
    with pytest.raises(UnknownResponseError):
        store.body_of("huge", "huge")
    assert store.num_bytes <= 10_000
    for number in range(8):  # those with as much as others have lose their own
        store.keep(f"third_{number}", b"{}", small, tenant="third")
    assert store.body_of("few_1", "few")


def text_part(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


ITEM_CASES: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        [
            {"role": "developer", "content": "A"},
            {"type": "message", "role": "system", "content": [text_part("B")]},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "C"}, {"type": "input_text", "text": "D"}],
            },
        ],
        [{"role": "system", "content": "I\n\nA\n\nB"}, {"role": "user", "content": "CD"}],
    ),
    (
        [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x":1}'},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": ""},
            {"role": "assistant", "content": "B"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "R"}]},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "S"}],
                "encrypted_content": "E",
            },
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
            {"role": "assistant", "content": "Yes"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "U"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "V"}]},
        ],
        [
            {"role": "system", "content": "I"},
            {
                "role": "assistant",
                "content": "A\n\nB",
                "reasoning_content": "T",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                    {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
                ],
            },
            {"role": "tool", "tool_call_id": "2", "name": "g", "content": "R"},
            {"role": "assistant", "content": "No"},
            {"role": "assistant", "content": "Yes"},
            {"role": "assistant", "content": "", "reasoning_content": "UV"},
        ],
    ),
]


@pytest.mark.parametrize(("items", "messages"), ITEM_CASES)
@pytest.mark.parametrize("num_kept", [0, 1, 3])
def test_items_make_turns_wherever_the_conversation_is_cut(
    items: list[dict[str, Any]], messages: list[dict[str, Any]], num_kept: int
) -> None:
    body = json.dumps({"input": items}).encode()
    parsed = parse_response(body).input
    assert isinstance(parsed, list)
    assert plain_messages(parsed[:num_kept], parsed[num_kept:], "I") == messages


USAGE = Usage(9, 5, 4, 2)
NEWS: dict[str, list[Delta]] = {
    "nothing": [ReplyEnd("stop")],
    "only a thought": [ReasoningDelta("T"), ReplyEnd("stop")],
    "text around a call": [
        ContentDelta("A"),
        ToolCallStart(0, "call_0", "f"),
        ToolArguments(0, '{"x":'),
        ToolArguments(0, "1}"),
        ToolCallEnd(0),
        ContentDelta("\n\nB"),
        ContentDelta(" C"),
        ReplyEnd("tool_calls"),
    ],
    "a broken call": [
        ContentDelta("A"),
        ToolCallStart(0, "call_0", "f"),
        ToolArguments(0, '{"x":'),
        ToolCallEnd(0, is_broken=True),
        ContentDelta("\n<tool_call>"),
        ToolCallStart(1, "call_1", "f"),
        ToolArguments(1, "{}"),
        ToolCallEnd(1),
        ReplyEnd("tool_calls"),
    ],
    "a call broken off in a thought": [
        ReasoningDelta("  T"),
        ToolCallStart(0, "call_0", "f"),
        ToolCallEnd(0, is_broken=True),
        ReasoningDelta("<tool_call>"),
        ReplyEnd("length"),
    ],
    "a call cut off": [
        ContentDelta("A"),
        ToolCallStart(0, "call_0", "f"),
        ToolArguments(0, '{"x": "y'),
        ToolCallEnd(0, is_cut=True),
        ReplyEnd("length"),
    ],
}
OUTPUTS = {
    "nothing": [("message", "", "completed")],
    "only a thought": [("reasoning", "T", "completed"), ("message", "", "completed")],
    "text around a call": [
        ("message", "A", "completed"),
        ("function_call", '{"x":1}', "completed"),
        ("message", "B C", "completed"),
    ],
    "a broken call": [
        ("message", "A", "completed"),
        ("message", "<tool_call>", "completed"),
        ("function_call", "{}", "completed"),
    ],
    "a call broken off in a thought": [
        ("reasoning", "  T", "completed"),
        ("reasoning", "<tool_call>", "incomplete"),
    ],
    "a call cut off": [("message", "A", "completed"), ("function_call", '{"x": "y', "incomplete")],
}


def reply_format() -> ResponseReplyFormat:
    echo = response_request(parse_response(b'{"input": "x"}'), []).echo
    return ResponseReplyFormat("resp_" + "0" * 32, "tiny", echo, None)


@pytest.mark.parametrize("name", NEWS)
@pytest.mark.parametrize("num_at_once", [1, 3, 100])
def test_whatever_comes_is_the_same_whole_and_streamed(name: str, num_at_once: int) -> None:
    news = NEWS[name]
    whole = json.loads(reply_format().encode_body({0: Choice(news)}, USAGE))
    style = reply_format()
    pieces = [ReplyDelta(0, news[at : at + num_at_once]) for at in range(0, len(news), num_at_once)]
    stream = b"".join(style.encode_chunk(piece) for piece in pieces) + style.encode_end(USAGE)
    events = parse_events(stream)
    assert without_chance(events[-1]["response"]) == without_chance(whole)
    found = [
        (item["type"], item.get("arguments", item.get("content", [{}])[0].get("text")), item["status"])
        for item in ({"content": [{}], **item} for item in whole["output"])
    ]
    assert found == OUTPUTS[name]
    assert_well_formed(events, whole["output"])
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))


@pytest.mark.parametrize(
    ("error", "code", "param"),
    [
        (PenstockError("Broken"), "server_error", None),
        (OverloadedError("Full"), "rate_limit_exceeded", None),
        (DeadlineError("Late"), "server_error", None),
        (RequestError("Too hard", param="response_format"), "invalid_prompt", "text.format"),
    ],
)
def test_a_stream_that_fails_says_so_and_keeps_what_was_said(
    error: PenstockError, code: str, param: str | None
) -> None:
    style = reply_format()
    stream = style.encode_chunk(ReplyDelta(0, [ReasoningDelta("T"), ContentDelta("A")]))
    *_, told, failed = parse_events(stream + style.encode_failure(error))
    assert (told["type"], told["message"], told["param"]) == ("error", str(error), param)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": code, "message": str(error)}
    assert [item["status"] for item in failed["response"]["output"]] == ["completed", "incomplete"]
    assert failed["response"]["output"][1]["content"][0]["text"] == "A"


def test_a_stream_that_does_not_fit_the_context_fails_with_the_code_that_codex_looks_for() -> None:
    error = ContextLengthError("Too long", param="messages")
    failed = json.loads(reply_format().encode_failure(error).rpartition(b"data: ")[2])
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
