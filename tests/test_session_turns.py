"""A session continues with only the new message, in every API. A real server."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from serving import Server, assert_refused, eventually, start_server

NAME, QUESTION = "My name is Alice.", "What is my name?"
FEED: dict[str, Any] = {
    "type": "object",
    "properties": {"pet": {"type": "string"}, "grams": {"type": "integer"}},
    "required": ["pet", "grams"],
}
ORDER = "Give 225 grams of food to Lena."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server({"max_rows": 8}, {"enable_thinking": False}) as running:
        yield running


@dataclass(frozen=True)
class Api:
    """One API's field names."""

    path: str
    messages: str  # the field that contains them
    max_tokens: str

    def body(self, messages: list[Any], **fields: Any) -> dict[str, Any]:
        return {"model": "any", self.messages: messages, self.max_tokens: 40, **fields}


CHAT = Api("/v1/chat/completions", "messages", "max_tokens")
MESSAGES = Api("/v1/messages", "messages", "max_tokens")
RESPONSES = Api("/v1/responses", "input", "max_output_tokens")
INVOCATIONS = Api("/invocations", "messages", "max_tokens")
APIS = pytest.mark.parametrize(
    "api", [CHAT, MESSAGES, RESPONSES, INVOCATIONS], ids=lambda api: api.path
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def post(server: Server, api: Api, body: dict[str, Any], **headers: str) -> httpx.Response:
    answer = server.http.post(server.url + api.path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def say(
    server: Server, text: str, session: str | None, api: Api = CHAT, **fields: Any
) -> tuple[str | None, str]:
    """Sends one message in a session; returns how it matched the session, and the reply."""
    answer = post(server, api, api.body([user(text)], session_id=session, **fields))
    return answer.headers.get("x-session-status"), text_sent(answer)


def text_sent(answer: httpx.Response) -> str:
    """Streamed or whole: pieces of text, joined."""
    return "".join(re.findall(r'"(?:content|text|delta)":"([^"]*)"', answer.text))


def num_prompt_tokens(answer: httpx.Response) -> int:
    usage = answer.json()["usage"]
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    return int(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))


def session(server: Server, name: str) -> httpx.Response:
    return server.http.get(f"{server.url}/v1/sessions/{name}")


def text_of(answer: httpx.Response) -> str:
    body = answer.json()
    if "choices" in body:
        return str(body["choices"][0]["message"]["content"])
    return str(
        (body["content"][-1] if "content" in body else body["output"][-1]["content"][0])["text"]
    )


@pytest.mark.thinned
@APIS
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_only_the_new_message_is_sent_and_the_name_is_known(
    server: Server, api: Api, is_stream: bool
) -> None:
    by_field, by_header = f"field {api.path} {is_stream}", f"header {api.path} {is_stream}"
    stream = {"stream": is_stream}
    status, said = say(server, NAME, by_field, api, **stream)
    assert (status, "Alice" in said) == ("new", True)
    status, said = say(server, QUESTION, by_field, api, **stream)
    assert (status, "Alice" in said) == ("continued", True), said
    for text, expected in ((NAME, "new"), (QUESTION, "continued")):
        answer = post(server, api, api.body([user(text)], **stream), **{"x-session-id": by_header})
        assert answer.headers["x-session-status"] == expected
        assert "Alice" in text_sent(answer)
    assert "Alice" not in say(server, QUESTION, None, api, **stream)[1]
    for name in (by_field, by_header):
        held = session(server, name).json()
        assert (held["messages"], held["continues"], held["cached"]) == (4, True, True)
        assert held["tokens"] > 40
        assert held["message_bytes"] > len(NAME) + len(QUESTION)


@APIS
def test_a_whole_history_is_the_same_prompt_in_a_session_and_without(
    server: Server, api: Api
) -> None:
    name = f"history {api.path}"
    reply = text_of(post(server, api, api.body([user(NAME)], session_id=name)))
    history = [user(NAME), {"role": "assistant", "content": reply}, user(QUESTION)]
    whole = post(server, api, api.body(history))
    assert "x-session-status" not in whole.headers
    in_session = post(server, api, api.body(history, session_id=name))
    assert in_session.headers["x-session-status"] == "history"
    continued = post(server, api, api.body([user("Why?")], session_id=name))
    assert num_prompt_tokens(in_session) == num_prompt_tokens(whole)
    assert text_of(in_session) == text_of(whole)
    longer = [*history, {"role": "assistant", "content": text_of(whole)}, user("Why?")]
    assert num_prompt_tokens(continued) == num_prompt_tokens(post(server, api, api.body(longer)))
    edited = [
        user("My name is Omar."),
        {"role": "assistant", "content": "Nice to meet you, Omar!"},
        user(QUESTION),
    ]
    assert "Omar" in text_of(post(server, api, api.body(edited, session_id=name)))
    assert session(server, name).json()["messages"] == 4
    again = post(
        server, api, api.body([edited[0]], session_id=name)
    )  # as clients request another reply
    assert again.headers["x-session-status"] == "history"
    assert session(server, name).json()["messages"] == 2


@pytest.mark.parametrize(
    ("path", "field", "header"),
    [
        ("/v1/messages", None, "x-claude-code-session-id"),
        ("/v1/responses", None, "session-id"),
        ("/v1/responses", "prompt_cache_key", None),
        ("/v1/chat/completions", "prompt_cache_key", None),
    ],
)
def test_an_agents_own_name_of_a_session_keeps_its_cache_and_no_messages(
    server: Server, path: str, field: str | None, header: str | None
) -> None:
    name = f"{path} {field} {header}"
    body: dict[str, Any] = {"max_tokens": 4, "messages": [user("Hi!")]}
    if path == "/v1/responses":
        body = {"max_output_tokens": 16, "input": "Hi!"}
    body |= {} if field is None else {field: name}
    num_before = server.stats()["num_sessions"]
    headers = {} if header is None else {header: name}
    counts = []
    for _ in range(2):
        answer = server.http.post(server.url + path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert "x-session-status" not in answer.headers
        counts.append(num_prompt_tokens(answer))
    assert counts[0] == counts[1], "nothing was continued"
    assert server.stats()["num_sessions"] == num_before + 1
    assert name not in server.http.get(f"{server.url}/v1/sessions").text


def test_a_session_goes_on_in_another_api(server: Server) -> None:
    for api, text in ((CHAT, NAME), (MESSAGES, "Hello!"), (RESPONSES, QUESTION)):
        said = say(server, text, "wanders", api)[1]
    assert "Alice" in said
    assert session(server, "wanders").json()["messages"] == 6


def test_a_system_prompt_is_held_too(server: Server) -> None:
    system = {"role": "system", "content": "You know rivers and lakes."}
    post(server, CHAT, CHAT.body([system, user(NAME)], session_id="system"))
    going_on = post(server, CHAT, CHAT.body([user(QUESTION)], session_id="system"))
    replaced = post(
        server, MESSAGES, MESSAGES.body([user("And?")], session_id="system", system="Be terse.")
    )
    assert session(server, "system").json()["messages"] == 7
    assert (
        going_on.headers["x-session-status"] == replaced.headers["x-session-status"] == "continued"
    )
    assert "Alice" in text_of(going_on)


def test_calls_and_results_are_held_and_a_result_alone_goes_on_from_its_call(
    server: Server,
) -> None:
    function = {"name": "feed_pet", "description": "Release food for a pet.", "parameters": FEED}
    chat_tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    message = post(server, CHAT, CHAT.body([user(ORDER)], session_id="c", **chat_tools)).json()
    said = message["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "done"}
    chat_tools["tool_choice"] = "auto"
    continued = post(server, CHAT, CHAT.body([result], session_id="c", **chat_tools))
    whole = post(server, CHAT, CHAT.body([user(ORDER), said, result], **chat_tools))
    assert continued.headers["x-session-status"] == "continued"
    assert num_prompt_tokens(continued) == num_prompt_tokens(whole)
    assert text_of(continued) == text_of(whole)
    chat_tools["tool_choice"] = "required"
    again = post(server, CHAT, CHAT.body([user(ORDER)], session_id="c", **chat_tools)).json()
    said = again["choices"][0]["message"]
    result["tool_call_id"] = said["tool_calls"][0]["id"]
    chat_tools["tool_choice"] = "auto"
    with_call = post(server, CHAT, CHAT.body([said, result], session_id="c", **chat_tools))
    assert with_call.headers["x-session-status"] == "continued"
    assert num_prompt_tokens(with_call) == num_prompt_tokens(whole)

    tool = {"name": "feed_pet", "description": function["description"], "input_schema": FEED}
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "any"}}
    blocks = post(server, MESSAGES, MESSAGES.body([user(ORDER)], session_id="a", **fields)).json()[
        "content"
    ]
    block = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "done"}
    fields["tool_choice"] = {"type": "auto"}
    turn = {"role": "user", "content": [block]}
    continued = post(server, MESSAGES, MESSAGES.body([turn], session_id="a", **fields))
    history = [user(ORDER), {"role": "assistant", "content": blocks}, turn]
    whole = post(server, MESSAGES, MESSAGES.body(history, **fields))
    assert num_prompt_tokens(continued) == num_prompt_tokens(whole)

    flat = {"tools": [{"type": "function", **function}]}
    first = post(
        server,
        RESPONSES,
        RESPONSES.body([user(ORDER)], session_id="r", tool_choice="required", **flat),
    )
    (call,) = [item for item in first.json()["output"] if item["type"] == "function_call"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    continued = post(server, RESPONSES, RESPONSES.body([output], session_id="r", **flat))
    whole = post(server, RESPONSES, RESPONSES.body([user(ORDER), call, output], **flat))
    assert num_prompt_tokens(continued) == num_prompt_tokens(whole)
    unknown = server.post(RESPONSES.body([output], **flat), RESPONSES.path)
    assert unknown.status_code == 400


def test_a_kept_response_has_the_conversation_that_its_session_held(server: Server) -> None:
    say(server, NAME, "kept", CHAT)
    kept = post(server, RESPONSES, RESPONSES.body([user("Hello!")], session_id="kept")).json()
    going_on = RESPONSES.body([user(QUESTION)], previous_response_id=kept["id"])
    assert "Alice" in text_of(post(server, RESPONSES, going_on))
    in_session = post(server, RESPONSES, {**going_on, "session_id": "kept"})
    assert in_session.headers["x-session-status"] == "history"
    assert session(server, "kept").json()["messages"] == 6


def test_a_thought_is_held_as_the_template_wants_it(server: Server) -> None:
    sums = "What is 17 + 26? Reply with just the number."
    thinks = {"enable_thinking": True}
    said = post(server, CHAT, CHAT.body([user(sums)], session_id="thinks", **thinks)).json()[
        "choices"
    ][0]
    assert said["message"]["reasoning_content"]
    continued = post(server, CHAT, CHAT.body([user("And 17 + 27?")], session_id="thinks", **thinks))
    whole = post(
        server, CHAT, CHAT.body([user(sums), said["message"], user("And 17 + 27?")], **thinks)
    )
    assert num_prompt_tokens(continued) == num_prompt_tokens(whole)


def test_the_beginning_of_a_reply_is_held_with_the_reply(server: Server) -> None:
    start = {"role": "assistant", "content": "Your name"}
    say(server, NAME, "start", MESSAGES)
    begun = post(server, MESSAGES, MESSAGES.body([user(QUESTION), start], session_id="start"))
    assert begun.headers["x-session-status"] == "continued"
    continued = post(server, MESSAGES, MESSAGES.body([user("Why?")], session_id="start"))
    reply = text_of(post(server, MESSAGES, MESSAGES.body([user(NAME)])))
    history = [user(NAME), reply, user(QUESTION), "Your name" + text_of(begun), user("Why?")]
    whole = [
        {"role": "assistant", "content": one} if isinstance(one, str) else one for one in history
    ]
    assert num_prompt_tokens(continued) == num_prompt_tokens(
        post(server, MESSAGES, MESSAGES.body(whole))
    )


def test_an_aborted_reply_leaves_the_session_as_it_was(server: Server) -> None:
    say(server, NAME, "aborted")
    endless = CHAT.body(
        [user("Hello!")], session_id="aborted", stream=True, ignore_eos=True, max_tokens=3000
    )
    with server.stream(endless):
        pass  # a client that disconnects
    assert eventually(lambda: server.stats()["num_running"] == 0)
    assert session(server, "aborted").json()["messages"] == 2
    assert "Alice" in say(server, QUESTION, "aborted")[1]


def test_two_requests_at_once_go_on_from_the_same_and_are_both_held(server: Server) -> None:
    say(server, NAME, "at once")
    long = {"ignore_eos": True, "max_tokens": 60}
    with ThreadPoolExecutor(2) as pool:
        bodies = [
            CHAT.body([user(f"{QUESTION} {n}")], session_id="at once", **long) for n in range(2)
        ]
        answers = list(pool.map(lambda body: post(server, CHAT, body), bodies))
    assert [answer.headers["x-session-status"] for answer in answers] == ["continued"] * 2
    assert len({num_prompt_tokens(answer) for answer in answers}) == 1
    assert session(server, "at once").json()["messages"] == 6


def test_of_several_replies_the_first_is_held(server: Server) -> None:
    drawn = {"n": 2, "temperature": 1.5, "seed": 3, "max_tokens": 30, "ignore_eos": True}
    answer = post(server, CHAT, CHAT.body([user(NAME)], session_id="several", **drawn)).json()
    said = [choice["message"] for choice in answer["choices"]]
    assert said[0] != said[1]
    continued = post(server, CHAT, CHAT.body([user(QUESTION)], session_id="several"))
    whole = post(server, CHAT, CHAT.body([user(NAME), said[0], user(QUESTION)]))
    assert (text_of(continued), num_prompt_tokens(continued)) == (
        text_of(whole),
        num_prompt_tokens(whole),
    )


def test_a_deleted_session_is_gone_and_begins_anew(server: Server) -> None:
    say(server, NAME, "deleted")
    url = f"{server.url}/v1/sessions/deleted"
    assert server.http.delete(url).json() == {"id": "deleted", "object": "session", "deleted": True}
    for answer in (server.http.get(url), server.http.delete(url)):
        assert_refused(answer, 404, None)
        assert "It was deleted." in answer.json()["error"]["message"]
    status, said = say(server, QUESTION, "deleted")
    assert (status, "Alice" in said) == ("deleted", False)
    assert say(server, "Hello!", "deleted")[0] == "continued"
    never = session(server, "never existed").json()["error"]["message"]
    assert "It never existed" in never


def test_a_session_that_no_longer_fits_the_context_says_what_to_do(server: Server) -> None:
    say(server, "river " * 1200, "long")
    refused = server.post(CHAT.body([user("The " + "river " * 1200)], session_id="long"))
    assert_refused(refused, 400, "messages")
    message = refused.json()["error"]["message"]
    assert "2 of the messages are from the session." in message
    assert "delete the session" in message
    assert say(server, "Hello!", "long")[0] == "continued", "a refused turn is not held"


def test_raw_prompts_keep_their_cache_only(server: Server) -> None:
    body = {"prompt": NAME, "max_tokens": 4, "session_id": "raw"}
    answer = server.post(body, "/v1/completions")
    assert "x-session-status" not in answer.headers
    held = session(server, "raw").json()
    assert (held["messages"], held["continues"], held["cached"]) == (0, False, True)
    assert say(server, QUESTION, "raw")[0] == "new"


def test_session_ids_are_checked_in_every_api(server: Server) -> None:
    for api in (CHAT, MESSAGES, RESPONSES, INVOCATIONS):
        answer = server.post(api.body([user("Hi")], session_id=""), api.path)
        assert answer.status_code == 400
        assert "session_id" in json.dumps(answer.json())


def test_a_session_goes_on_in_another_engine(server: Server) -> None:
    """Runs last. The engine's cache is lost with it; the conversation is not."""
    say(server, NAME, "failover")
    lost = server.engine_pid
    os.kill(lost, signal.SIGKILL)
    assert eventually(lambda: lost not in server.engine_pids)
    assert eventually(lambda: server.http.get(f"{server.url}/ready").status_code == 200, 60.0)
    held = session(server, "failover").json()
    assert (held["messages"], held["continues"], held["cached"], held["bytes"]) == (
        2,
        True,
        False,
        0,
    )
    status, said = say(server, QUESTION, "failover")
    assert (status, "Alice" in said) == ("continued", True)


def test_an_expired_session_is_gone_and_begins_anew_even_where_the_cache_keeps_none() -> None:
    with start_server(
        {"session_minutes": 0.02, "session_gb": 0}, {"enable_thinking": False}
    ) as server:
        say(server, NAME, "brief")
        time.sleep(1.3)
        gone = session(server, "brief")
        assert_refused(gone, 404, None)
        assert "--session-minutes" in gone.json()["error"]["message"]
        assert say(server, QUESTION, "brief")[0] == "expired"
