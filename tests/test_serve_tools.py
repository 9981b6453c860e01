"""Chat replies: calls, JSON, thoughts. The embedded model on a real server, with openai."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from penstock.assets import default_model
from penstock.text.tokenizer import Tokenizer
from serving import Server, assert_refused, eventually, start_server

QUESTION: list[Any] = [{"role": "user", "content": "What is 17 + 26? Reply with just the number."}]
THOUGHT = "17 + 26 = 43."
TAGS = ("<tool_call", "</tool_call", "<function", "<parameter", "<think>", "</think>", "<|im_end|>")


def tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


STOCK = tool("check_stock", "Say how many pieces of a product are in store.", product="string")
FEED = tool("feed_pet", "Release food for a pet.", pet="string", grams="integer")
TOOLS = [STOCK, FEED]
ONE_CALL: list[Any] = [{"role": "user", "content": "Give 225 grams of food to Lena."}]
TWO_CALLS: list[Any] = [
    {
        "role": "user",
        "content": "Check the stock of product t6d32. And then: Give 225 grams of food to Lena.",
    }
]
FEED_LENA = ("feed_pet", {"pet": "Lena", "grams": 225})
CHECK_T6D32 = ("check_stock", {"product": "t6d32"})


@dataclass
class Answer:
    """A reply, streamed or whole."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    finish: str = ""
    usage: Any = None


def ask_whole(api: openai.OpenAI, **fields: Any) -> Answer:
    reply = api.chat.completions.create(model="any", **{"max_tokens": 300, **fields})
    (choice,) = reply.choices
    message = choice.message
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
    ]
    reasoning = getattr(message, "reasoning_content", None) or ""
    return Answer(message.content or "", reasoning, calls, choice.finish_reason, reply.usage)


def ask_streamed(api: openai.OpenAI, **fields: Any) -> Answer:
    fields = {"max_tokens": 300, "stream_options": {"include_usage": True}, **fields}
    answer = Answer()
    ids: list[str] = []
    names: list[str] = []
    fragments: list[str] = []
    for chunk in api.chat.completions.create(model="any", stream=True, **fields):
        answer.usage = chunk.usage
        for choice in chunk.choices:
            answer.content += choice.delta.content or ""
            answer.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            answer.finish = choice.finish_reason or answer.finish
            for call in choice.delta.tool_calls or ():
                if call.index == len(names):
                    assert call.type == "function"
                    ids.append(call.id)
                    names.append(call.function.name)
                    fragments.append("")
                else:
                    assert call.index == len(names) - 1
                    assert call.id is None
                fragments[call.index] += call.function.arguments
    assert all(ids)
    assert len(set(ids)) == len(ids)
    answer.calls = list(zip(names, map(json.loads, fragments), strict=True))
    return answer


def ask(api: openai.OpenAI, **fields: Any) -> Answer:
    """Whole and streamed, which must be the same; neither contains a marker of the model."""
    whole, streamed = ask_whole(api, **fields), ask_streamed(api, **fields)
    streamed.usage.prompt_tokens_details = (
        whole.usage.prompt_tokens_details
    )  # the second finds more cached
    assert streamed == whole
    assert not any(tag in whole.content + whole.reasoning for tag in TAGS)
    return whole


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def thinking(value: Any) -> dict[str, Any]:
    return {"extra_body": {"thinking": value}}


# Tools


@pytest.mark.parametrize("is_thinking", [False, True])
def test_a_call_is_a_call_and_no_text(api: openai.OpenAI, is_thinking: bool) -> None:
    answer = ask(api, messages=ONE_CALL, tools=TOOLS, **thinking(is_thinking))
    assert answer.calls == [FEED_LENA]
    assert answer.finish == "tool_calls"
    assert answer.content == ""
    assert bool(answer.reasoning) == is_thinking


