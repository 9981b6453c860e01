"""The server as its clients meet it: a real process, the tiny model, and the openai package."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock.config import EngineConfig
from penstock.errors import ConfigError, ContextLengthError, ModelNotFoundError, OverloadedError
from penstock.serve import client as client_module
from penstock.serve.client import EngineClient
from penstock.serve.server import open_port
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.types import Request, SamplingParams
from serving import TINY_ENGINE, Server, eventually, is_alive, start_server

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about rivers."}]
# The tiny model's weights are random: only a limit ends its replies.
FREE = {"ignore_eos": True}
MAX_QUEUE = 32


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(serve={"max_queue": MAX_QUEUE}) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0)


def ask(api: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "any", "messages": MESSAGES, "max_tokens": 12, "extra_body": FREE} | fields
    return api.chat.completions.create(**fields)


def complete(api: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "any", "prompt": "Once", "max_tokens": 12, "extra_body": FREE} | fields
    return api.completions.create(**fields)


# Replies


def test_a_chat_reply_has_openais_shape(server: Server, api: openai.OpenAI) -> None:
    before = int(time.time())
    reply = ask(api)
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert before <= reply.created <= time.time()
    assert reply.model == api.models.list().data[0].id
    (choice,) = reply.choices
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
    assert choice.message.content
    assert choice.logprobs is None
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12


def test_prompt_tokens_are_those_of_the_rendered_template(api: openai.OpenAI) -> None:
    text = ChatTemplate.load(None).render(MESSAGES, enable_thinking=False)
    num_tokens = len(Tokenizer.load(None).encode(text))
    for spelled in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": False},
        {"enable_thinking": False},
    ):
        assert ask(api, extra_body={**FREE, **spelled}).usage.prompt_tokens == num_tokens
    assert ask(api, extra_body={**FREE, "thinking": True}).usage.prompt_tokens != num_tokens


def test_the_streamed_text_is_the_whole_text(api: openai.OpenAI) -> None:
    whole = ask(api)
    chunks = list(ask(api, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )
    finishes = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_is_streamed_only_when_asked_for(api: openai.OpenAI) -> None:
    *_, last = ask(api, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == ask(api).usage


def test_a_stream_ends_with_done(server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
    assert server.post(body).text.endswith("data: [DONE]\n\n")


def test_n_replies_come_interleaved_and_by_index(api: openai.OpenAI) -> None:
    drawn = {"n": 3, "temperature": 1.0, "seed": 7}
    whole = ask(api, **drawn)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 36
    streamed = ["", "", ""]
    order = []
    for chunk in ask(api, stream=True, **drawn):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        order.append(choice.index)
    assert streamed == texts
    assert order != sorted(order)


def test_a_seed_reproduces_a_drawn_reply(api: openai.OpenAI) -> None:
    first, again, other = (
        ask(api, temperature=1.0, seed=seed).choices[0].message.content for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_temperature_defaults_to_greedy(api: openai.OpenAI) -> None:
    assert ask(api).choices == ask(api, temperature=0.0).choices


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_cuts_the_text_before_it_and_frees_the_pages(
    server: Server, api: openai.OpenAI, is_stream: bool
) -> None:
    text = ask(api, max_tokens=200).choices[0].message.content
    stop = text[20:24]
    expected = text[: text.index(stop)]
    fields = {"max_tokens": 200, "stop": [stop, "never in there"]}
    if is_stream:
        chunks = list(ask(api, stream=True, **fields))
        found = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        reply = ask(api, **fields)
        found, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
        assert reply.usage.completion_tokens < 100
    assert found == expected
    assert finish == "stop"
    assert eventually(server.is_idle)


def test_the_end_token_is_neither_text_nor_counted(api: openai.OpenAI) -> None:
    tokenizer = Tokenizer.load(None)
    reply = ask(api, logprobs=True)
    tokens = [bytes(token.bytes) for token in reply.choices[0].logprobs.content]
    place = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    ids = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == tokens[place]]
    ended = ask(api, logprobs=True, extra_body={**FREE, "stop_token_ids": ids})
    assert ended.choices[0].finish_reason == "stop"
    assert ended.choices[0].message.content == b"".join(tokens[:place]).decode(errors="replace")
    assert ended.usage.completion_tokens == place == len(ended.choices[0].logprobs.content)


def test_logprobs_spell_the_reply_and_the_greedy_token_leads(api: openai.OpenAI) -> None:
    (choice,) = ask(api, logprobs=True, top_logprobs=3).choices
    spelled = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == token.top_logprobs[0].logprob <= 0.0
    streamed = [
        token
        for chunk in ask(api, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == choice.logprobs.content


def test_parts_and_a_string_are_the_same_content(api: openai.OpenAI) -> None:
    text = MESSAGES[0]["content"]
    parts = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]
    assert ask(api, messages=[{"role": "user", "content": parts}]).choices == ask(api).choices


def test_a_developer_message_is_a_system_message(api: openai.OpenAI) -> None:
    def reply(role: str) -> Any:
        return ask(api, messages=[{"role": role, "content": "Be brief."}, *MESSAGES])

    assert reply("developer").usage.prompt_tokens == reply("system").usage.prompt_tokens
    assert reply("system").usage.prompt_tokens > ask(api).usage.prompt_tokens


def test_tools_and_their_history_reach_the_template(api: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    plain, with_tool = ask(api).usage, ask(api, tools=[tool]).usage
    assert with_tool.prompt_tokens > plain.prompt_tokens
    assert ask(api, tools=[tool], tool_choice="none").usage.prompt_tokens == plain.prompt_tokens
    assert ask(api, tools=[tool], messages=history).usage.prompt_tokens > with_tool.prompt_tokens


def test_a_prompt_may_be_text_ids_or_lists_of_either(api: openai.OpenAI) -> None:
    texts = ["Once upon", "The sea"]
    ids = [Tokenizer.load(None).encode(text, True) for text in texts]
    alone = [complete(api, prompt=text).choices[0].text for text in texts]
    assert complete(api, prompt=ids[0]).choices[0].text == alone[0]
    for prompts in (texts, ids):
        reply = complete(api, prompt=prompts)
        assert [choice.text for choice in reply.choices] == alone
        assert [choice.index for choice in reply.choices] == [0, 1]
        assert reply.usage.prompt_tokens == sum(map(len, ids))
        assert reply.usage.completion_tokens == 24
    assert reply.id.startswith("cmpl-")
    assert reply.object == "text_completion"


def test_echo_repeats_the_prompt_first(api: openai.OpenAI) -> None:
    text = complete(api).choices[0].text
    assert complete(api, echo=True).choices[0].text == "Once" + text
    streamed = "".join(chunk.choices[0].text for chunk in complete(api, echo=True, stream=True))
    assert streamed == "Once" + text


def test_completion_logprobs_are_parallel_lists(api: openai.OpenAI) -> None:
    (choice,) = complete(api, logprobs=2).choices
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset[0] == 0
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert max(top, key=top.get) == token
        assert top[token] == value


def test_a_repeated_prompt_reports_its_cached_tokens(api: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "A long story about the cache. " * 8}]
    first, second = (ask(api, messages=messages) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= TINY_ENGINE["page_size"]
    assert second.choices == first.choices


def test_async_clients_get_what_sync_clients_get(server: Server, api: openai.OpenAI) -> None:
    async def ask_many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model="any", messages=MESSAGES, max_tokens=12, stream=True, extra_body=FREE
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(4)))

    assert set(asyncio.run(ask_many())) == {ask(api).choices[0].message.content}


# Refusals

CHAT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    (
        {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ]
        },
        "messages",
    ),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    ({"model": 5}, "model"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools"),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"thinking": "on"}, "thinking"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
]
NUMBERS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "n", "repetition_penalty")
NUMBERS += ("presence_penalty", "frequency_penalty", "seed")
BAD_NUMBERS: list[Any] = [-(2**70), 2**70, "1", [1], {}, True, -1e308]
COMPLETION_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6], "echo": True}, "prompt"),
    ({"prompt": [2**70], "echo": True}, "prompt"),
    ({"prompt": ["x"] * 129}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"min_tokens": 100}, "min_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "echo"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
]


def assert_refused(answer: httpx.Response, status: int, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["param"] == param, error
    assert error["message"]
    assert "Traceback" not in answer.text
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("change", "param"), CHAT_REFUSALS)
def test_a_wrong_chat_body_is_a_400_that_names_the_field(
    server: Server, change: dict[str, Any], param: str, is_stream: bool
) -> None:
    body = {"messages": MESSAGES, "stream": is_stream} | change
    assert_refused(server.post({k: v for k, v in body.items() if v is not None}), 400, param)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_or_of_another_type_is_a_400_that_names_it(server: Server, name: str) -> None:
    for value in BAD_NUMBERS:
        assert_refused(server.post({"messages": MESSAGES, name: value}), 400, name)


@pytest.mark.parametrize(("change", "param"), COMPLETION_REFUSALS)
def test_a_wrong_completion_body_is_a_400_that_names_the_field(
    server: Server, change: dict[str, Any], param: str
) -> None:
    body = {"prompt": "x"} | change
    answer = server.post({k: v for k, v in body.items() if v is not None}, "/v1/completions")
    assert_refused(answer, 400, param)


def test_null_and_unknown_fields_are_tolerated(server: Server) -> None:
    names = ["model", "max_completion_tokens", "stop", "logit_bias", "tools", "stream", "logprobs", *NUMBERS]
    body: dict[str, Any] = dict.fromkeys(names) | {"messages": MESSAGES, "max_tokens": 2}
    body |= {"user": "me", "metadata": {"a": [1]}, "parallel_tool_calls": True, "top_k": -1}
    assert server.post(body).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b"[" * 100_000,
        b'{"messages":' + b'{"a":' * 5000,
        b'"text"',
        b"[]",
    ],
)
def test_a_body_that_is_not_a_json_object_is_a_400(server: Server, data: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = server.http.post(f"{server.url}{path}", content=data)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "Traceback" not in answer.text


def test_a_prompt_too_long_is_refused_with_numbers_and_never_truncated(server: Server) -> None:
    answer = server.post({"prompt": "word " * 2000}, "/v1/completions")
    assert_refused(answer, 400, "prompt")
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    num_tokens = len(Tokenizer.load(None).encode("word " * 2000, True))
    for number in (num_tokens, TINY_ENGINE["max_model_len"], "--max-model-len"):
        assert str(number) in error["message"]


def test_unknown_routes_and_methods_are_answered_in_openais_shape(server: Server) -> None:
    assert_refused(server.http.get(f"{server.url}/v1/nothing"), 404, None)
    assert_refused(server.http.get(f"{server.url}/v1/models/other"), 404, None)
    wrong = server.http.get(f"{server.url}/v1/chat/completions")
    assert_refused(wrong, 405, None)
    assert wrong.headers["allow"] == "POST"


def test_a_huge_body_is_a_413_whether_its_length_is_declared_or_not(server: Server) -> None:
    megabyte = b" " * 2**20
    for content in (megabyte * 33, (megabyte for _ in range(33))):
        answer = server.http.post(f"{server.url}/v1/chat/completions", content=content)
        assert_refused(answer, 413, None)


def test_the_openai_client_raises_its_own_error_for_a_refusal(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(api, top_p=3.0)
    assert caught.value.param == "top_p"


def test_more_requests_than_the_queue_holds_are_a_503_with_retry_after(server: Server) -> None:
    answer = server.post({"messages": MESSAGES, "n": MAX_QUEUE + 1, "max_tokens": 1})
    assert_refused(answer, 503, None)
    assert answer.json()["error"]["code"] == "overloaded"
    assert int(answer.headers["retry-after"]) >= 1
    assert server.post({"messages": MESSAGES, "n": MAX_QUEUE, "max_tokens": 1}).status_code == 200


# Clients that leave


def test_leaving_a_stream_frees_its_pages(server: Server) -> None:
    body = {"messages": MESSAGES, "stream": True, **FREE}
    with server.stream(body):
        assert not server.is_idle()
    assert eventually(server.is_idle, 2.0)


def test_leaving_before_a_json_answer_frees_its_pages(server: Server) -> None:
    body = json.dumps({"messages": MESSAGES, "n": 2, "temperature": 1.0, **FREE}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(address_of(server)) as connection:
        connection.sendall(head.encode() + body)
        assert eventually(lambda: server.stats()["num_running"] == 2)
    assert eventually(server.is_idle, 2.0)


def address_of(server: Server) -> tuple[str, int]:
    url = httpx.URL(server.url)
    assert url.port is not None
    return url.host, url.port


# Life and death


def test_health_and_requests_are_503_until_the_engine_is_warm_and_sigterm_lets_replies_end() -> None:
    with start_server(wait_for="libraries") as server:
        starting = server.health()
        assert starting.status_code == 503
        assert starting.json()["status"] == "starting"
        assert starting.json()["phase"]["name"]
        early = server.post({"messages": MESSAGES})
        assert_refused(early, 503, None)
        assert early.headers["retry-after"]
        server.wait_phase("ready")
        assert server.health().json()["status"] == "ok"

        engine_pid = server.engine_pid
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 300, **FREE}
        with server.stream(body) as lines:
            server.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: not accepts_connections(server), 2.0)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(timeout=10.0) == 0
        assert not is_alive(engine_pid)


def accepts_connections(server: Server) -> bool:
    try:
        socket.create_connection(address_of(server)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_second_signal_ends_server_and_engine_at_once() -> None:
    with start_server(engine={"max_model_len": 8192}) as server:
        engine_pid = server.engine_pid
        body = {"messages": MESSAGES, "stream": True, **FREE}
        with server.stream(body):
            server.process.send_signal(signal.SIGINT)
            assert eventually(lambda: not accepts_connections(server), 2.0)
            server.process.send_signal(signal.SIGINT)
            server.process.wait(timeout=3.0)
        assert not is_alive(engine_pid)


def test_a_killed_engine_ends_streams_with_an_error_and_turns_health_to_503() -> None:
    with start_server(engine={"max_model_len": 8192}) as server:
        body = {"messages": MESSAGES, "stream": True, **FREE}
        with server.stream(body) as lines:
            os.kill(server.engine_pid, signal.SIGKILL)
            assert eventually(lambda: server.health().status_code == 503, 2.0)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert "data: [DONE]" not in rest
        assert server.health().json() == {
            "status": "dead",
            "reason": "The engine process ended (killed by SIGKILL)",
        }
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client)
        assert caught.value.status_code == 503
        server.stop()
        assert server.process.returncode == 1


def test_a_killed_server_leaves_no_engine_behind() -> None:
    with start_server() as server:
        engine_pid = server.engine_pid
        server.process.kill()
        assert eventually(lambda: not is_alive(engine_pid), 5.0)


def test_a_model_that_does_not_exist_ends_the_server_with_its_own_error() -> None:
    with start_server(engine={"model": "no-such-model"}, wait_for="failed") as server:
        assert "ModelNotFoundError" in server.phases[-1]["detail"]
        assert server.process.wait(timeout=10.0) == 1


def test_a_busy_port_is_refused_with_what_to_do() -> None:
    with open_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port} is in use") as caught:
            open_port("127.0.0.1", port)
    assert "--port" in caught.value.todo
    with pytest.raises(ConfigError):
        open_port("127.0.0.1", 70_000)


# The engine's client, without HTTP


def test_the_client_rejects_one_request_and_cuts_off_who_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "MAX_PENDING_DELTAS", 8)

    async def scenario() -> None:
        config = EngineConfig(**TINY_ENGINE)
        client = await EngineClient.launch(config, max_queue=4, on_phase=lambda _: None)
        try:
            info = await client.wait_ready()
            good = Request(id="good", token_ids=(5, 6), sampling=SamplingParams(max_tokens=4))
            too_long = Request(id="long", token_ids=(5,) * info.max_model_len)
            with client.submit(good) as stream, client.submit(too_long) as rejected:
                with pytest.raises(ContextLengthError) as caught:
                    await anext(rejected)
                assert caught.value.param == "prompt"
                deltas = [delta async for delta in stream]
            assert sum(len(delta.token_ids) for delta in deltas) == 4
            assert deltas[-1].finish == "length"

            unread = client.submit(Request(id="unread", token_ids=(5,)))
            while (await client.stats()).num_running or client.num_outstanding:
                await asyncio.sleep(0.01)
            with pytest.raises(OverloadedError):
                async for _ in unread:
                    pass
            stats = await client.stats()
            assert stats.num_free_pages == stats.num_pages - 1
        finally:
            await client.close()

    asyncio.run(scenario())


def test_an_engine_that_cannot_start_tells_its_client_why() -> None:
    async def scenario() -> None:
        config = EngineConfig(model="no-such-model")
        client = await EngineClient.launch(config, max_queue=1, on_phase=lambda _: None)
        with pytest.raises(ModelNotFoundError, match="no-such-model"):
            await client.wait_ready()
        await client.close()

    asyncio.run(scenario())
