"""The Responses API with the openai package: the embedded model on a real server."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response

from response_events import assert_well_formed, parse_events, transcript, without_chance
from serving import Server, assert_refused, eventually

GOLDEN = Path(__file__).parent / "golden"
QUESTION = "What is 17 + 26? Reply with just the number."
ONE_CALL = "Give 225 grams of food to Lena."
TWO_CALLS = "Check the stock of product t6d32. And then: Give 225 grams of food to Lena."
FEED_LENA = ("feed_pet", {"pet": "Lena", "grams": 225})
CHECK_T6D32 = ("check_stock", {"product": "t6d32"})
THINK: Any = {"effort": "high"}


def tool(name: str, description: str, **properties: str) -> Any:
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "name": name, "description": description, "parameters": schema}


TOOLS = [
    tool("check_stock", "Say how many pieces of a product are in store.", product="string"),
    tool("feed_pet", "Release food for a pet.", pet="string", grams="integer"),
]
CHAT_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type"},
    }
    for tool in TOOLS
]


class Distance(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    value: int
    unit: Literal["km", "m"]


def respond(api: openai.OpenAI, input: Any, **fields: Any) -> Any:
    return api.responses.create(model="any", input=input, **fields)


def calls_of(response: Response) -> list[tuple[str, Any]]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [(call.name, json.loads(call.arguments)) for call in calls]


def events_of(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the openai package's types."""
    answer = server.post({"stream": True, **body}, "/v1/responses")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parse_events(answer.content)


# Whole and streamed

ASKED: dict[str, dict[str, Any]] = {
    "text": {"input": QUESTION},
    "thought": {"input": QUESTION, "reasoning": THINK},
    "thought_calls": {"input": TWO_CALLS, "tools": TOOLS, "reasoning": THINK},
    "cut": {"input": "Tell me about rivers.", "max_output_tokens": 5},
    "cut_thought": {"input": QUESTION, "reasoning": THINK, "max_output_tokens": 3},
    "cut_call": {"input": ONE_CALL, "tools": TOOLS, "max_output_tokens": 20},
}
ITEMS = {
    "text": ["message"],
    "thought": ["reasoning", "message"],
    "thought_calls": ["reasoning", "function_call", "function_call"],
    "cut": ["message"],
    "cut_thought": ["reasoning"],
    "cut_call": ["function_call"],
}


@pytest.mark.parametrize("name", ASKED)
def test_a_stream_goes_as_recorded_and_ends_with_the_whole_response(
    server: Server, name: str
) -> None:
    """Delete a recording to have it made again, then look at the difference."""
    whole = server.post(ASKED[name], "/v1/responses").json()
    Response.model_validate(whole, strict=True)
    assert [item["type"] for item in whole["output"]] == ITEMS[name]
    assert whole["status"] == ("incomplete" if name.startswith("cut") else "completed")
    assert (whole["incomplete_details"] is None) == (whole["status"] == "completed")
    events = events_of(server, ASKED[name])
    assert_well_formed(events, events[-1]["response"]["output"])
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_chance(events[-1]["response"]) == without_chance(whole)
    recording = GOLDEN / f"responses_{name}.txt"
    if not recording.exists():
        recording.write_text(transcript(events))
        pytest.fail(f"{recording} was made; look at it and run again")
    assert transcript(events) == recording.read_text()


