"""System messages in unusual places: every API builds the same conversation from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.serve.anthropic.requests import parse_messages
from penstock.serve.openai.requests import parse_chat
from penstock.serve.responses.requests import parse_response, response_request
from penstock.text.template import ChatTemplate

KIND, BRIEF, SHELL = "Be kind.", "Be brief.", "You may run shell commands now."
REMINDER = f"<system-reminder>\n{SHELL}\n</system-reminder>"


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def of_chat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return parse_chat(json.dumps({"messages": messages}).encode()).messages


def of_response(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return response_request(
        parse_response(json.dumps({"input": messages}).encode()), []
    ).chat.messages


def of_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return parse_messages(
        json.dumps({"messages": messages, "max_tokens": 9}).encode(), None
    ).messages


@pytest.mark.parametrize("parse", [of_chat, of_response, of_message])
@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (
            [say("system", KIND), say("system", BRIEF), say("user", "Hi")],
            [say("system", f"{KIND}\n\n{BRIEF}"), say("user", "Hi")],
        ),
        (
            [say("system", KIND), say("user", "Hi"), say("system", SHELL)],
            [say("system", KIND), say("user", f"Hi\n\n{REMINDER}")],
        ),
        (
            [
                say("user", "Hi"),
                say("assistant", "Hello."),
                say("system", SHELL),
                say("user", "List files."),
            ],
            [
                say("user", "Hi"),
                say("assistant", "Hello."),
                say("user", f"{REMINDER}\n\nList files."),
            ],
        ),
        (
            [say("user", "Hi"), say("assistant", "Hello."), say("system", SHELL)],
            [say("user", "Hi"), say("assistant", "Hello."), say("user", REMINDER)],
        ),
    ],
)
def test_instructions_are_placed_where_templates_accept_them(
    parse: Any, sent: Any, read: Any
) -> None:
    assert parse(sent) == read
    ChatTemplate.load(None).render(read)


@pytest.mark.parametrize("parse", [of_chat, of_response])
def test_a_developers_message_inside_a_conversation_is_an_instruction(parse: Any) -> None:
    assert parse([say("user", "Hi"), say("developer", SHELL)]) == [say("user", f"Hi\n\n{REMINDER}")]


def test_a_users_messages_stay_apart_where_no_instruction_is_between() -> None:
    messages = [say("user", "One."), say("user", "Two.")]
    assert of_chat(messages) == messages
