"""Images and files in tool results: every API leaves them out and reports it in the reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import RequestError
from penstock.serve.anthropic.requests import parse_messages
from penstock.serve.instructions import WARNING_HEADER, warning_headers
from penstock.serve.openai.requests import parse_chat
from penstock.serve.requests import ChatRequest
from penstock.serve.responses.requests import parse_response, response_request

IMAGE = "[image left out: this model reads text only]"
WORDS = {"type": "text", "text": "Words."}
DOCUMENT = "[document left out: this model reads text only]"
ASKED = {"role": "user", "content": "Look."}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def chat_of(*parts: dict[str, Any]) -> ChatRequest:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": parts},
    ]
    return parse_chat(json.dumps({"messages": [ASKED, *turns]}).encode())


def message_of(*blocks: dict[str, Any]) -> ChatRequest:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return parse_messages(json.dumps({"messages": [ASKED, *turns], "max_tokens": 9}).encode(), None)


def response_of(*parts: dict[str, Any]) -> ChatRequest:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [ASKED, call, {"type": "function_call_output", "call_id": "1", "output": parts}]
    return response_request(parse_response(json.dumps({"input": items}).encode()), []).chat


@pytest.mark.parametrize(
    ("chat", "content", "omitted"),
    [
        (
            chat_of(
                {"type": "text", "text": "Seen: "}, {"type": "image_url", "image_url": {"url": "x"}}
            ),
            f"Seen: {IMAGE}",
            ["image at messages[2].content[1]"],
        ),
        (
            message_of({"type": "text", "text": "Seen:"}, {"type": "image", "source": SOURCE}),
            f"Seen:\n\n{IMAGE}",
            ["image at messages[2].content[0].content[1]"],
        ),
        (
            message_of({"type": "document", "source": {**SOURCE, "media_type": "application/pdf"}}),
            DOCUMENT,
            ["document at messages[2].content[0].content[0]"],
        ),
        (
            message_of({"type": "document", "source": {"type": "text", "data": "Words."}}),
            "Words.",
            [],
        ),
        (
            message_of(
                {
                    "type": "document",
                    "title": "T",
                    "context": "C",
                    "source": {"type": "content", "content": [WORDS, {"type": "image"}]},
                },
                {"type": "document", "source": {"type": "content", "content": "More."}},
            ),
            f"T\n\nC\n\nWords.\n\n{IMAGE}\n\nMore.",
            ["image at messages[2].content[0].content[0].source.content[1]"],
        ),
        (
            message_of({"type": "search_result", "title": "T", "source": "S", "content": [WORDS]}),
            "T\n\nS\n\nWords.",
            [],
        ),
        (
            response_of(
                {"type": "input_text", "text": "Seen: "}, {"type": "input_image", "image_url": "x"}
            ),
            f"Seen: {IMAGE}",
            ["image at input[2].output[1]"],
        ),
        (
            response_of({"type": "input_file", "file_id": "x"}),
            DOCUMENT,
            ["document at input[2].output[0]"],
        ),
    ],
)
def test_what_is_no_text_in_a_result_is_left_out_and_reported(
    chat: ChatRequest, content: str, omitted: list[str]
) -> None:
    result = chat.messages[-1]
    assert (result["role"], result["content"]) == ("tool", content)
    assert chat.omitted == omitted


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "search_result", "title": "T", "content": [WORDS]}, "source"),
        ({"type": "search_result", "title": "T", "source": "S", "content": "x"}, "content"),
        ({"type": "document", "source": {"type": "text", "data": 5}}, "source.data"),
        ({"type": "document", "source": {"type": "content", "content": [{}]}}, "source.content[0]"),
    ],
)
def test_a_wrong_part_of_a_result_is_named(block: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        message_of(block)
    assert refused.value.param == f"messages[2].content[0].content[0].{param}"


def test_the_answer_names_what_was_left_out() -> None:
    assert warning_headers([]) == {}
    (warning,) = warning_headers([f"image at messages[{i}]" for i in range(20)]).values()
    assert "image at messages[0]" in warning
    assert warning.endswith("and 12 more")
    assert warning.isascii()
    assert WARNING_HEADER == "x-penstock-warning"


def test_a_users_own_image_is_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(RequestError, match="image_url"):
        parse_chat(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