def test_arguments_are_streamed_in_pieces(api: openai.OpenAI) -> None:
    chunks = list(
        api.chat.completions.create(model="any", messages=TWO_CALLS, tools=TOOLS, stream=True)
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    for index in (0, 1):
        assert sum(call.index == index for call in calls) >= 4


def test_only_calls_leave_the_content_null(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(model="any", messages=ONE_CALL, tools=TOOLS)
    assert reply.choices[0].message.content is None


def test_parallel_calls_are_all_given_or_only_the_first(server: Server, api: openai.OpenAI) -> None:
    both = ask(api, messages=TWO_CALLS, tools=TOOLS)
    assert both.calls == [CHECK_T6D32, FEED_LENA]
    first = ask(api, messages=TWO_CALLS, tools=TOOLS, parallel_tool_calls=False)
    assert (first.calls, first.finish) == ([CHECK_T6D32], "tool_calls")
    assert first.usage.completion_tokens < both.usage.completion_tokens
    forced = ask(
        api, messages=TWO_CALLS, tools=TOOLS, parallel_tool_calls=False, tool_choice="required"
    )
    assert (forced.calls, forced.finish) == ([CHECK_T6D32], "tool_calls")
    assert eventually(server.is_idle)


def test_no_choice_of_tools_means_no_call(api: openai.OpenAI) -> None:
    answer = ask_whole(api, messages=ONE_CALL, tools=TOOLS, tool_choice="none")
    assert answer.calls == []
    assert answer.finish in ("stop", "length")


@pytest.mark.parametrize("is_thinking", [False, True])
def test_a_required_call_is_made_whatever_was_asked(api: openai.OpenAI, is_thinking: bool) -> None:
    free = ask(api, messages=QUESTION, tools=TOOLS, **thinking(is_thinking))
    assert free.calls == []
    forced = ask(
        api, messages=QUESTION, tools=TOOLS, tool_choice="required", **thinking(is_thinking)
    )
    assert forced.calls
    assert (forced.content, forced.finish) == ("", "tool_calls")
    assert bool(forced.reasoning) == is_thinking


@pytest.mark.parametrize("chosen", TOOLS)
def test_a_named_tool_is_the_one_called_with_arguments_of_its_types(
    api: openai.OpenAI, chosen: dict[str, Any]
) -> None:
    name = chosen["function"]["name"]
    choice = {"type": "function", "function": {"name": name}}
    answer = ask(api, messages=QUESTION, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    ((called, arguments),) = answer.calls
    assert called == name
    properties = chosen["function"]["parameters"]["properties"]
    assert list(arguments) == list(properties)
    for argument, schema in properties.items():
        assert type(arguments[argument]) is {"string": str, "integer": int}[schema["type"]]


def test_of_all_tools_only_the_allowed_are_called(api: openai.OpenAI) -> None:
    free = ask_whole(api, messages=ONE_CALL, tools=TOOLS, tool_choice=allowed("auto", "feed_pet"))
    assert free.calls == [FEED_LENA]
    forced = ask_whole(
        api, messages=ONE_CALL, tools=TOOLS, tool_choice=allowed("required", "check_stock")
    )
    assert {name for name, _ in forced.calls} == {"check_stock"}


def test_a_call_cut_off_is_sent_once_and_can_be_sent_back(api: openai.OpenAI) -> None:
    fields: Any = {"model": "any", "messages": ONE_CALL, "tools": TOOLS}
    whole = api.chat.completions.create(**fields).usage
    assert whole is not None
    fields["max_tokens"] = whole.completion_tokens - 8
    (choice,) = api.chat.completions.create(**fields).choices
    message = choice.message
    assert (message.content, choice.finish_reason) == (None, "length")
    assert message.tool_calls
    (call,) = message.tool_calls
    assert call.function.name == "feed_pet"
    assert json.dumps(FEED_LENA[1]).startswith(call.function.arguments)
    deltas = [
        chunk.choices[0].delta for chunk in api.chat.completions.create(**fields, stream=True)
    ]
    assert "".join(delta.content or "" for delta in deltas) == ""
    pieces = [piece.function.arguments for delta in deltas for piece in delta.tool_calls or ()]
    assert "".join(pieces) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "The arguments are not JSON."}
    again = ask_whole(api, messages=[*ONE_CALL, message, result], tools=TOOLS)
    assert again.finish in ("stop", "tool_calls")


def test_a_call_and_its_result_can_be_sent_back(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(model="any", messages=ONE_CALL, tools=TOOLS)
    message = reply.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    answer = ask_whole(api, messages=[*ONE_CALL, message, result], tools=TOOLS)
    assert answer.usage.prompt_tokens > reply.usage.total_tokens


# JSON


class Distance(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    value: int
    unit: Literal["km", "m"]
    is_exact: bool


@pytest.mark.parametrize("thought", [False, True, {"type": "enabled", "budget_tokens": 4}])
def test_a_schema_is_fulfilled_thinking_or_not(api: openai.OpenAI, thought: Any) -> None:
    reply = api.chat.completions.parse(
        model="any",
        messages=QUESTION,
        response_format=Distance,
        max_tokens=300,
        **thinking(thought),
    )
    (choice,) = reply.choices
    assert isinstance(choice.message.parsed, Distance)
    assert choice.finish_reason == "stop"
    assert bool(getattr(choice.message, "reasoning_content", None)) == bool(thought)


def test_every_reply_of_many_fulfils_the_schema(api: openai.OpenAI) -> None:
    schema = {"name": "d", "strict": True, "schema": Distance.model_json_schema()}
    form = {"type": "json_schema", "json_schema": schema}
    reply = api.chat.completions.create(
        model="any",
        messages=QUESTION,
        response_format=form,
        n=4,
        temperature=1.5,
        seed=1,
        max_tokens=300,
    )
    for choice in reply.choices:
        Distance.model_validate_json(choice.message.content)


def test_json_mode_begins_an_object_where_free_text_does_not(api: openai.OpenAI) -> None:
    free = ask(api, messages=QUESTION, max_tokens=20)
    held = ask(api, messages=QUESTION, max_tokens=20, response_format={"type": "json_object"})
    assert not free.content.startswith("{")
    assert held.content.startswith("{")


def test_with_tools_a_reply_is_json_or_a_call(api: openai.OpenAI) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "d", "strict": True, "schema": Distance.model_json_schema()},
    }
    called = ask(api, messages=ONE_CALL, tools=TOOLS, response_format=form)
    assert called.calls == [FEED_LENA]
    biased = {str(Tokenizer.load(None).id_of("<tool_call>")): -100}
    said = ask(api, messages=ONE_CALL, tools=TOOLS, response_format=form, logit_bias=biased)
    assert said.calls == []
    Distance.model_validate_json(said.content)


# Thinking


@pytest.mark.parametrize(
    "body",
    [
        {"thinking": True},
        {"thinking": {"type": "enabled"}},
        {"enable_thinking": True},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"thinking": {"type": "enabled", "budget_tokens": 1000}},
    ],
)
def test_a_thought_is_apart_from_the_answer_and_counted(
    api: openai.OpenAI, body: dict[str, Any]
) -> None:
    answer = ask(api, messages=QUESTION, extra_body=body)
    assert (answer.reasoning, answer.content, answer.finish) == (THOUGHT, "43", "stop")
    num_tokens = len(Tokenizer.load(None).encode(f"{THOUGHT}\n</think>"))
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_tokens
    assert answer.usage.completion_tokens > num_tokens


@pytest.mark.parametrize("body", [{}, {"thinking": False}, {"thinking": {"type": "disabled"}}])
def test_without_thinking_there_is_no_thought(api: openai.OpenAI, body: dict[str, Any]) -> None:
    answer = ask(api, messages=QUESTION, extra_body=body)
    assert (answer.reasoning, answer.content) == ("", "43")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("effort", "is_thinking"), [("none", False), ("minimal", False), ("high", True)]
)
def test_an_effort_is_whether_to_think(api: openai.OpenAI, effort: str, is_thinking: bool) -> None:
    answer = ask_whole(api, messages=QUESTION, extra_body={"reasoning_effort": effort})
    assert bool(answer.reasoning) == is_thinking


