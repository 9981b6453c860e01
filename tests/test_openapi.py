"""The OpenAPI document matches the server's real responses."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.serve.openapi import openapi_document
from serving import MESSAGES, Server

DOCUMENT = openapi_document()
TEXT, CHAT = {"prompt": "Once", "max_tokens": 2}, {"messages": MESSAGES, "max_tokens": 2}
WHOLE = {"stream": False, "options": {"num_predict": 2}}
PAIRS = {"query": "a", "documents": ["b", "c"]}
CALLS: list[tuple[str, dict[str, Any] | None]] = [  # None: GET
    *((path, None) for path in ("/health", "/ready", "/version", "/openapi.json", "/v1/models")),
    *((path, None) for path in ("/v1/sessions", "/props", "/slots")),
    *((path, None) for path in ("/tokenizer_info", "/api/tags", "/api/ps", "/api/version")),
    ("/v1/chat/completions", {**CHAT, "n": 2, "session_id": "described"}),
    ("/v1/sessions", None),
    ("/v1/completions", TEXT),
    ("/invocations", CHAT),
    ("/invocations", TEXT),
    ("/tokenize", {"prompt": "Once"}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/rerank", PAIRS),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/v1/responses", {"input": "Once", "max_output_tokens": 2}),
    ("/v1/responses/input_tokens", {"input": "Once"}),
    ("/v1/conversations", {}),
    ("/v1/messages", CHAT),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/completion", {"prompt": "Once", "n_predict": 2}),
    ("/completion", {"prompt": ["Once", "Twice"], "n_predict": 2}),
    ("/apply-template", {"messages": MESSAGES}),
    ("/api/chat", {"messages": MESSAGES, **WHOLE}),
    ("/api/generate", {"prompt": "Once", **WHOLE}),
    ("/api/show", {"model": "penstock-tiny"}),
    ("/api/embed", {"input": "a"}),
    ("/api/embeddings", {"prompt": "a"}),
]
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def faults(schema: dict[str, Any], value: Any, place: str = "") -> list[str]:
    """The path of a value that does not match; records which schemas are used."""
    if "$ref" in schema:
        return faults(DOCUMENT["components"]["schemas"][schema["$ref"].split("/")[-1]], value)
    if "anyOf" in schema:
        each = [faults(one, value, place) for one in schema["anyOf"]]
        return min(each, key=len)
    if "const" in schema and value != schema["const"]:
        return [f"{place} is {value!r}, not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{place} is {value!r}, not one of {schema['enum']}"]
    if "type" in schema and not isinstance(value, TYPES[schema["type"]]):
        return [f"{place} is a {type(value).__name__}, not a {schema['type']}"]
    found = [
        f"{place}.{name} is missing" for name in schema.get("required", ()) if name not in value
    ]
    for name, inner in schema.get("properties", {}).items():
        found += faults(inner, value[name], f"{place}.{name}") if name in value else []
    for number, one in enumerate(value if "items" in schema else ()):
        found += faults(schema["items"], one, f"{place}[{number}]")
    return found


def described(path: str, method: str, status: str) -> dict[str, Any]:
    answers: dict[str, Any] = DOCUMENT["paths"][path][method]["responses"]
    schema: dict[str, Any] = answers[status]["content"]["application/json"]["schema"]
    return schema


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
def test_an_answer_is_as_the_document_says(
    server: Server, path: str, body: dict[str, Any] | None
) -> None:
    answer = (
        server.http.get(server.url + path)
        if body is None
        else server.http.post(server.url + path, json=body)
    )
    assert answer.status_code == 200, answer.text
    method = "get" if body is None else "post"
    assert faults(described(path, method, "200"), answer.json()) == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_refusal_is_as_the_document_says(server: Server, path: str) -> None:
    answer = server.http.post(server.url + path, json={"unheard_of": 1})
    assert answer.status_code == 400
    assert faults(described(path, "post", "4XX"), answer.json()) == []


def test_what_is_not_as_described_is_found() -> None:
    schema = described("/v1/chat/completions", "post", "200")
    choice = {"index": 0, "message": {}, "finish_reason": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": "2"}
    told = {"id": "", "object": "other", "created": 1, "choices": [choice, {}], "usage": usage}
    assert sorted(faults(schema, told)) == [
        *(f".choices[1].{name} is missing" for name in ("finish_reason", "index", "message")),
        ".model is missing",
        ".object is 'other', not 'chat.completion'",
        ".usage.total_tokens is a str, not a integer",
    ]
