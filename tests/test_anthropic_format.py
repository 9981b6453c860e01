"""Anthropic's format, without a server: prompts from blocks, events and errors from deltas."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given, settings
from hypothesis import strategies as st

from anthropic_cases import (
    CALL_BLOCK,
    IDENTITY,
    NOTE,
    QUESTION,
    billed,
    events_in,
    in_order,
    result,
    text,
)
from penstock.errors import EngineDeadError, OverloadedError, PenstockError
from penstock.serve.answer import Choice
from penstock.serve.anthropic.replies import (
    MessageFormat,
    encode_error,
    encode_error_fields,
    error_status,
)
from penstock.serve.anthropic.requests import parse_messages
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
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

# Prompts


@pytest.mark.parametrize(
    "name",
    ["Read", "mcp__server__tool", "mcp__my-server__do_it", "a" * 128, "functions.get:1", "_", "-"],
)
def test_names_of_tools_that_clients_send_are_taken(name: str) -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}}]
    body = {"max_tokens": 1, "messages": QUESTION, "tools": tools}
    asked = parse_messages(json.dumps(body).encode(), None)
    assert asked.tools is not None
    assert asked.tools[0]["function"]["name"] == name


def prompt_of(**fields: Any) -> list[dict[str, Any]]:
    """The messages as the chat template gets them."""
    body = {"max_tokens": 1, **fields}
    return parse_messages(json.dumps(body).encode(), None).messages


CALLED = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "feed_pet", "arguments": {"pet": "Lena", "grams": 5}},
}


def plain(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def fed(content: str) -> dict[str, Any]:
    return plain("tool", content, tool_call_id="toolu_1", name="feed_pet")


USER = {"role": "user", "content": "Hi"}
ASKED = [USER, {"role": "assistant", "content": [CALL_BLOCK]}]
ASKED_PLAIN = [plain("user", "Hi"), plain("assistant", "", tool_calls=[CALLED])]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"system": "Be kind.", "messages": [USER]},
            [plain("system", "Be kind."), plain("user", "Hi")],
        ),
        (
            {"system": [text("Be kind."), text("Be brief.")], "messages": [USER]},
            [plain("system", "Be kind.\n\nBe brief."), plain("user", "Hi")],
        ),
        (
            {"messages": [{"role": "system", "content": "Be kind."}, USER]},
            [plain("system", "Be kind."), plain("user", "Hi")],
        ),
        (
            {"messages": [USER, {"role": "system", "content": "Be brief."}]},
            [plain("user", f"Hi\n\n{NOTE}")],
        ),
        (
            {"messages": [USER, {"role": "user", "content": [text("You?")]}]},
            [plain("user", "Hi\n\nYou?")],
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}, USER]},
            [plain("user", "Hi"), plain("assistant", ""), plain("user", "Hi")],
        ),
        (
            {"messages": [*ASKED, {"role": "user", "content": [result("done")]}]},
            [*ASKED_PLAIN, fed("done")],
        ),
        (
            {
                "messages": [
                    *ASKED,
                    {"role": "user", "content": [text(NOTE), result([text("a"), text("b")])]},
                ]
            },
            [*ASKED_PLAIN, fed("a\n\nb"), plain("user", NOTE)],
        ),
        (
            {"messages": [*ASKED, {"role": "user", "content": [result("no food", is_error=True)]}]},
            [*ASKED_PLAIN, fed("Error: no food")],
        ),
        (
            {"messages": [*ASKED, {"role": "user", "content": [result(None)]}, USER]},
            [*ASKED_PLAIN, fed(""), plain("user", "Hi")],
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                            {"type": "redacted_thinking", "data": "x"},
                            text("Wait."),
                            CALL_BLOCK,
                        ],
                    },
                    {"role": "user", "content": [result("done")]},
                ]
            },
            [
                plain("user", "Hi"),
                plain("assistant", "Wait.", reasoning_content="Hm.", tool_calls=[CALLED]),
                fed("done"),
            ],
        ),
    ],
)
def test_blocks_become_the_messages_of_a_template(
    fields: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    assert prompt_of(**fields) == expected


@pytest.mark.parametrize(
    "system_of",
    [
        lambda hash: [text(billed(hash)), text(IDENTITY)],
        lambda hash: [text(f"{billed(hash)}\n{IDENTITY}")],
        lambda hash: f"{billed(hash)}\n{IDENTITY}",
    ],
)
def test_a_billing_line_changes_no_token_of_the_prompt(system_of: Any) -> None:
    template, tokenizer = ChatTemplate.load(None), Tokenizer.load(None)
    prompts = [
        tokenizer.encode(template.render(prompt_of(system=system, messages=QUESTION)))
        for system in (system_of("71fea"), system_of("0aaa9"), IDENTITY)
    ]
    assert prompts[0] == prompts[1] == prompts[2]


# Errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (OverloadedError("The queue is full"), 529, "overloaded_error"),
        (EngineDeadError("The engine ended"), 529, "overloaded_error"),
        (PenstockError("It broke", "Badly."), 500, "api_error"),
    ],
)
def test_each_error_has_its_status_and_its_name(
    error: PenstockError, status: int, kind: str
) -> None:
    assert error_status(error.status) == status
    body = json.loads(encode_error(error, "r1"))
    assert body == {
        "type": "error",
        "error": {"type": kind, "message": str(error)},
        "request_id": "r1",
    }


def test_no_key_is_an_authentication_error() -> None:
    assert json.loads(encode_error_fields("No.", 401))["error"]["type"] == "authentication_error"


# Events

WORDS = st.text(min_size=1, max_size=6)


@st.composite
def replies(draw: st.DrawFn) -> list[Delta]:
    """The deltas of any reply: texts, thoughts, and calls that are complete or cut off."""
    deltas: list[Delta] = []
    num_calls = 0
    has_whole_call = False
    kinds = draw(st.lists(st.sampled_from("ttrrcb"), max_size=6))
    is_cut = draw(st.booleans())  # in a call, by a limit
    for kind in [*kinds, *"x" * is_cut]:
        if kind == "t":
            deltas.append(ContentDelta(draw(WORDS)))
        elif kind == "r":
            deltas.append(ReasoningDelta(draw(WORDS)))
        else:
            # A number at the cut may be incomplete: the SDK takes it, a body does not.
            values = WORDS if kind == "x" else st.integers() | WORDS
            arguments = json.dumps(draw(st.dictionaries(WORDS, values, max_size=3)))
            cut = draw(st.integers(0, len(arguments) - 1))
            is_broken = kind == "b"
            deltas.append(ToolCallStart(num_calls, f"call_{num_calls}", "f"))
            deltas += [ToolArguments(num_calls, piece) for piece in (arguments[:cut],) if piece]
            deltas += [ToolArguments(num_calls, arguments[cut:])] * (kind == "c")
            deltas.append(ToolCallEnd(num_calls, is_broken, kind == "x"))
            num_calls += 1
            has_whole_call |= kind == "c"
    return [*deltas, ReplyEnd("length" if is_cut else "tool_calls" if has_whole_call else "stop")]


USAGE = Usage(
    num_prompt_tokens=9, num_completion_tokens=5, num_cached_tokens=4, num_reasoning_tokens=2
)


def new_format(max_tokens: int = 100) -> MessageFormat:
    formatter = MessageFormat("1", "m", max_tokens)
    formatter.usage_so_far = lambda: USAGE
    return formatter


@settings(max_examples=40, deadline=None)
@given(replies(), st.randoms())
def test_events_are_in_order_and_add_up_to_the_body(
    deltas: list[Delta], chance: random.Random
) -> None:
    formatter = new_format()
    stream, rest = b"", list(deltas)
    while rest:
        num_pieces = chance.randint(1, len(rest))
        stream += formatter.encode_chunk(ReplyDelta(0, rest[:num_pieces]))
        del rest[:num_pieces]
    events = events_in((stream + formatter.encode_end(USAGE)).decode())
    assert in_order(events)
    message: Any = None
    buffers: dict[int, bytes] = {}
    for _, event in events:
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    broken = {
        f"call_{piece.index}"
        for piece in deltas
        if isinstance(piece, ToolCallEnd) and piece.is_broken
    }
    told = [
        block.to_dict() for block in message.content if getattr(block, "id", None) not in broken
    ]
    body = json.loads(new_format().encode_body({0: Choice(deltas=deltas)}, USAGE))
    assert body["stop_reason"] == message.stop_reason
    assert joined(body["content"]) == joined(told)


def joined(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges neighbours of one kind, unsigned: a broken call splits a text in a stream, not in a
    body.
    """
    found: list[dict[str, Any]] = []
    for block in blocks:
        block = {name: value for name, value in block.items() if name != "signature"}
        field = {"text": "text", "thinking": "thinking"}.get(block["type"])
        if field and found and found[-1]["type"] == block["type"]:
            found[-1][field] += block[field]
        else:
            found.append(block)
    return found


