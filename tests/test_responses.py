"""The Responses API without a server: items and turns, the event state machine, the store."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState

from penstock.errors import (
    ContextLengthError,
    DeadlineError,
    OverloadedError,
    PenstockError,
    RequestError,
)
from penstock.serve.event_stream import HEARTBEAT_COMMENT
from penstock.serve.responses import runs as runs_module
from penstock.serve.responses.custom_tools import InputText
from penstock.serve.responses.items import COMPACTED, Item, Part, plain_messages, seal
from penstock.serve.responses.replies import ResponseChoice, ResponseReplyFormat, ScoreQueue
from penstock.serve.responses.requests import (
    PLAIN_FORM,
    ReplyForm,
    parse_response,
    response_request,
)
from penstock.serve.responses.runs import Events, Run, Runs
from penstock.serve.responses.store import (
    ResponseStore,
    UnknownConversationError,
    UnknownItemError,
    UnknownResponseError,
)
from penstock.serve.text_stream import ReplyDelta, ScoredToken, Usage
from penstock.text.chat_prompt import without_oldest
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
def test_effort_is_a_switch_and_a_budget(
    effort: str | None, switch: bool | None, budget: int | None
) -> None:
    body = json.dumps({"input": "x", "reasoning": {"effort": effort}}).encode()
    chat = response_request(parse_response(body), []).chat
    assert chat.template_arguments.get("enable_thinking") == switch
    assert (chat.thinking_budget, chat.effort_budget) == (None, budget)


@pytest.mark.parametrize(("sent", "used"), [(-1, 0), (0, 0), (7, 7)])
def test_a_top_k_of_minus_one_is_off_as_in_chats(sent: int, used: int) -> None:
    body = json.dumps({"input": "x", "top_k": sent}).encode()
    assert response_request(parse_response(body), []).chat.sampling.top_k == used


def test_the_model_gets_the_tools_that_clients_run() -> None:
    """As agents send them, among tools that a vendor's server would run. The response lists the
    model's tools: clients could not parse others without all fields.
    """
    tools = [
        {"type": "web_search"},
        {"type": "function", "name": "read_file", "parameters": {"type": "object"}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "custom", "name": "apply_patch"},
    ]
    asked = response_request(
        parse_response(json.dumps({"input": "x", "tools": tools}).encode()), []
    )
    assert asked.chat.tools is not None
    names = ["read_file", "apply_patch"]
    assert [tool["function"]["name"] for tool in asked.chat.tools] == names
    assert [tool["name"] for tool in asked.echo["tools"]] == names


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
def test_a_summary_is_asked_for_by_its_older_name_too(name: str) -> None:
    body = json.dumps({"input": "x", "reasoning": {name: "auto"}}).encode()
    asked = response_request(parse_response(body), [])
    assert asked.form.has_summary
    assert asked.echo["reasoning"]["summary"] == "auto"


def test_the_store_keeps_its_limits_of_number_bytes_and_age() -> None:
    now = 0.0
    items = [Item(role="user", content="x" * 50)]
    store = ResponseStore(max_records=3, max_bytes=1000, max_age_s=60.0, clock=lambda: now)
    for number in range(5):
        store.keep(f"resp_{number}", b"{}", items)
    assert len(store) == 3
    assert [item.content for item in store.items_of("resp_4", "x")] == [items[0].content]
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


def test_an_item_is_kept_once_and_goes_with_the_last_that_lists_it() -> None:
    store = ResponseStore()
    said = [Item(role="user", content="x" * 1000)]
    store.keep("resp_0", b"{}", said, num_inputs=1)
    (item_id,) = store.item_ids_of("resp_0")
    alone = store.num_bytes
    reply = Item(type="message", role="assistant", content="y", id="msg_1")
    store.keep("resp_1", b"{}", [*store.items_of("resp_0", "x"), reply], num_inputs=1)
    assert store.item_ids_of("resp_1") == [item_id, "msg_1"]
    assert store.item_ids_of("resp_1", is_input=True) == [item_id]
    assert store.num_bytes < alone + 300
    store.delete("resp_0")
    assert store.items_by_id([item_id])[0].content == "x" * 1000
    store.delete("resp_1")
    assert (len(store), store.num_bytes) == (0, 0)
    with pytest.raises(UnknownItemError, match="not found"):
        store.num_bytes_of_items([item_id])


def test_an_item_that_a_client_named_or_changed_is_another_one() -> None:
    """Other clients of its tenant could guess an id that a client has chosen."""
    store = ResponseStore()
    store.keep("resp_0", b"{}", [Item(role="user", content="secret", id="msg_1")], num_inputs=1)
    with pytest.raises(UnknownItemError):
        store.num_bytes_of_items(["msg_1"])
    (id,) = store.item_ids_of("resp_0")
    store.keep("resp_1", b"{}", [Item(role="user", content="other", id=id)], num_inputs=1)
    assert store.item_ids_of("resp_1") != [id]
    assert store.items_by_id([id])[0].content == "secret"


def test_a_conversation_grows_and_shrinks_within_the_limits() -> None:
    now = 0.0
    store = ResponseStore(max_age_s=60.0, clock=lambda: now)
    store.keep("conv_0", b"{}", [])
    store.keep("resp_0", b"{}", [])
    now = 50.0
    first, second = store.extend("conv_0", [Item(role="user", content=text) for text in "ab"])
    now = 100.0
    assert store.item_ids_of("conv_0") == [first, second]
    with pytest.raises(UnknownResponseError):
        store.body_of("resp_0")
    with pytest.raises(UnknownResponseError):
        store.require("conv_0", "response")
    with pytest.raises(UnknownConversationError):
        store.require("conv_0", "conversation", "somebody else")
    store.remove_item("conv_0", first)
    with pytest.raises(UnknownItemError):
        store.remove_item("conv_0", first)
    store.replace_body("conv_0", b"{...}")
    store.delete("conv_0")
    assert (len(store), store.num_bytes) == (0, 0)


def test_the_tenant_that_keeps_most_evicts_only_its_own_responses() -> None:
    small = [Item(role="user", content="x")]
    store = ResponseStore(max_records=8, max_bytes=10_000)
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
    for number in range(8):  # tenants that keep as much as others lose their own
        store.keep(f"third_{number}", b"{}", small, tenant="third")
    assert store.body_of("few_1", "few")


def test_a_conversation_that_outgrows_the_store_is_reported_as_gone() -> None:
    store = ResponseStore(max_bytes=1000)
    store.keep("conv_1", b"{}", [])
    store.extend("conv_1", [Item(role="user", content="x" * 500)])
    with pytest.raises(RequestError, match="in up to 1000 bytes"):
        store.extend("conv_1", [Item(role="user", content="x" * 500)])
    assert (len(store), store.num_bytes) == (0, 0)


def test_items_that_would_delay_all_requests_are_not_decoded() -> None:
    store = ResponseStore()
    many = [Part("input_text", "x")] * 20_000
    store.keep("conv_0", b"{}", [Item(role="user", content=many) for _ in range(2)])
    assert len(store.items_of("conv_0", None)) == 2
    store.extend("conv_0", [Item(role="user", content=many) for _ in range(4)])
    with pytest.raises(RequestError, match="too many values"):
        store.items_of("conv_0", None)


def test_events_of_runs_take_a_limited_number_of_bytes() -> None:
    async def fill() -> None:
        runs = Runs(max_event_bytes=8_000)
        for number in range(8):
            runs.add(f"resp_{number}", "", Run(reply_format(), lambda body: None, logs=True))
        readable = [number for number in range(8) if has_events(runs, f"resp_{number}")]
        assert readable == list(range(readable[0], 8))
        assert 0 < len(readable) < 8
        run = runs.find("resp_7", "")
        assert run is not None
        assert runs.find("resp_7", "somebody else") is None
        for _ in range(200):
            run.deliver(ReplyDelta(0, [ContentDelta("x" * 200)]))
        assert not has_events(runs, "resp_7")
        assert b"xxx" in run.body()

    def has_events(runs: Runs, id: str) -> bool:
        try:
            return runs.events_of(id).data is not None
        except RequestError:
            return False

    asyncio.run(fill())


def test_events_are_read_from_any_number_on_and_a_comment_comes_where_none_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs_module, "HEARTBEAT_EVERY_S", 0.01)

    async def read() -> None:
        events = Events()
        events.write(b"0\n\n1\n\n")
        first, late = events.read(0), events.read(3)
        assert await anext(first) == b"0\n\n1\n\n"
        assert await anext(first) == await anext(late) == HEARTBEAT_COMMENT
        events.write(b"2\n\n3\n\n")
        assert await anext(first) == b"2\n\n3\n\n"
        assert await anext(late) == b"3\n\n"
        events.has_ended = True
        assert [piece async for piece in late] == []
        events.drop()
        assert [piece async for piece in events.read(0)] == []

    asyncio.run(read())


@pytest.mark.parametrize("num_fitting", [0, 1, 2, 5, 6])
def test_truncation_keeps_the_system_prompt_and_as_many_turns_as_fit(num_fitting: int) -> None:
    system = [{"role": "system", "content": "S"}]
    turn = [{"role": "user"}, {"role": "assistant"}, {"role": "tool"}, {"role": "assistant"}]

    def require_fit(messages: list[dict[str, Any]]) -> None:
        assert messages[:2] == [*system, {"role": "user"}]
        if len(messages) > 1 + num_fitting * len(turn):
            raise ContextLengthError("too long")

    if num_fitting == 0:
        with pytest.raises(ContextLengthError):
            without_oldest([*system, *turn * 7], require_fit)
    else:
        assert without_oldest([*system, *turn * 7], require_fit) == [*system, *turn * num_fitting]


def text_part(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


ITEM_CASES: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        [
            {"role": "developer", "content": "A"},
            {"type": "message", "role": "system", "content": [text_part("B")]},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "C"},
                    {"type": "input_text", "text": "D"},
                ],
            },
        ],
        [{"role": "system", "content": "I\n\nA\n\nB"}, {"role": "user", "content": "CD"}],
    ),
    (
        [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "T"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "A"}],
            },
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x":1}'},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": ""},
            {"role": "assistant", "content": "B"},
            {
                "type": "function_call_output",
                "call_id": "2",
                "output": [{"type": "input_text", "text": "R"}],
            },
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
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "f", "arguments": {"x": 1}},
                    },
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

ITEM_CASES.append(
    (
        [
            {"type": "compaction", "encrypted_content": seal("S")},
            {"type": "reasoning", "summary": [], "encrypted_content": seal("T")},
            {"type": "custom_tool_call", "call_id": "1", "name": "sh", "input": 'echo "x"'},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "x"},
        ],
        [
            {"role": "system", "content": "I"},
            {"role": "user", "content": COMPACTED + "S"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "T",
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "sh", "arguments": {"input": 'echo "x"'}},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "1", "name": "sh", "content": "x"},
        ],
    )
)


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
DELTAS: dict[str, list[Delta]] = {
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


def reply_format(form: ReplyForm = PLAIN_FORM) -> ResponseReplyFormat:
    echo = response_request(parse_response(b'{"input": "x"}'), []).echo
    return ResponseReplyFormat("resp_" + "0" * 32, "tiny", echo, None, form)


@pytest.mark.parametrize("name", DELTAS)
@pytest.mark.parametrize("num_at_once", [1, 3, 100])
def test_whatever_comes_is_the_same_whole_and_streamed(name: str, num_at_once: int) -> None:
    deltas = DELTAS[name]
    pieces = [
        ReplyDelta(0, deltas[at : at + num_at_once]) for at in range(0, len(deltas), num_at_once)
    ]
    choice, formatter = ResponseChoice(), reply_format()
    for piece in pieces:
        choice.take(piece)
    whole = json.loads(reply_format().encode_body({0: choice}, USAGE))
    stream = b"".join(formatter.encode_chunk(piece) for piece in pieces) + formatter.encode_end(
        USAGE
    )
    events = parse_events(stream)
    assert without_chance(events[-1]["response"]) == without_chance(whole)
    found = [
        (
            item["type"],
            item.get("arguments", item.get("content", [{}])[0].get("text")),
            item["status"],
        )
        for item in ({"content": [{}], **item} for item in whole["output"])
    ]
    assert found == OUTPUTS[name]
    assert_well_formed(events, whole["output"])
    state: ResponseStreamState[Any] = ResponseStreamState(
        input_tools=openai.omit, text_format=openai.omit
    )
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
def test_a_stream_that_fails_reports_it_and_keeps_its_text(
    error: PenstockError, code: str, param: str | None
) -> None:
    formatter = reply_format()
    stream = formatter.encode_chunk(ReplyDelta(0, [ReasoningDelta("T"), ContentDelta("A")]))
    *_, told, failed = parse_events(stream + formatter.encode_failure(error))
    assert (told["type"], told["message"], told["param"]) == ("error", str(error), param)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": code, "message": str(error)}
    assert [item["status"] for item in failed["response"]["output"]] == ["completed", "incomplete"]
    assert failed["response"]["output"][1]["content"][0]["text"] == "A"


def streamed(
    deltas: list[Delta], form: ReplyForm
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events of a reply that arrives in pieces, and the items of its response."""
    formatter = reply_format(form)
    stream = b"".join(
        formatter.encode_chunk(ReplyDelta(0, [piece])) for piece in deltas
    ) + formatter.encode_end(USAGE)
    events = parse_events(stream)
    output = events[-1]["response"]["output"]
    assert_well_formed(events, output)
    return events, output