def test_the_openai_clients_stream_accumulates_the_whole_response(api: openai.OpenAI) -> None:
    with api.responses.stream(model="any", input=TWO_CALLS, tools=TOOLS, reasoning=THINK) as stream:
        snapshots = [
            event.snapshot
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        streamed = stream.get_final_response()
    assert calls_of(streamed) == [CHECK_T6D32, FEED_LENA]
    assert len(snapshots) > 3
    assert json.loads(snapshots[-1]) == FEED_LENA[1]
    with api.responses.stream(model="any", input=QUESTION, text_format=Distance) as text_stream:
        (done,) = [event for event in text_stream if event.type == "response.output_text.done"]
        final = text_stream.get_final_response()
    assert isinstance(done.parsed, Distance)
    assert final.output_parsed == done.parsed


def test_async_clients_get_what_sync_clients_get(server: Server, api: openai.OpenAI) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            whole = await client.responses.create(model="any", input=QUESTION)
            async with client.responses.stream(model="any", input=QUESTION) as stream:
                streamed = await stream.get_final_response()
            return whole.output_text, streamed.output_text

    assert set(asyncio.run(ask())) == {respond(api, QUESTION).output_text} == {"43"}


def test_the_response_repeats_what_was_asked(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 30,
        "metadata": {"order": "17"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "none"},
        "temperature": 0.5,
        "tool_choice": {"type": "function", "name": "feed_pet"},
        "top_p": 0.9,
        "truncation": "disabled",
        "user": "lena",
        "include": ["reasoning.encrypted_content"],
    }
    response = respond(api, QUESTION, tools=TOOLS, extra_body={"seed": 1}, **asked).to_dict()
    asked.pop("include")
    asked["reasoning"]["summary"] = None
    assert {name: response[name] for name in asked} == asked
    assert response["tools"] == [{**tool, "strict": None} for tool in TOOLS]


def test_usage_counts_what_the_chat_api_counts(api: openai.OpenAI) -> None:
    usage = respond(api, QUESTION, reasoning=THINK).usage
    messages: Any = [{"role": "user", "content": QUESTION}]
    chat = api.chat.completions.create(
        model="any", messages=messages, extra_body={"thinking": True}
    ).usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.prompt_tokens, chat.completion_tokens)
    assert (
        usage.output_tokens_details.reasoning_tokens
        == chat.completion_tokens_details.reasoning_tokens
        > 0
    )
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    again = [respond(api, "word " * 200, max_output_tokens=1) for _ in range(2)]
    assert again[1].usage.input_tokens_details.cached_tokens > 100


# What a reply may be


def test_structured_output_is_parsed_after_a_thought(api: openai.OpenAI) -> None:
    reply = api.responses.parse(
        model="any", input=QUESTION, text_format=Distance, reasoning={"effort": "low"}
    )
    assert isinstance(reply.output_parsed, Distance)
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    held = respond(api, QUESTION, text={"format": {"type": "json_object"}}, max_output_tokens=5)
    assert held.output_text.startswith("{")


def test_the_choice_of_tools_is_kept(api: openai.OpenAI) -> None:
    def called(input: str, choice: Any, **fields: Any) -> list[str]:
        response = respond(api, input, tools=TOOLS, tool_choice=choice, **fields)
        return [name for name, _ in calls_of(response)]

    stock = {"type": "function", "name": "check_stock"}
    assert called(ONE_CALL, "none", max_output_tokens=40) == []
    assert set(called(QUESTION, {"type": "function", "name": "feed_pet"})) == {"feed_pet"}
    assert set(called(ONE_CALL, allowed("required", stock))) == {"check_stock"}
    assert called(TWO_CALLS, allowed("auto", stock), max_output_tokens=40) == ["check_stock"]
    assert called(TWO_CALLS, "auto", parallel_tool_calls=False) == ["check_stock"]


# Conversations


