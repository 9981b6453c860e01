"""No body, up to the largest allowed, delays other requests: expensive ones are refused early.

Tests of time count CPU seconds of this process, so other load does not matter. Each of these bodies
once took three to eleven seconds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import RequestError
from penstock.serve.anthropic.requests import parse_messages
from penstock.serve.body import decode_body
from penstock.serve.metrics import Metrics
from penstock.serve.openai.requests import ChatBody, parse_chat, parse_completion, parse_detokenize
from penstock.serve.requests import MAX_IDS
from penstock.serve.responses.items import MAX_ITEMS, Item, plain_messages
from penstock.serve.responses.requests import parse_response, response_request
from penstock.serve.text_engine import TextEngine
from penstock.text.json_values import MAX_STRINGS, has_more_values
from penstock.text.template import ChatTemplate, parse_arguments

MAX_BODY_BYTES = 31_000_000
LONGEST_S = 1.5
CHAT = '{"messages": [{"role": "user", "content": "x"}], '


def full_of(value: str, body: str) -> bytes:
    """Fills the body's ellipsis with as many copies of the value as fit."""
    start, end = (part.encode() for part in body.split("…"))
    another = f"{value},".encode()
    return start + another * ((MAX_BODY_BYTES - len(body)) // len(another)) + value.encode() + end


def parse_anthropic(body: bytes) -> None:
    parse_messages(body, None)


def parse_whole_response(body: bytes) -> None:
    response_request(parse_response(body), [])


def parse_arguments_of_calls(body: bytes) -> None:
    parse_arguments(parse_chat(body).messages)


CALL = (
    '{"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\\"a\\": '
    '[…]}"}]}'
)
CALLED = (
    '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", '
    '"arguments": "[…]"}}]}]}'
)
COSTLY: dict[str, tuple[Callable[[bytes], object], str, str, str | None]] = {
    "functions": (parse_chat, "[]", CHAT + '"functions": […]}', "functions"),
    "one field twice": (parse_chat, "[]", CHAT + '"functions": […], "functions": null}', None),
    "template arguments": (
        parse_chat,
        "[]",
        CHAT + '"chat_template_kwargs": {"a": […]}}',
        "chat_template_kwargs",
    ),
    "lists of ids": (parse_completion, "[]", '{"prompt": […]}', "prompt"),
    "blocks": (
        parse_anthropic,
        "{}",
        '{"max_tokens": 1, "messages": [{"role": "user", "content": […]}]}',
        "messages",
    ),
    "a conversation": (parse_response, "[]", '{"input": "x", "conversation": […]}', "conversation"),
    "arguments of an item": (parse_whole_response, "[]", CALL, "input"),
    "arguments of a message": (parse_arguments_of_calls, "[]", CALLED, "messages"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_millions_of_values_are_refused_at_once_with_the_field_that_has_them(name: str) -> None:
    parse, value, shape, param = COSTLY[name]
    body = full_of(value, shape)
    started = time.process_time()
    with pytest.raises(RequestError) as refusal:
        parse(body)
    assert time.process_time() - started < LONGEST_S
    assert refusal.value.param == param
    assert refusal.value.why
    assert refusal.value.todo


def num_values(value: Any) -> int:
    """One for each list and object, and one for each of their elements after the first."""
    if not isinstance(value, list | dict):
        return 0
    children = list(value.values()) if isinstance(value, dict) else value
    return max(1, len(children)) + sum(map(num_values, children))


odd_text = st.text(st.sampled_from('",[]{}:\\ax\n'), max_size=8)
any_json = st.recursive(
    st.none() | st.integers() | odd_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(odd_text, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(any_json, min_size=1, max_size=3), st.booleans())
def test_values_are_counted_and_what_strings_hold_is_not(values: list[Any], is_ascii: bool) -> None:
    texts = [json.dumps(value, ensure_ascii=is_ascii).encode() for value in values]
    total = sum(map(num_values, values))
    assert not has_more_values(texts, total)
    if total:
        assert has_more_values(texts, total - 1)


def test_so_many_strings_that_telling_them_apart_takes_long_are_too_many() -> None:
    assert has_more_values([json.dumps([","] * (MAX_STRINGS + 1)).encode()], MAX_STRINGS + 1)
    assert not has_more_values([json.dumps([","] * MAX_STRINGS).encode()], MAX_STRINGS)


def test_a_text_may_look_like_millions_of_values() -> None:
    text = '\\",[{' * 10**5
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    assert parse_chat(body).messages == [{"role": "user", "content": text}]
    arguments = json.dumps({"a": text})
    call = {"function": {"arguments": arguments}}
    parse_arguments([{"tool_calls": [call]}])
    assert call["function"]["arguments"] == {"a": text}


def test_as_many_ids_as_a_long_context_holds_may_be_sent() -> None:
    ids = [7] * MAX_IDS
    (prompt,) = parse_completion(
        json.dumps({"prompt": ids, "stop_token_ids": [3] * 128}).encode()
    ).prompts
    assert prompt == ids
    assert parse_detokenize(json.dumps({"tokens": ids}).encode()) == ids


def test_decoding_makes_no_garbage_to_look_for_and_leaves_the_collector_on() -> None:
    body = json.dumps(
        {"messages": [{"role": "user", "content": "x"}], "functions": [[]] * 100_000}
    ).encode()
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(note)
    try:
        decode_body(body, ChatBody)
    finally:
        gc.callbacks.remove(note)
    assert len(collections) < 10
    with pytest.raises(RequestError):
        decode_body(body[:-1], ChatBody)
    assert gc.isenabled()


# What grows while a conversation is put together


CALLING = Item(type="function_call", call_id="1", name="f", arguments="{}")
GROWING: dict[str, tuple[list[Item], Callable[[str], Item], str, str]] = {
    "instructions": ([], lambda text: Item(role="system", content=text), "content", "\n\n"),
    "thoughts": ([], lambda text: Item(type="reasoning", content=text), "reasoning_content", ""),
    "words": ([CALLING], lambda text: Item(role="assistant", content=text), "content", "\n\n"),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_message_of_many_items_takes_no_longer_than_they_are(name: str) -> None:
    before, item_of, field, separator = GROWING[name]
    text = "x" * 2000
    items = [*before, *[item_of(text)] * (MAX_ITEMS - 1)]
    started = time.process_time()
    (message,) = plain_messages([], items, None)
    assert time.process_time() - started < LONGEST_S
    assert message[field] == separator.join([text] * (MAX_ITEMS - 1))


def test_a_conversation_has_no_more_items_kept_than_sent() -> None:
    items = [Item(role="user", content="x")] * (MAX_ITEMS // 2 + 1)
    plain_messages(items, items[1:-1], None)
    with pytest.raises(RequestError, match=f"{MAX_ITEMS + 2} items") as refusal:
        plain_messages(items, items, None)
    assert refusal.value.param == "input"


# Tools of one name


def test_tools_of_one_name_are_one_however_often_they_are_offered_and_allowed() -> None:
    """OpenAI accepts them."""
    names = ["g", *["f"] * 1000]
    tools = [
        {"function": {"name": name, "description": str(place)}} for place, name in enumerate(names)
    ]
    choice = {"type": "allowed_tools", "allowed_tools": {"tools": tools[::-1], "mode": "required"}}
    fields = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
    chat = parse_chat(json.dumps(fields).encode())
    assert chat.tools == chat.must_call
    assert [tuple(tool["function"].values()) for tool in chat.tools or ()] == [
        ("g", "0"),
        ("f", "1000"),
    ]


def test_tools_of_one_name_are_refused_as_anthropic_refuses_them() -> None:
    tools = [{"name": name, "input_schema": {}} for name in ("f", "g", "f")]
    fields = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    with pytest.raises(RequestError, match=r"tools\[2\] has the name of tools\[0\]"):
        parse_messages(json.dumps(fields).encode(), None)


# Texts of tokens


def test_texts_of_many_tokens_are_made_beside_the_loop_and_each_once() -> None:
    threads: list[threading.Thread] = []

    class Spelling:
        def encode(self, text: str, *options: object) -> list[int]:
            return [1, 2] * 50

        def token_bytes(self, token_id: int) -> bytes:
            threads.append(threading.current_thread())
            return b"ab"[token_id - 1 : token_id]

    text = TextEngine(None, Spelling(), ChatTemplate(None), Metrics())  # type: ignore[arg-type]
    assert asyncio.run(text.token_texts([1, 2] * 50)) == ["a", "b"] * 50
    assert len(threads) == 2
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("name", ["metadata", "no_such_field"])
def test_a_body_that_is_nested_too_deeply_is_refused_with_that_reason(name: str) -> None:
    body = CHAT + f'"{name}": {"[" * 50_000 + "]" * 50_000}}}'
    with pytest.raises(RequestError, match="nested too deeply"):
        parse_chat(body.encode())