def test_a_summary_that_is_asked_for_is_the_thought_and_can_be_sent_back() -> None:
    deltas: list[Delta] = [
        ReasoningDelta("T"),
        ReasoningDelta("U"),
        ContentDelta("A"),
        ReplyEnd("stop"),
    ]
    events, (thought, _) = streamed(deltas, ReplyForm(has_summary=True))
    assert thought["summary"] == [{"type": "summary_text", "text": "TU"}]
    assert (thought["content"], thought["encrypted_content"]) == ([], seal("TU"))
    assert [event["type"].removeprefix("response.reasoning_summary_") for event in events[3:8]] == [
        "part.added",
        "text.delta",
        "text.delta",
        "text.done",
        "part.done",
    ]
    (sealed, _) = streamed(deltas, ReplyForm(is_sealed=True))[1]
    assert (sealed["content"][0]["text"], sealed["encrypted_content"]) == ("TU", seal("TU"))
    messages = plain_messages([], [Item(type="reasoning", encrypted_content=seal("TU"))], None)
    assert messages[0]["reasoning_content"] == "TU"
    assert plain_messages([], [Item(type="reasoning", encrypted_content="gAAAA")], None) == []


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (['{"input": "', "a", "b", '"}'], "ab"),
        (['{ "inp', 'ut" : "', "\\", "n\\u00", "e9", '\\"x"', "}"], '\né"x'),
        (['{"input":"\\ud83d', '\\ude00"}'], "\U0001f600"),
        (['{"input":"\\ud83dx"}'], "?x"),
        (['{"input": ""}'], ""),
        (['{"other": 1, ', '"input": "late"}'], "late"),
        (['{"other": 1}'], '{"other": 1}'),
        (["{}"], "{}"),
    ],
)
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_custom_tool_is_called_with_text(pieces: list[str], text: str, is_slow: bool) -> None:
    if is_slow:
        pieces = list("".join(pieces))
    whole = InputText()
    found = "".join([whole.feed(piece) for piece in pieces] + [whole.end()])
    assert found == text
    deltas = [
        ToolCallStart(0, "call_0", "sh"),
        *(ToolArguments(0, piece) for piece in pieces),
        ToolCallEnd(0),
    ]
    events, (call,) = streamed(
        [*deltas, ReplyEnd("tool_calls")], ReplyForm(custom_tools=frozenset({"sh"}))
    )
    assert (call["type"], call["input"]) == ("custom_tool_call", text)
    deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
    assert "".join(deltas) == text


