"""A server with speculation gives the same replies: whole requests, with all server features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.assets import default_model
from serving import Server, start_server

QUESTION = "Tom has 12 marbles and buys 7 more. Then he gives away 5. How many marbles are left?"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "unit": {"enum": ["marbles", "apples"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 40},
    "stop string": {"max_tokens": 80, "stop": ["####", "marbles ar"]},
    "thinking budget": {"max_tokens": 40, **THINKING, "thinking": {"budget_tokens": 9}},
    "thinking share": {"max_tokens": 40, **THINKING},
    "drawn": {"max_tokens": 24, "temperature": 0.9, "seed": 5, "n": 3},
    "log-probabilities": {"max_tokens": 20, "logprobs": True, "top_logprobs": 3},
    "penalties": {"max_tokens": 24, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    "logit bias": {"max_tokens": 16, "logit_bias": {"220": -5}},
    "schema": {
        "max_tokens": 60,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA},
        },
    },
}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    engine = {"model": str(default_model()), "max_rows": 8, "deterministic": True, "page_size": 64}
    with (
        start_server({**engine, "speculate": "off"}) as plain,
        start_server({**engine, "speculate": "mtp:2"}) as drafting,
    ):
        yield plain, drafting


# test_speculation.py also tests the others; these are the server's part.
EVERYDAY = ("greedy", "stop string", "thinking budget", "drawn", "schema")


@pytest.mark.parametrize(
    "name",
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in BODIES],
)
def test_an_answer_with_drafts_is_the_answer_without(
    servers: tuple[Server, Server], name: str
) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "temperature": 0, **BODIES[name]}
    plain, drafting = (server.post(body).json() for server in servers)
    assert drafting["choices"] == plain["choices"]
    assert drafting["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


def test_metrics_say_what_drafts_brought(servers: tuple[Server, Server]) -> None:
    plain, drafting = (server.http.get(f"{server.url}/metrics").text for server in servers)
    assert 'penstock_accepted_tokens_total{replica="0",drafter="mtp",place="1"}' in drafting
    assert "penstock_draft_saved_seconds" in drafting
    assert "draft" not in plain
    assert [server.health().json()["speculate"] for server in servers] == ["off", "mtp:2"]
