"""The proxy of the client matrix: one scripted call that SDKs can read, then the real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import anthropic
import openai
import pytest

from scripted_server import ScriptedServer, scripted_server
from tests.clients.programs.scripted_proxy import ScriptedProxy

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "cmd": {"type": "array"}}}
PATH = "/note.txt"
CALL = ("read", {"path": PATH, "cmd": ["bash", "-c", "cat"]})


@pytest.fixture(scope="module")
def behind() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def proxy(behind: ScriptedServer) -> Iterator[ScriptedProxy]:
    proxy = ScriptedProxy(behind.url, ["open", "read"], {"path": PATH, "cmd": "cat", "unknown": 1})
    yield proxy
    proxy.http.shutdown()
    proxy.http.server_close()


def chat_call(url: str) -> tuple[str, object]:
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    tools = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
    messages = [{"role": "user", "content": "Read it."}]
    with api.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    return call.function.name, json.loads(call.function.arguments)


def responses_call(url: str) -> tuple[str, object]:
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    tools = [{"type": "function", "name": "read", "parameters": SCHEMA}]
    with api.responses.stream(model="m", input="Read it.", tools=tools) as stream:
        (call,) = stream.get_final_response().output
    return call.name, json.loads(call.arguments)


def messages_call(url: str) -> tuple[str, object]:
    api = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    tools = [{"name": "read", "input_schema": SCHEMA}]
    messages = [{"role": "user", "content": "Read it."}]
    with api.messages.stream(model="m", max_tokens=9, messages=messages, tools=tools) as stream:
        (call,) = stream.get_final_message().content
    return call.name, call.input


@pytest.mark.parametrize("ask", [chat_call, responses_call, messages_call])
def test_the_first_turn_gets_a_call_that_its_sdk_reads(
    proxy: ScriptedProxy, ask: Callable[[str], tuple[str, object]]
) -> None:
    assert ask(proxy.url) == CALL
    assert proxy.called == "read"
    assert proxy.exchanges == [], "the server was not asked"


def test_every_other_turn_is_the_servers(behind: ScriptedServer, proxy: ScriptedProxy) -> None:
    api = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="unused", max_retries=0)
    messages = [{"role": "user", "content": "One two."}]
    chunks = list(
        api.chat.completions.create(model="m", messages=messages, max_tokens=3, stream=True)
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == " 0 1 2"
    )
    assert behind.bodies[-1]["messages"] == messages
    (exchange,) = proxy.exchanges
    assert (exchange.path, exchange.status) == ("/v1/chat/completions", 200)
    assert exchange.reply.rstrip().endswith("data: [DONE]")
    assert chat_call(proxy.url) == CALL, "a turn without tools has not used the call up"
