"""A server whose engine closes thinking answers like one that closes it itself, in every API."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import Server, start_server
from thinking_template import write_thinking_template

QUESTION = "Tom has 23 apples. He buys 4 bags with 6 apples each. How many apples does he have?"
ASKED = {"model": "any", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
FUNCTION = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
OLLAMA = {
    "model": "any",
    "messages": ASKED["messages"],
    "options": {"num_predict": 30, "temperature": 0},
}
CHAT = "/v1/chat/completions"
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def chat(budget: int, max_tokens: int = 40, **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {**ASKED, "thinking_budget": budget, "max_tokens": max_tokens, **fields}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"a budget of {n}": chat(n) for n in (1, 2, 15)},
    **{f"{n} tokens in all": chat(12, n) for n in (15, 16)},
    "log-probabilities": chat(9, logprobs=True, top_logprobs=3),
    "token ids": chat(9, return_token_ids=True),
    "several replies": chat(9, n=3, seed=5),
    "penalties": chat(9, presence_penalty=0.5),
    "a bias": chat(9, logit_bias={"300": 5}),
    "at least": chat(9, 20, min_tokens=18),
    "a stop string of the answer": chat(9, stop=["a"]),
    "a stop string of both": chat(9, stop=["</think>"]),
    "a loop guard": chat(9, loop_guard=True),
    "tools": chat(9, 60, **TOOLS),
    "one call after the other": chat(9, 60, **TOOLS, parallel_tool_calls=False),
    "a call that must come": chat(9, 60, **TOOLS, tool_choice="required"),
    "a session": chat(9, session_id="apples"),
    "a stream": chat(9, stream=True, stream_options=USAGE),
    "a stream with everything": chat(
        9, stream=True, stream_options=USAGE, logprobs=True, top_logprobs=2, return_token_ids=True
    ),
    "a stream with tools": chat(9, 60, stream=True, **TOOLS),
    "Anthropic": (
        "/v1/messages",
        {**ASKED, "max_tokens": 40, "thinking": {"type": "enabled", "budget_tokens": 9}},
    ),
    "an Anthropic stream": (
        "/v1/messages",
        {
            **ASKED,
            "max_tokens": 40,
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "stream": True,
        },
    ),
    "Responses": (
        "/v1/responses",
        {"model": "any", "input": QUESTION, "temperature": 0, "max_output_tokens": 30},
    ),
    "ollama": (
        "/api/chat",
        {**OLLAMA, "think": True, "stream": False},
    ),
    "an ollama stream": (
        "/api/chat",
        {**OLLAMA, "think": True},
    ),
}
# In these an engine sees too little of a reply to close its thinking, or there is nothing to close.
LEFT_TO_SERVERS = {"a budget of 1", "penalties", "a call that must come"}
FLEETING = re.compile(r"id|\w+_id|created\w*|completed_at|\w+_duration|signature|encrypted_content")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking_template(tmp_path_factory.mktemp("template"))


@contextlib.contextmanager
def both(template: Path, speculate: str) -> Iterator[tuple[Server, Server]]:
    """A server with an engine that closes thinking, and one with an engine that does not."""
    serve = {"chat_template": str(template)}
    engine = {"page_size": 64, "speculate": speculate}
    with (
        start_server(engine=engine, serve=serve) as closing,
        start_server(engine={**engine, "deterministic": True}, serve=serve) as other,
    ):
        yield closing, other


def ask(server: Server, case: str) -> bytes:
    path, body = CASES[case]
    answer = server.http.post(server.url + path, content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    return answer.content


def num_prompts(server: Server) -> int:
    counters = server.stats()["prefix"]
    return sum(n for name, n in counters.items() if name == "hit" or name.startswith("miss_"))


def parsed(content: bytes) -> Any:
    lines = [line.removeprefix(b"data: ") for line in content.splitlines() if line]
    return [lasting(json.loads(one)) if one.startswith(b"{") else one for one in lines]


def lasting(value: Any) -> Any:
    """Without ids and times."""
    if isinstance(value, dict):
        return {name: lasting(one) for name, one in value.items() if not FLEETING.fullmatch(name)}
    return [lasting(one) for one in value] if isinstance(value, list) else value


def rounded(value: Any) -> Any:
    """A decode and a prefill round differently, which log-probabilities show."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def test_every_answer_is_that_of_a_server_that_closes_thinking_itself(template: Path) -> None:
    with both(template, "off") as (closing, other):
        for case in CASES:
            before = num_prompts(closing)
            found, expected = parsed(ask(closing, case)), parsed(ask(other, case))
            assert found == rounded(expected), case
            num_replies = CASES[case][1].get("n", 1)
            assert num_prompts(closing) - before == num_replies or case in LEFT_TO_SERVERS, case
        assert num_prompts(other) > num_prompts(closing) + len(CASES) / 2


def test_with_drafts_too(template: Path) -> None:
    """How many tokens an event has depends on which drafts were tried."""
    with both(template, "auto") as (closing, other):
        for case in ("a budget of 15", "16 tokens in all", "token ids", "tools", "Responses"):
            found, expected = parsed(ask(closing, case)), parsed(ask(other, case))
            assert found == rounded(expected), case