@pytest.mark.parametrize("budget", [1, 3])
def test_a_thought_over_budget_is_closed_and_answered(
    server: Server, api: openai.OpenAI, budget: int
) -> None:
    tokenizer = Tokenizer.load(None)
    body = thinking({"type": "enabled", "budget_tokens": budget})
    answer = ask(api, messages=QUESTION, **body)
    assert answer.reasoning == tokenizer.decode(tokenizer.encode(THOUGHT)[:budget]).rstrip()
    assert answer.content
    assert answer.finish == "stop"
    closing = len(tokenizer.encode("\n</think>\n\n"))
    assert answer.usage.completion_tokens_details.reasoning_tokens == budget + closing
    num_said = len(tokenizer.encode(answer.content))
    assert answer.usage.completion_tokens == budget + closing + num_said
    free = ask_whole(api, messages=QUESTION, **thinking(True))
    assert answer.usage.prompt_tokens == free.usage.prompt_tokens
    assert eventually(server.is_idle)


def test_a_limit_inside_the_thought_or_its_closing_ends_the_reply(api: openai.OpenAI) -> None:
    body = thinking({"type": "enabled", "budget_tokens": 4})
    for max_tokens in (3, 4, 5):
        answer = ask(api, messages=QUESTION, max_tokens=max_tokens, **body)
        assert (answer.content, answer.finish) == ("", "length")
    one = ask(api, messages=QUESTION, max_tokens=8, **body)
    assert (one.usage.completion_tokens, one.finish) == (8, "length")
    assert one.content


