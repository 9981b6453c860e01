"""A request field is honoured, deliberately ignored, or refused by name; never anything else."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from anthropic.types import message_count_tokens_params
from anthropic.types.beta import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from command_line import ROOT
from penstock.errors import RequestError
from penstock.serve import fields
from penstock.serve.anthropic.requests import MessagesBody, PromptBody, parse_count, parse_messages
from penstock.serve.openai.requests import (
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from penstock.serve.responses.requests import ResponseBody, parse_response, response_request
from test_serve_access import Answered, app_of, call

MESSAGES = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
COUNTED = {"messages": MESSAGES["messages"]}
APIS: dict[str, tuple[dict[str, Any], Callable[[bytes], Any]]] = {
    "chat": (MESSAGES, parse_chat),
    "completions": ({"prompt": "x"}, parse_completion),
    "responses": ({"input": "x"}, lambda body: response_request(parse_response(body), [])),
    "messages": (MESSAGES, lambda body: parse_messages(body, None)),
    "count_tokens": (COUNTED, lambda body: parse_count(body, None)),
    "tokenize": ({"prompt": "x"}, parse_tokenize),
}
SDKS: list[tuple[Any, type[msgspec.Struct], fields.FieldTable]] = [
    (chat_create_params.CompletionCreateParamsBase, ChatBody, fields.CHAT),
    (completion_create_params.CompletionCreateParamsBase, CompletionBody, fields.COMPLETIONS),
    (response_create_params.ResponseCreateParamsBase, ResponseBody, fields.RESPONSES),
    (message_create_params.MessageCreateParamsBase, MessagesBody, fields.MESSAGES),
    (message_count_tokens_params.MessageCountTokensParams, PromptBody, fields.COUNT_TOKENS),
]
# Fields that agents send besides those of their SDK, and that must be accepted.
AGENTS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}),
    ("chat", {"prompt_cache_key": "k", "verbosity": "low", "modalities": ["text"], "audio": None}),
    ("chat", {"prediction": {"type": "content", "content": "x"}, "safety_identifier": "s"}),
    (
        "chat",
        {
            "provider": {"order": ["a"]},
            "usage": {"include": True},
            "transforms": [],
            "models": ["a"],
        },
    ),
    ("chat", {"include_reasoning": True, "reasoning": {"enabled": True}, "plugins": []}),
    ("chat", {"cache_prompt": True, "id_slot": 0, "timings_per_token": True, "samplers": []}),
    (
        "chat",
        {"repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "dry_multiplier": 0.0, "tfs_z": 1.0},
    ),
    (
        "chat",
        {"keep_alive": "5m", "vl_high_resolution_images": True, "stream_options": {"new": None}},
    ),
    (
        "chat",
        {"use_beam_search": False, "length_penalty": 1.0, "separate_reasoning": True, "best_of": 1},
    ),
    (
        "chat",
        {"tools": [], "functions": None, "parallel_tool_calls": True, "n": 1.0, "unheard_of": None},
    ),
    (
        "completions",
        {"user": "u", "best_of": 1, "suffix": None, "logit_bias": {}, "use_beam_search": False},
    ),
    (
        "completions",
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": False}},
    ),
    ("responses", {"client_metadata": {"a": "b"}, "store": False, "prompt_cache_key": "k", "n": 1}),
    (
        "responses",
        {"stream_options": {"include_obfuscation": False}, "context_management": [], "user": "u"},
    ),
    (
        "responses",
        {
            "reasoning": {"effort": "max", "summary": "auto", "context": "auto"},
            "service_tier": "flex",
        },
    ),
    (
        "messages",
        {"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}, "mcp_servers": []},
    ),
    (
        "messages",
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    ),
    (
        "messages",
        {
            "thinking": {"type": "adaptive", "display": "summarized"},
            "output_config": {"effort": "low"},
        },
    ),
    ("messages", {"betas": ["a"], "speed": "fast", "diagnostics": {"previous_message_id": None}}),
    (
        "messages",
        {"anthropic_version": "bedrock-2023-05-31", "inference_geo": "eu", "service_tier": "auto"},
    ),
    (
        "count_tokens",
        {"max_tokens": 5, "stream": True, "metadata": {}, "betas": ["x"], "temperature": 1},
    ),
    ("tokenize", {"model": "any", "continue_final_message": False}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"unheard_of": 1}, "unheard_of"),
    ("chat", {"unheard_of": False}, "unheard_of"),
    ("chat", {"modalities": ["text", "audio"]}, "modalities"),
    ("chat", {"web_search_options": {"a": 1}}, "web_search_options"),
    ("chat", {"mirostat": 2}, "mirostat"),
    ("chat", {"repeat_penalty": 1.1}, "repeat_penalty"),
    ("chat", {"best_of": 3}, "best_of"),
    ("chat", {"documents": [{"text": "x"}]}, "documents"),
    ("chat", {"chat_template": "x"}, "chat_template"),
    ("chat", {"extra_body": {"top_k": 1}}, "extra_body"),
    ("chat", {"stream_options": {"unheard_of": True}}, "stream_options.unheard_of"),
    (
        "chat",
        {"response_format": {"type": "json_object", "unheard_of": 1}},
        "response_format.unheard_of",
    ),
    ("chat", {"thinking": {"type": "enabled", "depth": 3}}, "thinking.depth"),
    ("chat", {"reasoning": {"depth": 3}}, "reasoning.depth"),
    ("chat", {"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"tools": [{"type": "function"}]}, "tools"),
    ("completions", {"enable_thinking": True}, "enable_thinking"),
    ("responses", {"response_format": {"type": "json_object"}}, "response_format"),
    ("responses", {"max_tokens": 5}, "max_tokens"),
    ("responses", {"stop": "x"}, "stop"),
    ("responses", {"text": {"style": "x"}}, "text.style"),
    ("responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ("messages", {"stop": ["x"]}, "stop"),
    ("messages", {"seed": 1}, "seed"),
    ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ("messages", {"output_config": {"effort": "heroic"}}, "output_config.effort"),
    ("messages", {"tool_choice": {"type": "auto", "strict": True}}, "tool_choice.strict"),
    ("count_tokens", {"unheard_of": 1}, "unheard_of"),
    ("tokenize", {"unheard_of": 1}, "unheard_of"),
]


def parse(api: str, **more: Any) -> Any:
    body, parser = APIS[api]
    return parser(json.dumps({**body, **more}).encode())


@pytest.mark.parametrize(("kind", "body", "table"), SDKS)
def test_every_field_that_an_sdk_knows_is_decided_on(
    kind: Any, body: type[msgspec.Struct], table: fields.FieldTable
) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(body)}
    known |= table.ignored | table.neutral.keys() | table.advice.keys()
    # Fields that an SDK declares elsewhere, and those that a nested parser checks.
    known |= {"stream", "thread"}
    assert typing.get_type_hints(kind).keys() - known == set()


@pytest.mark.parametrize(("api", "more"), AGENTS)
def test_what_agents_send_besides_is_answered(api: str, more: dict[str, Any]) -> None:
    parse(api, **more)


@pytest.mark.parametrize(("api", "more", "param"), REFUSED)
def test_what_would_change_an_answer_is_refused_by_name(
    api: str, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        parse(api, **more)
    assert refusal.value.param == param
    assert param.rpartition(".")[2] in refusal.value.what
    assert refusal.value.why or refusal.value.todo, "what to do"


def test_a_misspelt_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="Did you mean 'max_tokens'"):
        parse("chat", max_token=5)
    with pytest.raises(RequestError, match="--ignore-field"):
        parse("chat", unheard_of=5)


def test_an_operator_can_have_a_field_ignored() -> None:
    body = json.dumps({**MESSAGES, "unheard_of": {"a": [1]}}).encode()
    parse_chat(body, table=fields.CHAT.ignoring(["unheard_of"]))
    with pytest.raises(RequestError):
        parse_chat(body)


def test_a_field_that_is_honoured_is_in_no_list_of_ignored_ones() -> None:
    for _, body, table in SDKS[:-1]:
        honoured = {field.encode_name for field in msgspec.structs.fields(body)}
        # Responses only echoes these.
        repeated = {"user", "metadata", "safety_identifier", "max_tool_calls", "store"}
        assert honoured & table.ignored <= (repeated if body is ResponseBody else set())


def test_the_document_lists_what_is_ignored() -> None:
    document = (ROOT / "docs" / "api.md").read_text()
    section = document.partition("### Fields that are ignored")[2].partition("\n##")[0]
    for why, names in fields.IGNORED.items():
        (row,) = [line for line in section.splitlines() if line.startswith(f"| {why} |")]
        assert row == f"| {why} | {', '.join(f'`{name}`' for name in names.split())} |"
    for name in fields.NEUTRAL:
        assert f"`{name}`" in section


@pytest.mark.parametrize(
    ("api", "more", "look"),
    [
        (
            "chat",
            {"max_tokens": 16.0, "n": 2.0, "top_k": 5.0},
            lambda chat: chat.sampling.max_tokens == 16,
        ),
        ("chat", {"thinking": {"budget_tokens": 64.0}}, lambda chat: chat.thinking_budget == 64),
        ("chat", {"stop_token_ids": [1.0, 2]}, lambda chat: chat.sampling.stop_token_ids == (1, 2)),
        (
            "chat",
            {"user": "u", "seed": -3.0, "unheard_of": None},
            lambda chat: chat.sampling.seed == -3,
        ),
        (
            "completions",
            {"prompt": [[1.0, 2.0], [3.0]]},
            lambda asked: asked.prompts == [[1, 2], [3]],
        ),
        (
            "responses",
            {"max_output_tokens": 16.0},
            lambda asked: asked.chat.sampling.max_tokens == 16,
        ),
        ("messages", {"max_tokens": 16.0}, lambda chat: chat.sampling.max_tokens == 16),
    ],
)
def test_a_whole_float_is_an_integer(
    api: str, more: dict[str, Any], look: Callable[[Any], bool]
) -> None:
    assert look(parse(api, **more))


@pytest.mark.parametrize("value", [1.5, 1e300, "16", True])
def test_what_is_no_integer_is_still_refused(value: Any) -> None:
    for name in ("max_tokens", "top_k"):
        with pytest.raises(RequestError) as refusal:
            parse("chat", **{name: value})
        assert refusal.value.param == name


def test_numbers_of_a_schema_stay_as_they_were_sent() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": 2.0}}}
    chat = parse("chat", tools=[tool], max_tokens=16.0)
    assert repr(chat.tools[0]["function"]["parameters"]["default"]) == "2.0"


@pytest.mark.parametrize(
    ("more", "switch", "budget", "effort_budget", "is_hidden"),
    [
        ({"reasoning_effort": "max"}, True, None, None, False),
        ({"reasoning_effort": "xhigh"}, True, None, None, False),
        ({"reasoning_effort": "medium"}, True, None, 8192, False),
        ({"reasoning_effort": "minimal"}, False, None, None, False),
        ({"reasoning": {"effort": "low"}}, True, None, 2048, False),
        ({"reasoning": {"effort": "none"}}, False, None, None, False),
        ({"reasoning": {"max_tokens": 100}}, True, 100, None, False),
        ({"reasoning": {"max_tokens": 100, "enabled": False}}, False, 100, None, False),
        ({"reasoning": {"enabled": True, "exclude": True}}, True, None, None, True),
        ({"reasoning": {}}, None, None, None, False),
        ({"include_reasoning": False}, None, None, None, True),
        ({"thinking_token_budget": 7}, None, 7, None, False),
        ({"thinking_budget": 7.0, "enable_thinking": True}, True, 7, None, False),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, True, None, None, True),
    ],
)
def test_every_way_to_speak_of_thinking_is_understood(
    more: dict[str, Any],
    switch: bool | None,
    budget: int | None,
    effort_budget: int | None,
    is_hidden: bool,
) -> None:
    chat = parse("chat", **more)
    assert chat.template_arguments.get("enable_thinking") is switch
    assert (chat.thinking_budget, chat.effort_budget, chat.hides_thoughts) == (
        budget,
        effort_budget,
        is_hidden,
    )


def test_a_thought_that_comes_back_by_its_other_name_is_one() -> None:
    said = {
        "role": "assistant",
        "content": "43",
        "reasoning": "17 and 26",
        "reasoning_details": [{}],
    }
    chat = parse("chat", messages=[*COUNTED["messages"], said, *COUNTED["messages"]])
    assert chat.messages[1]["reasoning_content"] == "17 and 26"


HELLO = COUNTED["messages"][0]


@pytest.mark.parametrize(
    "more",
    [
        {"content": None, "refusal": "I will not."},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": "I will", "refusal": " not."},
    ],
)
def test_a_refusal_becomes_the_assistants_text(more: dict[str, Any]) -> None:
    chat = parse("chat", messages=[HELLO, {"role": "assistant", **more}, HELLO])
    assert chat.messages[1]["content"] == "I will not."


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "messages[0].function_call is not"),
        ({"audio": {"id": "a"}}, "messages[0].audio is not supported"),
        ({"tool_calls": [{"id": "c", "type": "custom"}]}, "[0].tool_calls[0] has no function, its"),
        ({"tool_calls": [{"id": "c"}]}, "messages[0].tool_calls[0] has no function"),
        ({"content": [{"type": "text"}]}, "messages[0].content[0] has no text"),
        ({"content": [{"type": "refusal"}]}, "messages[0].content[0] has no refusal"),
        ({"content": [{"type": "hologram"}]}, "messages[0].content[0] is of type 'hologram'"),
    ],
)
def test_what_a_message_cannot_say_is_refused_by_name(message: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse("chat", messages=[{"role": "assistant", **message}, HELLO])
    assert named in str(refused.value)
    assert refused.value.param is not None
    assert refused.value.param.startswith("messages[0].")


@pytest.mark.parametrize(
    ("tool", "named"),
    [
        ({"type": "custom", "custom": {"name": "f"}}, "tools[0].type is 'custom'"),
        ({"type": "function"}, "tools[0] has no function"),
    ],
)
def test_a_tool_that_is_no_function_is_refused_by_its_type(
    tool: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(named)):
        parse("chat", tools=[tool])


def test_a_part_without_text_is_named_in_responses() -> None:
    with pytest.raises(RequestError, match=re.escape("input[0].content[0] has no text")):
        parse("responses", input=[{"role": "user", "content": [{"type": "input_text"}]}])


def test_usage_can_be_asked_for_as_openrouters_clients_do() -> None:
    assert parse("chat", usage={"include": True}).include_usage
    assert not parse("chat", usage={"include": False}).include_usage


def test_an_effort_of_anthropics_limits_a_thought() -> None:
    chat = parse("messages", thinking={"type": "adaptive"}, output_config={"effort": "medium"})
    assert chat.effort_budget == 8192
    old = parse("messages", output_format={"type": "json_schema", "schema": {"type": "object"}})
    assert old.json_form.schema == {"type": "object"}


def test_two_forms_of_anthropics_must_be_the_same() -> None:
    forms = [{"type": "json_schema", "schema": {"type": kind}} for kind in ("object", "array")]
    same = parse("messages", output_format=forms[0], output_config={"format": forms[0]})
    assert same.json_form.schema == forms[0]["schema"]
    with pytest.raises(RequestError, match="are different"):
        parse("messages", output_format=forms[1], output_config={"format": forms[0]})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/api/generate", {"prompt": "a"}),
        ("/api/embed", {"input": "a"}),
        ("/api/embeddings", {"prompt": "a"}),
        ("/completion", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/responses/compact", {"input": "a"}),
        ("/v1/conversations", {}),
    ],
)
def test_every_api_refuses_by_name_what_it_does_not_know(path: str, body: dict[str, Any]) -> None:
    def ask(**settings: Any) -> Answered:
        whole = json.dumps({**body, "no_such_field": 7, "nor_this": 7}).encode()
        return call(app_of(**settings), path, {"content-type": "application/json"}, "POST", whole)

    refused = ask()
    assert refused.status == 400
    assert b"no_such_field" in refused.body
    still_refused = ask(ignore_field=("no_such_field",))
    assert still_refused.status == 400
    assert b"nor_this" in still_refused.body
    assert b"no_such_field" not in still_refused.body
