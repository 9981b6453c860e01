"""A relay continues the stream of a lost server on another one: the client's bytes are those of an
uninterrupted stream, wherever it was cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from penstock.serve.journal import MARK_BEGIN, MARKS_HEADER, RELAY_HEADER, MarkedStream
from serving import MESSAGES, Server, start_server
from thinking_template import write_thinking_template
from two_layers import two_layers

KEY = "of-the-relay"
# Replies are equal to the last bit, wherever they are computed, only in fixed tiles and chunks.
# With drafts, how many tokens an event has depends on which of them were tried.
ENGINE = {"deterministic": True, "page_size": 64, "max_rows": 4, "speculate": "off"}
FREE = {"max_tokens": 24, "ignore_eos": True, "stream": True}
CHAT = {"messages": MESSAGES, **FREE}
USAGE = {"stream_options": {"include_usage": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/chat/completions", {**CHAT, **USAGE, "temperature": 0.0}),
    "drawn without a seed": ("/v1/chat/completions", {**CHAT, "temperature": 1.0}),
    "stop string": ("/v1/chat/completions", {**CHAT, "temperature": 0.0, "stop": ["e"]}),
    "thinking with a budget": (
        "/v1/chat/completions",
        {
            **CHAT,
            "seed": 3,
            "temperature": 1.0,
            "chat_template_kwargs": {"enable_thinking": True},
            "thinking_token_budget": 8,
        },
    ),
    "completion": ("/v1/completions", {**FREE, "prompt": "A river", "seed": 5, "temperature": 0.9}),
    "messages": (
        "/v1/messages",
        {"model": "any", "messages": MESSAGES, "max_tokens": 24, "stream": True, "temperature": 0},
    ),
    "ollama": (
        "/api/chat",
        {"model": "any", "messages": MESSAGES, "options": {"num_predict": 12, "temperature": 0}},
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = write_thinking_template(tmp_path_factory.mktemp("template"))
    serve = {"relay_key": KEY, "chat_template": str(template), "enable_thinking": False}
    with start_server(engine={**ENGINE, "model": two_layers()}, serve=serve) as server:
        yield server


def ask(server: Server, case: str, relay: str, said: bytes = b"") -> bytes:
    path, body = CASES[case]
    answer = server.http.post(
        server.url + path,
        content=said + json.dumps(body).encode(),
        headers={RELAY_HEADER: relay, "content-type": "application/json"},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers[MARKS_HEADER] == "1"
    return answer.content


def without_clocks(data: bytes) -> bytes:
    """Ollama's events say when they were made."""
    lines = data.splitlines()
    if not lines[0].startswith(b"{"):
        return data
    clocks = {"created_at", "total_duration", "load_duration"}
    clocks |= {"prompt_eval_duration", "eval_duration"}
    events = [json.loads(line) for line in lines]
    kept = [{k: v for k, v in event.items() if k not in clocks} for event in events]
    return json.dumps(kept).encode()


@pytest.mark.parametrize("case", CASES)
def test_a_stream_goes_on_at_another_server_as_if_nothing_had_happened(
    server: Server, case: str
) -> None:
    sent = ask(server, case, KEY)
    whole = MarkedStream()
    expected = whole.take(sent) + whole.end()
    assert whole.may_resume
    num_marks = sent.count(MARK_BEGIN)
    assert num_marks > 4
    for number in {1, 2, num_marks // 2, num_marks}:
        cut = [place for place, byte in enumerate(sent) if byte == MARK_BEGIN[0]][number - 1]
        cut = sent.index(b"\n", cut) + 1 + 3  # and some of what follows, which is said again
        stream = MarkedStream()
        seen = stream.take(sent[:cut])
        id, said = stream.resume()
        rest = ask(server, case, f"{KEY} {id} {len(said)}", said)
        seen += stream.take(rest) + stream.end()
        assert without_clocks(seen) == without_clocks(expected), number
        assert stream.said == whole.said  # so it may be lost again


def test_with_drafts_it_says_the_same_tokens_in_other_pieces() -> None:
    with start_server(engine={**ENGINE, "speculate": "mtp:3"}, serve={"relay_key": KEY}) as server:
        sent = ask(server, "greedy", KEY)
        whole = MarkedStream()
        expected = whole.take(sent) + whole.end()
        marks = [place for place, byte in enumerate(sent) if byte == MARK_BEGIN[0]]
        for cut in (marks[1], marks[len(marks) // 2]):
            stream = MarkedStream()
            seen = stream.take(sent[: sent.index(b"\n", cut) + 1])
            id, said = stream.resume()
            seen += stream.take(ask(server, "greedy", f"{KEY} {id} {len(said)}", said))
            assert text_of(seen + stream.end()) == text_of(expected) != ""
            assert [*chain(*stream.said.deltas)] == [*chain(*whole.said.deltas)]


def text_of(events: bytes) -> str:
    lines = [line.removeprefix(b"data: ") for line in events.splitlines() if line]
    found = [json.loads(line) for line in lines if line != b"[DONE]"]
    choices = [choice for event in found for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_only_a_relay_gets_marks_or_resumes(server: Server) -> None:
    path, body = CASES["greedy"]
    said = b'{"id":"' + b"a" * 32 + b'","deltas":[[5]]}'
    for relay in ("", "another", f"another {'a' * 32} {len(said)}"):
        answer = server.http.post(server.url + path, json=body, headers={RELAY_HEADER: relay})
        assert MARKS_HEADER not in answer.headers
        assert MARK_BEGIN not in answer.content
        assert b"a" * 32 not in answer.content


def test_streams_of_several_replies_cannot_be_resumed(server: Server) -> None:
    path, body = CASES["greedy"]
    answer = server.http.post(server.url + path, json={**body, "n": 2}, headers={RELAY_HEADER: KEY})
    stream = MarkedStream()
    stream.take(answer.content)
    assert not stream.may_resume
    assert stream.end().endswith(b"data: [DONE]\n\n")