# Refusals

DEEP: dict[str, Any] = {"type": "object"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"x": DEEP}}


def schema_form(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


JSON_FORM = {"response_format": {"type": "json_object"}}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (
        {"tools": TOOLS, "tool_choice": allowed("sometimes", "feed_pet")},
        "tool_choice.allowed_tools.mode",
    ),
    ({"tools": TOOLS, "tool_choice": allowed("auto", "unknown")}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "<tool_call>"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"reasoning_effort": "heroic"}, "reasoning_effort"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (
        {"tools": [{"type": "function", "function": {"name": "a\nb"}}], "tool_choice": "required"},
        "tools",
    ),
    (
        {"tools": [{"function": {"name": "f", "parameters": DEEP}}], "tool_choice": "required"},
        "tools",
    ),
    ({"response_format": {"type": "poem"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (schema_form(False), "response_format"),
    (schema_form([1]), "response_format"),
    (schema_form(DEEP), "response_format"),
    (schema_form({"type": "string", "pattern": "(((a+)+)+"}), "response_format"),
    (schema_form({"type": "string", "pattern": "x" * 5000}), "response_format"),
    (schema_form({"type": "wizard"}), "response_format"),
    ({**JSON_FORM, "min_tokens": 5}, "min_tokens"),
    ({**JSON_FORM, "ignore_eos": True}, "ignore_eos"),
    ({"thinking": {"type": "loudly"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens"),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("change", "param"), REFUSALS)
def test_a_form_that_cannot_be_kept_is_a_400_that_names_its_field(
    server: Server, change: dict[str, Any], param: str, is_stream: bool
) -> None:
    assert_refused(server.post({"messages": QUESTION, "stream": is_stream, **change}), 400, param)


# Tokens


def test_tokens_come_and_go(server: Server, api: openai.OpenAI) -> None:
    text = "naïve <think> 漢字"
    found = server.post({"prompt": text, "return_token_strs": True}, "/tokenize").json()
    assert found["tokens"] == Tokenizer.load(None).encode(text, True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == api.models.list().data[0].max_model_len
    assert server.post({"tokens": found["tokens"]}, "/detokenize").json() == {
        "prompt": text,
        "content": text,
    }
    chat = server.post({"messages": ONE_CALL, "tools": TOOLS}, "/tokenize").json()
    assert chat["count"] == ask_whole(api, messages=ONE_CALL, tools=TOOLS).usage.prompt_tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": QUESTION}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenised_is_a_400(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    assert_refused(server.post(body, path), 400, param)


def test_grammars_are_for_the_tokenizer_that_was_named(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(default_model() / name)
    file = str(default_model() / "tokenizer.json")
    with start_server(engine={"model": str(bare)}, serve={"tokenizer": file}) as server:
        body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
        (choice,) = server.post(body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
