"""The operator's sampling defaults: request fields override them; wrong ones fail at start."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.config import ServeConfig
from penstock.errors import ConfigError
from penstock.serve.anthropic.requests import parse_messages
from penstock.serve.openai.requests import parse_chat, parse_completion
from penstock.serve.responses.requests import parse_response, response_request
from penstock.serve.server import check_sampling_defaults
from penstock.types import SamplingParams

MESSAGES = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
Parse = Callable[[bytes, dict[str, Any]], SamplingParams]
APIS: dict[str, tuple[dict[str, Any], Parse]] = {
    "chat": (MESSAGES, lambda body, defaults: parse_chat(body, defaults).sampling),
    "completions": (
        {"prompt": "x"},
        lambda body, defaults: parse_completion(body, defaults).sampling,
    ),
    "messages": (MESSAGES, lambda body, defaults: parse_messages(body, None, defaults).sampling),
    "responses": (
        {"input": "x"},
        lambda body, defaults: (
            response_request(parse_response(body), [], defaults=defaults).chat.sampling
        ),
    ),
}


@pytest.mark.parametrize("api", APIS)
def test_a_requests_own_fields_win_over_the_operators(api: str) -> None:
    body, parse = APIS[api]
    defaults = ServeConfig(temperature=0.7, top_p=0.8, repetition_penalty=1.1).sampling_defaults

    def drawn_with(**fields: Any) -> tuple[float, float, float]:
        sampling = parse(json.dumps({**body, **fields}).encode(), defaults)
        return sampling.temperature, sampling.top_p, sampling.repetition_penalty

    assert drawn_with() == (0.7, 0.8, 1.1)
    assert drawn_with(temperature=0) == (0, 0.8, 1.1)
    assert drawn_with(top_p=1.0, temperature=0.1) == (0.1, 1.0, 1.1)
    sampling = parse(json.dumps(body).encode(), ServeConfig().sampling_defaults)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0, 1, 1)


def test_greedy_is_a_temperature_of_0() -> None:
    assert ServeConfig(greedy=True, top_p=0.5).sampling_defaults == {
        "temperature": 0.0,
        "top_p": 0.5,
    }
    assert ServeConfig(greedy=True, temperature=0.0).sampling_defaults == {"temperature": 0.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"repetition_penalty": 0.0},
        {"greedy": True, "temperature": 0.7},
        {"thinking_share": 0.0},
        {"thinking_share": 1.5},
        {"reasoning": "contents"},
        {"routing": "random"},
    ],
)
def test_a_wrong_default_is_refused_at_start_and_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        check_sampling_defaults(ServeConfig(**wrong))