@pytest.mark.parametrize(
    ("end", "max_tokens", "expected"),
    [
        (ReplyEnd("stop"), 100, ("end_turn", None)),
        (ReplyEnd("stop", "END"), 100, ("stop_sequence", "END")),
        (ReplyEnd("tool_calls", "END"), 100, ("tool_use", None)),
        (ReplyEnd("length"), USAGE.num_completion_tokens, ("max_tokens", None)),
        (ReplyEnd("length"), 100, ("model_context_window_exceeded", None)),
        (ReplyEnd("length", is_loop=True), 100, ("max_tokens", None)),
    ],
)
def test_the_reason_why_a_reply_ended_is_reported(
    end: ReplyEnd, max_tokens: int, expected: tuple[str, str | None]
) -> None:
    body = json.loads(new_format(max_tokens).encode_body({0: Choice(deltas=[end])}, USAGE))
    assert (body["stop_reason"], body["stop_sequence"]) == expected


def test_a_stream_that_fails_ends_with_an_error_and_no_stop() -> None:
    formatter = new_format()
    stream = formatter.encode_chunk(ReplyDelta(0, [ContentDelta("Hi")]))
    stream += formatter.encode_failure(EngineDeadError("The engine ended"))
    *before, (kind, error) = events_in(stream.decode())
    assert [kind for kind, _ in before] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
    ]
    assert kind == "error"
    assert error["error"]["type"] == "overloaded_error"
    assert error["request_id"] == "1"