def test_a_conversation_that_was_kept_is_the_one_that_is_sent(api: openai.OpenAI) -> None:
    """By previous_response_id, as items, and as chat messages: one prompt, so one reply."""
    first = respond(api, TWO_CALLS, tools=TOOLS, reasoning=THINK)
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "12 pieces"}
        for item in first.output
        if item.type == "function_call"
    ]
    kept = respond(api, results, tools=TOOLS, previous_response_id=first.id)
    items: list[Any] = [{"role": "user", "content": TWO_CALLS}, *first.output, *results]
    sent = respond(api, items, tools=TOOLS, store=False)
    (thought,) = [item for item in first.output if item.type == "reasoning"]
    calls = [
        {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for id, (name, arguments) in zip("ab", calls_of(first))
    ]
    messages: list[Any] = [
        {"role": "user", "content": TWO_CALLS},
        {"role": "assistant", "reasoning_content": thought.content[0].text, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": id, "content": "12 pieces"} for id in "ab"),
    ]
    chat = api.chat.completions.create(model="any", messages=messages, tools=CHAT_TOOLS)
    assert kept.usage.input_tokens == sent.usage.input_tokens == chat.usage.prompt_tokens
    assert kept.output_text == sent.output_text == (chat.choices[0].message.content or "")
    assert kept.usage.input_tokens_details.cached_tokens > 0
    assert kept.previous_response_id == first.id
    third = respond(api, "And now?", tools=TOOLS, previous_response_id=kept.id, max_output_tokens=1)
    assert third.usage.input_tokens > kept.usage.input_tokens


def test_instructions_hold_for_one_response_only(api: openai.OpenAI) -> None:
    plain, told = (
        respond(api, QUESTION),
        respond(api, QUESTION, instructions="Answer in French. " * 9),
    )
    assert plain.output_text == told.output_text == "43"
    after = [
        respond(api, "Why?", previous_response_id=response.id, max_output_tokens=1)
        for response in (plain, told)
    ]
    assert after[0].usage.input_tokens == after[1].usage.input_tokens
    assert told.usage.input_tokens > plain.usage.input_tokens + 30


def test_a_kept_response_is_read_until_it_is_deleted(server: Server, api: openai.OpenAI) -> None:
    whole = server.post({"input": QUESTION, "metadata": {"a": "b"}}, "/v1/responses").json()
    streamed = events_of(server, {"input": QUESTION})[-1]["response"]
    for response in (whole, streamed):
        assert server.http.get(f"{server.url}/v1/responses/{response['id']}").json() == response
        assert api.responses.retrieve(response["id"]).output_text == "43"
        api.responses.delete(response["id"])
        for attempt in (api.responses.retrieve, api.responses.delete):
            with pytest.raises(openai.NotFoundError):
                attempt(response["id"])
    with pytest.raises(openai.NotFoundError, match=streamed["id"]):
        respond(api, "Why?", previous_response_id=streamed["id"])
    forgotten = respond(api, QUESTION, store=False)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(forgotten.id)


# Refusals


def allowed(mode: str, *tools: dict[str, str]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def custom(form: dict[str, str]) -> dict[str, Any]:
    return {"type": "custom", "name": "shout", "description": "Says it aloud.", "format": form}


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [{}]}, "input[0]"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content",
    ),
    ({"input": [{"type": "wizardry"}]}, "input[0].type"),
    (
        {"input": [{"type": "compaction", "encrypted_content": "gAAA"}]},
        "input[0].encrypted_content",
    ),
    ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input[0]"),
    (
        {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
        "input[0].call_id",
    ),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "1"}]}, "input[1].output"),
    ({"input": [{**CALL, "name": None}]}, "input[0]"),
    ({"input": "word " * 5000}, "input"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": allowed("all")}, "tool_choice.mode"),
    ({"tools": TOOLS, "tool_choice": allowed("required")}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": allowed("auto", {"type": "function", "name": "x"})},
        "tool_choice",
    ),
    ({"tools": TOOLS, "tool_choice": allowed("auto", {"type": "mcp"})}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "poem"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "wizard"}}}},
        "text.format",
    ),
    ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"truncation": "most"}, "truncation"),
    ({"truncation": "auto", "input": "word " * 5000}, "input"),
    ({"background": True, "store": False}, "background"),
    ({"background": True, "input": "word " * 5000}, "input"),
    ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
    ({"conversation": "conv_1", "session_id": "example"}, "conversation"),
    ({"conversation": 5}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["wizardry"]}, "include"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"text": {"verbosity": "chatty"}}, "text.verbosity"),
    ({"tools": [custom({"type": "poem"})]}, "tools"),
    ({"tools": [custom({"type": "grammar", "syntax": "bnf", "definition": "x"})]}, "tools"),
    ({"tools": [custom({"type": "grammar", "syntax": "lark"})]}, "tools"),
    ({"tools": [custom({"type": "grammar", "syntax": "lark", "definition": "start: x"})]}, "tools"),
    ({"tools": [custom({"type": "grammar", "syntax": "regex", "definition": "["})]}, "tools"),
    ({"tools": [{"type": "custom"}]}, "tools"),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("change", "param"), REFUSALS)
