"""Fields over HTTP: response formats are enforced, salts separate caches, errors fit the API."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from serving import MESSAGES, Server, assert_refused

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9}},
    "required": ["n"],
}
IS_SCHEMA, IS_DIGITS = r'\{\s*"n"\s*:\s*-?\d+\s*\}', r"\d{3}"
FORMS: list[tuple[dict[str, Any], str]] = [  # and a pattern that the reply matches
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, IS_SCHEMA),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
        IS_SCHEMA,
    ),
    ({"guided_json": SCHEMA}, IS_SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, IS_SCHEMA),
    ({"json_schema": json.dumps(SCHEMA)}, IS_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, IS_SCHEMA),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, IS_DIGITS),
    ({"guided_regex": "[0-9]{3}"}, IS_DIGITS),
    ({"regex": "[0-9]{3}"}, IS_DIGITS),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"structured_outputs": {"grammar": 'start: "left" | "right"'}}, "left|right"),
    ({"guided_grammar": 'root ::= "left" | "right"'}, "left|right"),
    ({"ebnf": 'root ::= "left" | "right"'}, "left|right"),
    ({"grammar": 'root ::= "left" | "right"', "regex": None}, "left|right"),
]
WRONG_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"unheard_of": 1}}, "structured_outputs.unheard_of"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[" * 200_000}, "guided_json"),
    ({"guided_json": "[" * 20_000}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
]
LONG = (
    "Of all rivers I like those best that nobody has counted the bridges of, since they are few. "
    * 6
)


@pytest.mark.parametrize(("form", "pattern"), FORMS)
def test_a_form_is_enforced_by_every_name_it_has(
    server: Server, form: dict[str, Any], pattern: str
) -> None:
    chat = server.post({"messages": MESSAGES, "max_tokens": 40, **form})
    assert chat.status_code == 200, chat.text
    assert re.fullmatch(pattern, chat.json()["choices"][0]["message"]["content"])
    completion = server.post({"prompt": "Once", "max_tokens": 40, **form}, "/v1/completions")
    assert completion.status_code == 200, completion.text
    assert re.fullmatch(pattern, completion.json()["choices"][0]["text"])


def test_a_form_comes_after_a_thought(server: Server) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 60,
        "thinking": True,
        "guided_choice": ["left", "right"],
    }
    message = server.post(body).json()["choices"][0]["message"]
    assert message["content"] in ("left", "right")
    assert message["reasoning_content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("form", "param"), WRONG_FORMS)
def test_a_wrong_form_is_a_400_that_names_it(
    server: Server, form: dict[str, Any], param: str, path: str
) -> None:
    ask = {"messages": MESSAGES} if "chat" in path else {"prompt": "Once"}
    assert_refused(server.post({**ask, **form}, path), 400, param)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "more", [{"reasoning": {"enabled": True, "exclude": True}}, {"include_reasoning": False}]
)
def test_an_excluded_thought_is_generated_and_not_sent(
    server: Server, more: dict[str, Any], is_stream: bool
) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 40,
        "enable_thinking": True,
        "stream": is_stream,
        **more,
    }
    answer = server.post({**body, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200
    assert "reasoning_content" not in answer.text.replace('"reasoning_content":null', "")
    (num_tokens,) = re.findall(r'"reasoning_tokens":(\d+)', answer.text)
    assert int(num_tokens) > 0


CHAT = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}
OLLAMA = {"stream": False, "options": {"num_predict": 2}}
SALTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": LONG, "max_tokens": 2}),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 2}),
    ("/v1/messages", CHAT),
    ("/v1/embeddings", {"input": LONG}),
    ("/v1/score", {"text_1": "no", "text_2": LONG}),
    ("/api/chat", {"messages": CHAT["messages"], **OLLAMA}),
    ("/api/generate", {"prompt": LONG, "raw": True, **OLLAMA}),
    ("/api/embed", {"input": LONG}),
    ("/completion", {"prompt": LONG, "n_predict": 2}),
]


@pytest.mark.parametrize(("path", "body"), SALTED, ids=[path for path, _ in SALTED])
def test_a_salt_parts_what_is_cached_in_every_api(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    def num_reused() -> float:
        text = server.http.get(f"{server.url}/metrics").text
        found = re.findall(r"^penstock_prefix_tokens_reused_total\S* (\S+)$", text, re.M)
        return sum(map(float, found))

    def reuses(salt: str) -> bool:
        before = num_reused()
        answer = server.post({**body, "cache_salt": f"{salt} of {path}"}, path)
        assert answer.status_code == 200, answer.text
        return num_reused() > before

    assert [reuses(salt) for salt in "aabba"] == [False, True, False, True, True]


@pytest.mark.parametrize("name", ["unheard_of", "mirostat"])
def test_a_refused_field_is_named_in_each_apis_own_form(server: Server, name: str) -> None:
    chat, prompt = {"messages": MESSAGES, "max_tokens": 2, name: 7}, {"prompt": "Once", name: 7}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", prompt),
        ("/invocations", chat),
        ("/invocations", prompt),
        ("/invocations", {**prompt, "thinking": True}),
        ("/v1/responses", {"input": "Once", name: 7}),
        ("/tokenize", prompt),
    ):
        assert_refused(server.post(body, path), 400, name)
    answer = server.post(chat, "/v1/messages")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert name in answer.json()["error"]["message"]


def test_what_the_operator_has_named_is_ignored_in_every_api(server: Server) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 2, "vendor_extra": {"a": 1}}
    prompt = {"prompt": "Once", "max_tokens": 2, "vendor_extra": 1}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", prompt),
        ("/invocations", chat),
        ("/invocations", prompt),
        ("/v1/responses", {"input": "Once", "max_output_tokens": 2, "vendor_extra": 1}),
        ("/v1/messages", chat),
        ("/v1/messages/count_tokens", chat),
    ):
        assert server.post(body, path).status_code == 200


@pytest.mark.parametrize("thinking", [False, True, None, {"type": "disabled"}])
def test_an_invocation_may_say_whether_to_think(server: Server, thinking: Any) -> None:
    for ask in ({"prompt": "Once"}, {"messages": MESSAGES}):
        answer = server.post(
            {**ask, "max_tokens": 4.0, "thinking": thinking, "user": "u"}, "/invocations"
        )
        assert answer.status_code == 200, answer.text
