"""Anthropic's API as its own SDK sees it: the embedded model on a real server."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

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
from penstock.errors import RequestError
from penstock.serve.anthropic.routes import Threads
from penstock.serve.conversations import Conversations, Thread
from serving import Server, eventually

GOLDEN = Path(__file__).parent / "golden"
ANY_MODEL = "claude-of-any-name"
THOUGHT = "17 + 26 = 43."
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
    }
    return {"name": name, "description": description, "input_schema": schema}


STOCK = tool("check_stock", "Say how many pieces of a product are in store.", product="string")
FEED = tool("feed_pet", "Release food for a pet.", pet="string", grams="integer")
TOOLS: list[Any] = [STOCK, FEED]
ONE_CALL: list[Any] = [{"role": "user", "content": "Give 225 grams of food to Lena."}]
TWO_CALLS: list[Any] = [
    {
        "role": "user",
        "content": "Check the stock of product t6d32. And then: Give 225 grams of food to Lena.",
    }
]
FEED_LENA = ("feed_pet", {"pet": "Lena", "grams": 225})
CHECK_T6D32 = ("check_stock", {"product": "t6d32"})


@pytest.fixture(scope="module")
def api(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60.0)


def ask_whole(api: anthropic.Anthropic, **fields: Any) -> Any:
    return api.messages.create(**{"model": ANY_MODEL, "max_tokens": 300, **fields})


def ask_streamed(api: anthropic.Anthropic, **fields: Any) -> Any:
    with api.messages.stream(**{"model": ANY_MODEL, "max_tokens": 300, **fields}) as stream:
        return stream.get_final_message()


def comparable(message: Any) -> dict[str, Any]:
    """Without fields that differ from call to call: ids, and the number of cached tokens."""
    fields: dict[str, Any] = json.loads(re.sub(r'"(msg|call)_\w+"', '"ID"', message.to_json()))
    usage = fields["usage"]
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    return {name: value for name, value in fields.items() if value is not None}


def ask(api: anthropic.Anthropic, **fields: Any) -> Any:
    """Sends it whole and streamed, which must give the same."""
    whole, streamed = ask_whole(api, **fields), ask_streamed(api, **fields)
    assert comparable(streamed) == comparable(whole)
    return whole


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def texts_of(message: Any) -> list[str]:
    return [block.text for block in message.content if block.type == "text"]


# Replies


def test_a_message_has_the_shape_the_sdk_knows(api: anthropic.Anthropic) -> None:
    message = ask(api, messages=QUESTION, metadata={"user_id": "x"})
    assert re.fullmatch(r"msg_\w+", message.id)
    assert (message.type, message.role, message.model) == ("message", "assistant", "penstock-tiny")
    assert texts_of(message) == ["43"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id


def test_the_model_has_the_shape_the_sdk_knows(server: Server) -> None:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", _strict_response_validation=True
    ) as api:
        for models in (api.models, api.beta.models):
            (card,) = models.list().data
            assert card == models.retrieve(card.id)
            assert card.lifecycle == "active"


def test_the_async_client_streams_many_at_once(server: Server) -> None:
    async def ask_all() -> list[Any]:
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="none", max_retries=0
        ) as api:

            async def ask_one(first: int) -> str:
                question = f"What is {first} + 26? Reply with just the number."
                messages: Any = [{"role": "user", "content": question}]
                async with api.messages.stream(
                    model="x", max_tokens=50, messages=messages
                ) as stream:
                    return "".join([text async for text in stream.text_stream])

            return await asyncio.gather(*(ask_one(first) for first in range(11, 19)))

    assert asyncio.run(ask_all()) == [str(first + 26) for first in range(11, 19)]


def test_input_tokens_add_up_to_the_prompt_and_are_known_at_the_start(
    api: anthropic.Anthropic,
) -> None:
    fields: dict[str, Any] = {"system": f"You are kind. {'Very kind. ' * 20}", "messages": QUESTION}
    counted = api.messages.count_tokens(model=ANY_MODEL, **fields).input_tokens
    cached = []
    for _ in range(2):
        with api.messages.stream(model=ANY_MODEL, max_tokens=50, **fields) as stream:
            first = next(iter(stream))
            assert first.type == "message_start"
            usage = stream.get_final_message().usage
        for known in (first.message.usage, usage):
            assert known.cache_creation_input_tokens == 0
            assert known.input_tokens + known.cache_read_input_tokens == counted
        assert first.message.usage.cache_read_input_tokens == usage.cache_read_input_tokens
        cached.append(usage.cache_read_input_tokens)
    assert cached[1] > cached[0]


def test_a_stop_sequence_is_reported_and_not_shown(api: anthropic.Anthropic) -> None:
    stopped = ask(api, messages=QUESTION, stop_sequences=["no such", "3", "43 "])
    assert texts_of(stopped) == ["4"]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "3")


def test_a_limit_beyond_the_context_is_no_error(api: anthropic.Anthropic) -> None:
    limited = ask(api, messages=QUESTION, max_tokens=1)
    assert (limited.stop_reason, limited.usage.output_tokens) == ("max_tokens", 1)
    free = ask_streamed(api, messages=QUESTION, max_tokens=64_000)
    assert (free.stop_reason, texts_of(free)) == ("end_turn", ["43"])


def test_replies_are_drawn_as_asked(api: anthropic.Anthropic) -> None:
    wild = {"temperature": 5.0, "top_p": 0.999, "top_k": 1000}
    greedy = {"temperature": 5.0, "top_p": 0.999, "top_k": 1}
    assert texts_of(ask_whole(api, messages=QUESTION, extra_body=greedy)) == ["43"]
    drawn = (ask_whole(api, messages=QUESTION, extra_body=wild, max_tokens=20) for _ in range(8))
    assert any(texts_of(reply) != ["43"] for reply in drawn)  # one in five is 43 by chance


# Tools


@pytest.mark.parametrize("is_thinking", [False, True])
def test_tools_are_called_and_their_results_reported(
    api: anthropic.Anthropic, is_thinking: bool
) -> None:
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "thinking": {"type": "adaptive" if is_thinking else "disabled"},
    }
    called = ask(api, messages=ONE_CALL, **fields)
    assert calls_of(called) == [FEED_LENA]
    assert called.stop_reason == "tool_use"
    assert [block.type for block in called.content] == ["thinking"] * is_thinking + ["tool_use"]
    result = {
        "type": "tool_result",
        "tool_use_id": called.content[-1].id,
        "content": '{"left": 120}',
    }
    messages = [
        *ONE_CALL,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    told = ask_streamed(api, messages=messages, **fields)
    assert told.stop_reason == "end_turn"
    assert texts_of(told) == ["Lena is fed; 120 grams of food are left."]
    assert told.usage.cache_read_input_tokens > 300  # the calls came back unchanged


def test_parallel_calls_are_all_given_or_only_the_first(
    server: Server, api: anthropic.Anthropic
) -> None:
    both = ask(api, messages=TWO_CALLS, tools=TOOLS)
    assert calls_of(both) == [CHECK_T6D32, FEED_LENA]
    assert len({block.id for block in both.content}) == 2
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    first = ask_streamed(api, messages=TWO_CALLS, tools=TOOLS, tool_choice=choice)
    assert (calls_of(first), first.stop_reason) == ([CHECK_T6D32], "tool_use")
    assert eventually(server.is_idle)


def test_the_choice_of_tools_is_kept(api: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    forced = ask_streamed(api, messages=QUESTION, tools=TOOLS, tool_choice=choice)
    assert (len(calls_of(forced)), forced.stop_reason) == (1, "tool_use")
    named = ask_whole(
        api,
        messages=QUESTION,
        tools=TOOLS,
        tool_choice={**choice, "type": "tool", "name": "feed_pet"},
    )
    assert [name for name, _ in calls_of(named)] == ["feed_pet"]
    none = ask_whole(
        api, messages=ONE_CALL, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=20
    )
    assert calls_of(none) == []


def test_a_call_cut_off_is_a_tool_use_with_the_input_that_was_whole(
    api: anthropic.Anthropic,
) -> None:
    fields: dict[str, Any] = {"messages": ONE_CALL, "tools": TOOLS}
    num_tokens = ask_whole(api, **fields).usage.output_tokens
    cut = ask(api, **fields, max_tokens=num_tokens - 8)
    ((name, given),) = calls_of(cut)
    assert (name, cut.stop_reason, texts_of(cut)) == ("feed_pet", "max_tokens", [])
    assert given.items() < FEED_LENA[1].items()


def test_a_schema_is_kept(api: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask_streamed(api, messages=QUESTION, output_config=form)
    assert list(json.loads(texts_of(answer)[0])) == ["sum"]


# Thinking


@pytest.mark.parametrize("asked", [THINKING, {"type": "adaptive"}])
def test_a_thought_is_a_signed_block_before_the_answer(
    server: Server, api: anthropic.Anthropic, asked: Any
) -> None:
    message = ask(api, messages=QUESTION, thinking=asked)
    thought, answer = message.content
    assert (thought.thinking, answer.text) == (THOUGHT, "43")
    assert thought.signature
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    again = [*QUESTION, {"role": "assistant", "content": message.content}, *QUESTION]
    assert texts_of(ask_whole(api, messages=again)) == ["43"]


@pytest.mark.parametrize("asked", [{}, {"thinking": {"type": "disabled"}}])
def test_a_thought_is_sent_only_on_request(api: anthropic.Anthropic, asked: Any) -> None:
    assert [block.type for block in ask_whole(api, messages=QUESTION, **asked).content] == ["text"]


def test_a_thought_keeps_to_its_budget(api: anthropic.Anthropic) -> None:
    thought, answer = ask(
        api, messages=QUESTION, thinking={"type": "enabled", "budget_tokens": 3}
    ).content
    assert THOUGHT.startswith(thought.thinking)
    assert len(thought.thinking) < len(THOUGHT)
    assert answer.text


# Prompts


def claude_code_body(hash: str, turns: list[Any]) -> dict[str, Any]:
    """Fields and blocks as Claude Code sends them."""
    big: dict[str, Any] = {
        "type": "object",
        "properties": {
            f"option_{i}": {
                "type": "array",
                "description": "What to do, and how, and when not to.",
                "items": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "object"}]},
            }
            for i in range(10)
        },
        "additionalProperties": False,
        "$schema": "http://json-schema.org/draft-07/schema#",
    }
    return {
        "model": "claude-sonnet-4-5-20250929",
        "max_tokens": 32_000,
        "stream": True,
        "temperature": 1,
        "metadata": {"user_id": '{"device_id":"x","session_id":"y"}'},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": [
            {"type": "text", "text": billed(hash)},
            text("You are Claude Code."),
            text(IDENTITY),
        ],
        "tools": [*TOOLS, {"name": "Agent", "description": "Does much.", "input_schema": big}],
        "messages": [
            {"role": "user", "content": [text(NOTE), text("Hi")]},
            *turns,
        ],
    }


def test_turns_of_claude_code_are_answered_and_found_cached(server: Server) -> None:
    turns: list[Any] = []
    cached = []
    url = f"{server.url}/v1/messages?beta=true"
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,new-2030-01-01",
    }
    for hash in ("71fea", "0aaa9"):
        body = claude_code_body(hash, turns)
        with server.http.stream("POST", url, json=body, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.iter_lines()
            assert next(lines) == "event: message_start"
            start = json.loads(next(lines).removeprefix("data: "))
        assert eventually(server.is_idle)
        cached.append(start["message"]["usage"]["cache_read_input_tokens"])
        turns += [
            {"role": "assistant", "content": [{"type": "text", "text": ""}, CALL_BLOCK]},
            {"role": "user", "content": [result([text("done")]), text(NOTE)]},
        ]
    assert cached[1] > 900 > cached[0]


def test_a_reply_goes_on_from_the_words_put_into_its_mouth(api: anthropic.Anthropic) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "4"}]
    message = ask(api, messages=messages)
    assert texts_of(message) == ["3"]
    counted = api.messages.count_tokens(model=ANY_MODEL, messages=messages).input_tokens
    assert counted == api.messages.count_tokens(model=ANY_MODEL, messages=QUESTION).input_tokens + 1


def test_words_before_a_constrained_reply_are_a_turn_of_their_own(
    server: Server, api: anthropic.Anthropic
) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "{"}]
    whole = {"messages": messages, "continue_final_message": False}
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    message = api.messages.create(
        model=ANY_MODEL, max_tokens=8, messages=messages, output_config=form
    )
    assert message.content[0].text.startswith("{")
    num_tokens = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert num_tokens == server.post(whole, "/tokenize").json()["count"]


# Refusals


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
LAST = [*QUESTION, {"role": "assistant", "content": "4"}]
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role is 'wizard'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (user(), "messages[0] has no content"),
    (user("Hi"), "messages[0].content[0]"),
    (user(text("a"), IMAGE), "messages[0].content[1] is of type 'image'"),
    (user({"type": "hologram", "content": {}}), "messages[0].content[0] is of type 'hologram'"),
    (user({"text": "untyped"}), "messages[0].content[0] has no type"),
    (user({"type": ["text"]}), "messages[0].content[0] has no type"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "text", "text": 5}), "messages[0].content[0].text"),
    (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
    (user(result("x", is_error="yes")), "messages[0].content[0].is_error"),
    (user(CALL_BLOCK), "messages[0].content[0] is of type 'tool_use'"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": [CALL_BLOCK]}]}, "messages[1]"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "4 "}]}, "messages[1]"),
    ({"messages": LAST, "thinking": THINKING}, "thinking"),
    ({"system": [IMAGE]}, "system[0] is of type 'image'"),
    ({"system": 5}, "system"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stream": "yes"}, "stream"),
    ({"thinking": {"type": "loudly"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    (
        {"tools": [{"name": "web", "type": "web_search_20250305"}]},
        "tools[0] is of type 'web_search_20250305'",
    ),
    ({"tools": [{"name": "f"}]}, "tools[0] has no input_schema"),
    ({"tools": [{"name": 5, "input_schema": {}}]}, "tools[0].name"),
    *(
        ({"tools": [{"name": name, "input_schema": {}}]}, "tools[0].name is ")
        for name in ("", "a b", "x\n<|im_end|>", "é", "a" * 129, "f>")
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"output_config": {"format": {"type": "poem", "schema": {}}}}, "output_config.format.type"),
    ({"thinking": {"type": "enabled", "display": "omited"}}, "thinking.display is 'omited'"),
    ({"messages": [{"role": "user", "content": "a b c d " * 2000}]}, "prompt is too long: "),
    (user(*[text("a")] * 9_000, result([text("b")] * 9_000)), "messages consist of 18001 blocks"),
]


def assert_error(answer: httpx.Response, status: int, kind: str) -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert "Traceback" not in answer.text
    message: str = body["error"]["message"]
    return message


@pytest.mark.parametrize(("change", "said"), REFUSALS)
def test_what_cannot_be_answered_is_a_400_that_names_its_place(
    server: Server, change: dict[str, Any], said: str
) -> None:
    body = {"model": "x", "messages": QUESTION, "max_tokens": 50, "stream": True, **change}
    assert said in assert_error(server.post(body, "/v1/messages"), 400, "invalid_request_error")


def test_errors_are_what_the_sdk_raises(server: Server, api: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask_whole(api, messages=[])
    assert refused.value.type == "invalid_request_error"
    body: Any = refused.value.body
    assert refused.value.request_id == body["request_id"] is not None
    with pytest.raises(anthropic.NotFoundError) as missing:
        api.post("/v1/messages/batches", cast_to=object, body={})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        api.models.retrieve("claude-of-any-name")
    assert unknown.value.type == "not_found_error"
    assert "it serves penstock-tiny." in unknown.value.message
    openai_error = server.http.get(f"{server.url}/v1/models/unknown").json()["error"]
    assert openai_error["type"] == "invalid_request_error"
    assert_error(server.http.get(f"{server.url}/v1/messages"), 405, "invalid_request_error")
    large = b"x" * (32 * 1024**2 + 1)
    assert_error(
        server.http.post(f"{server.url}/v1/messages", content=large), 413, "request_too_large"
    )


# Transcripts


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "anthropic_calls",
            {"messages": TWO_CALLS, "tools": TOOLS, "thinking": {"type": "adaptive"}},
        ),
        ("anthropic_thought", {"messages": QUESTION, "thinking": THINKING}),
        (
            "anthropic_stop",
            {"messages": QUESTION, "system": "You are kind.", "stop_sequences": ["3"]},
        ),
    ],
)
def test_a_stream_is_what_it_was(server: Server, name: str, fields: dict[str, Any]) -> None:
    """Delete a golden file to have it written again, then look at the difference."""
    body = {"model": ANY_MODEL, "max_tokens": 300, "stream": True, **fields}
    stream = server.post(body, "/v1/messages").text
    assert in_order(events_in(stream))
    stream = re.sub(r"\b(msg|call)_\w+", r"\1_ID", stream)
    stream = re.sub(r'"((?:cache_read_)?input_tokens)":\d+', r'"\1":N', stream)
    file = GOLDEN / f"{name}.sse"
    if not file.exists():
        file.write_text(stream)
        pytest.fail(f"{file} was written; look at it and run again")
    assert joined(stream) == joined(file.read_text())


PIECE = re.compile(
    r'(event: content_block_delta\ndata: \{"type":"content_block_delta","index":\d+,"delta":'
    r'\{"type":"\w+","(?:text|thinking|partial_json)":")(.*"\}\})'
)


def joined(stream: str) -> list[str]:
    """Its events, with each text merged: drafts decide how many tokens come at once."""
    events: list[str] = []
    for event in stream.split("\n\n"):
        piece = PIECE.fullmatch(event)
        if piece is not None and events and events[-1].startswith(piece[1]):
            events[-1] = events[-1].removesuffix('"}}') + piece[2]
        else:
            events.append(event)
    return events


# Threads


@anthropic.beta_tool
def feed_pet(pet: str, grams: int) -> str:
    """Release food for a pet.

    Args:
        pet: whose food it is
        grams: how much
    """
    return f"{pet} got {grams} grams."


THREADED: Any = {"model": ANY_MODEL, "max_tokens": 40}
IS_ALICE: Any = {"role": "user", "content": "My name is Alice."}
WHOSE_NAME: Any = {"role": "user", "content": "What is my name?"}


def num_prompt_tokens(reply: Any) -> int:
    return int(reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0))


@pytest.mark.parametrize("is_threaded", [True, False])
def test_the_sdks_tool_runner_runs_its_tool_in_a_thread_and_without(
    api: anthropic.Anthropic, is_threaded: bool
) -> None:
    unthreaded: Any = {} if is_threaded else {"thread": False}
    runner = api.beta.messages.tool_runner(
        model=ANY_MODEL,
        max_tokens=200,
        system="You feed pets.",
        tools=[feed_pet],
        messages=ONE_CALL,
        max_iterations=3,
        **unthreaded,
    )
    first, *_, last = runner
    assert (first.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
    call = first.content[0]
    turns: list[Any] = [
        *ONE_CALL,
        {"role": "assistant", "content": [call.to_dict()]},
        {"role": "user", "content": [{**result("Lena got 225 grams."), "tool_use_id": call.id}]},
    ]
    whole = ask_whole(api, system="You feed pets.", tools=[feed_pet.to_dict()], messages=turns)
    assert num_prompt_tokens(last) == num_prompt_tokens(whole), (
        "the prompt is that of the whole conversation"
    )


def test_a_thread_goes_on_streamed_or_whole(api: anthropic.Anthropic) -> None:
    thread = api.beta.messages.thread(**THREADED)
    thread.send(IS_ALICE)
    with thread.stream(WHOSE_NAME) as stream:
        assert "Alice" in stream.get_final_text()
    assert "Alice" in thread.send(WHOSE_NAME).content[0].text


def test_a_reply_is_continued_once_and_a_lost_thread_is_reported(
    server: Server, api: anthropic.Anthropic
) -> None:
    def send(thread: Any, message: Any = WHOSE_NAME, **fields: Any) -> httpx.Response:
        return server.post(
            {**THREADED, "messages": [message], "thread": thread, **fields}, "/v1/messages"
        )

    def code(answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["error"]["details"]["error_code"]

    first = send({"type": "create"}, IS_ALICE).json()["id"]
    next_turn = {"type": "continue", "previous_message_id": first}
    refused = send(next_turn, system="Be brief.")
    assert (refused.status_code, "system cannot be sent" in refused.text) == (400, True)
    assert send(next_turn, max_tokens=-1).status_code == 400
    refused = send(next_turn, session_id="example")
    assert (refused.status_code, "thread and session_id" in refused.text) == (400, True)
    assert "Alice" in send(next_turn).json()["content"][0]["text"], (
        "what failed has continued nothing"
    )
    assert code(send(next_turn)) == (400, "thread_already_continued")
    assert code(send({"type": "continue", "previous_message_id": "msg_x"})) == (
        404,
        "thread_not_found",
    )
    assert send({"type": "fork"}).status_code == 400
    thread = api.beta.messages.thread(**THREADED)
    reply = thread.send(IS_ALICE)
    assert server.http.delete(f"{server.url}/v1/sessions/{reply.id}").status_code == 200
    assert "Alice" in thread.send(WHOSE_NAME).content[0].text, (
        "the SDK sends the whole history again"
    )


def test_of_two_requests_at_once_one_continues_a_reply() -> None:
    threads = Threads(Conversations())
    thread = Thread(("", "msg_1"))
    with (
        threads.continuing(thread),
        pytest.raises(RequestError) as refusal,
        threads.continuing(thread),
    ):
        pass
    assert refusal.value.details == {"error_code": "thread_continue_in_flight"}
    with threads.continuing(thread):
        pass


def test_where_nothing_is_kept_a_thread_is_refused_so_that_sdks_go_on_without() -> None:
    with pytest.raises(RequestError) as refusal:
        Threads(Conversations(max_bytes=0)).find({"type": "create"}, "")
    assert refusal.value.details == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_an_image_in_a_result_is_left_out_and_the_answer_says_so(server: Server) -> None:
    seen = result([text("Seen:"), {"type": "image", "source": {"type": "base64", "data": "AAAA"}}])
    turns = [{"role": "assistant", "content": [CALL_BLOCK]}, {"role": "user", "content": [seen]}]
    for stream in (False, True):
        body = {"max_tokens": 8, "messages": [*QUESTION, *turns], "stream": stream}
        answer = server.post(body, "/v1/messages")
        assert answer.status_code == 200, answer.text
        assert "image at messages[2].content[0].content[1]" in answer.headers["x-penstock-warning"]