def test_what_cannot_be_honoured_is_a_400_that_names_its_field(
    server: Server, change: dict[str, Any], param: str, is_stream: bool
) -> None:
    answer = server.post({"input": QUESTION, "stream": is_stream, **change}, "/v1/responses")
    assert_refused(answer, 400, param)
    named = answer.json()["error"]["message"]
    assert not re.search(r"messages\[|response_format|max_tokens", named), named


def test_an_unknown_response_is_a_404_in_openais_shape(server: Server) -> None:
    http: httpx.Client = server.http
    assert_refused(http.get(f"{server.url}/v1/responses/resp_x"), 404, None)
    assert_refused(http.delete(f"{server.url}/v1/responses/resp_x"), 404, None)
    asked = {"input": "x", "previous_response_id": "resp_x"}
    assert_refused(server.post(asked, "/v1/responses"), 404, "previous_response_id")
    for reference in ({"type": "item_reference", "id": "msg_x"}, {"id": "msg_x"}):
        answer = server.post(
            {"input": [reference, {"role": "user", "content": "x"}]}, "/v1/responses"
        )
        assert_refused(answer, 404, "input")
        assert answer.json()["error"]["message"].startswith("Item with id 'msg_x' not found.")
    assert_refused(http.get(f"{server.url}/v1/responses/resp_x?stream=true"), 404, None)
    assert_refused(http.get(f"{server.url}/v1/responses/resp_x/input_items"), 404, None)
    assert_refused(server.post({}, "/v1/responses/resp_x/cancel"), 404, None)
    assert_refused(
        server.post({"input": "x", "conversation": "conv_x"}, "/v1/responses"), 404, "conversation"
    )
    kept = server.post({"input": QUESTION}, "/v1/responses").json()["id"]
    assert_refused(http.get(f"{server.url}/v1/responses/{kept}?stream=true"), 400, "stream")
    assert_refused(server.post({}, f"/v1/responses/{kept}/cancel"), 400, None)
    assert_refused(http.get(f"{server.url}/v1/conversations/{kept}"), 404, None)


def test_a_client_that_leaves_ends_its_reply_and_nothing_is_kept(server: Server) -> None:
    body = {"input": "Tell me about rivers.", "stream": True, "ignore_eos": True}
    with server.http.stream("POST", f"{server.url}/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    assert eventually(lambda: server.stats()["num_running"] == 0)
    assert_refused(server.http.get(f"{server.url}/v1/responses/{id}"), 404, None)


# The same client on the chat API


def test_the_clients_chat_stream_accumulates_the_whole_completion(api: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": TWO_CALLS}]
    with api.chat.completions.stream(model="any", messages=messages, tools=CHAT_TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        streamed = stream.get_final_completion().choices[0]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [CHECK_T6D32, FEED_LENA]
    assert streamed.finish_reason == "tool_calls"
    assert [call.function.name for call in streamed.message.tool_calls] == [
        "check_stock",
        "feed_pet",
    ]
    messages = [{"role": "user", "content": QUESTION}]
    with api.chat.completions.stream(
        model="any", messages=messages, response_format=Distance
    ) as parsing:
        final = parsing.get_final_completion().choices[0]
    assert isinstance(final.message.parsed, Distance)