def scored(*texts: str | bytes) -> list[ScoredToken]:
    datas = [text.encode() if isinstance(text, str) else text for text in texts]
    return [ScoredToken(data, -float(number), ()) for number, data in enumerate(datas)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([("a", ["a"]), (" b", [" b"])], [["a"], [" b"]]),
        ([("in", ["</think>", "\n\n", "in"])], [["in"]]),
        ([("", ["<"]), ("<a", ["a"])], [["<", "a"]]),
        ([("ab", ["abc"]), ("c", [])], [["abc"], []]),
        ([("é", [b"\xc3", b"\xa9"])], [["\ufffd", "\ufffd"]]),
        ([("\ufffd", [b"\xff"]), ("x", ["x"])], [["\ufffd"], ["x"]]),
    ],
)
def test_log_probabilities_go_with_the_text_of_their_tokens(
    steps: list[tuple[str, list[str | bytes]]], expected: list[list[str]]
) -> None:
    queue = ScoreQueue()
    taken = []
    for text, tokens in steps:
        queue.add(scored(*tokens))
        if text:
            taken.append([token.token for token in queue.take(text)])
    assert taken == expected


def test_a_stream_that_does_not_fit_the_context_fails_with_the_code_that_codex_looks_for() -> None:
    error = ContextLengthError("Too long", param="messages")
    failed = json.loads(reply_format().encode_failure(error).rpartition(b"data: ")[2])
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
