"""Streams with a slow first token: headers and heartbeats come before it, errors as events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from serving import MESSAGES, Server, start_server

SLOW = 37  # max_tokens of requests whose first token takes long
SILENCE_S = 0.8
HEADERS_AFTER_S = 0.1
# Every Python started here runs this: the engine becomes slow, the server impatient.
SITE = f"""
import sys
if "penstock.engine.worker" in sys.orig_argv:
    import time
    from penstock.engine.scheduler import Scheduler
    commit = Scheduler.commit
    slowed = set()
    def commit_slowly(self, output, limits):
        for sequence in self._running:
            request = sequence.request
            if request.sampling.max_tokens == {SLOW} and request.id not in slowed:
                slowed.add(request.id)
                time.sleep({SILENCE_S})
        return commit(self, output, limits)
    Scheduler.commit = commit_slowly
elif any(argument.endswith("serving.py") for argument in sys.orig_argv):
    from penstock.serve import event_stream
    event_stream.HEADERS_AFTER_S = {HEADERS_AFTER_S}
    event_stream.HEARTBEAT_EVERY_S = 0.1
"""
CHAT = {"messages": MESSAGES, "max_tokens": SLOW, "stream": True, "seed": 1}
RESPONSE = {"input": "Tell me about rivers.", "max_output_tokens": SLOW, "stream": True}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Rivers are", "max_tokens": SLOW, "stream": True},
    "/v1/responses": RESPONSE,
    "/v1/messages": {"messages": MESSAGES, "max_tokens": SLOW, "stream": True},
}

FIRST_EVENTS = {"/v1/responses": "event: response.created", "/v1/messages": "event: message_start"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE)
    with start_server(path=folder) as running:
        yield running


def stream(
    server: Server, path: str, body: dict[str, Any]
) -> tuple[httpx.Response, float, list[str]]:
    """Returns the response, the time until its headers, and its lines."""
    began_s = time.monotonic()
    with server.http.stream("POST", server.url + path, json=body) as answer:
        headers_s = time.monotonic() - began_s
        return answer, headers_s, [line for line in answer.iter_lines() if line]


@pytest.mark.parametrize("path", PATHS)
def test_headers_and_heartbeats_do_not_wait_for_the_first_token(server: Server, path: str) -> None:
    answer, headers_s, lines = stream(server, path, PATHS[path])
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert headers_s < SILENCE_S - HEADERS_AFTER_S
    heartbeat = "event: ping" if path == "/v1/messages" else ": keep-alive"
    first = next(i for i, line in enumerate(lines) if '"delta"' in line or '"text":"' in line)
    assert lines[:first].count(heartbeat) >= 3
    assert lines[-1] == "data: [DONE]" or lines[-2] in (
        "event: message_stop",
        "event: response.completed",
    )
    if path in FIRST_EVENTS:
        assert lines[0] == FIRST_EVENTS[path]


@pytest.mark.parametrize(
    "path", [path for path in PATHS if path != "/v1/messages"]
)  # has no time limit
def test_an_error_after_the_headers_is_an_event_of_the_api(server: Server, path: str) -> None:
    late = {**PATHS[path], "timeout": 0.4}
    answer, _, lines = stream(server, path, late)
    assert answer.status_code == 200
    if path == "/v1/responses":
        assert [line for line in lines if line.startswith("event: ")][
            -1
        ] == "event: response.failed"
        failed = json.loads(lines[-1].removeprefix("data: "))["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    else:
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_an_error_before_the_headers_has_a_status(server: Server) -> None:
    for path, body in PATHS.items():
        many = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": -1}
        answer, _, _ = stream(server, path, {**body, **many})
        assert answer.status_code == 400, path


def test_a_whole_reply_waits_in_silence(server: Server) -> None:
    answer = server.post({**CHAT, "stream": False})
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_sdks_read_streams_with_heartbeats(server: Server) -> None:
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    chunks = list(api.chat.completions.create(model="any", **{**CHAT, "stream": True}))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    events = list(api.responses.create(model="any", **RESPONSE))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    with pytest.raises(openai.APIError, match="in time"):
        list(api.chat.completions.create(model="any", **CHAT, extra_body={"timeout": 0.4}))
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with claude.messages.stream(model="any", max_tokens=SLOW, messages=MESSAGES) as reply:
        assert reply.get_final_message().stop_reason in ("end_turn", "max_tokens")
