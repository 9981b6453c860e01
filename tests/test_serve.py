"""The server from a client's side: a real process, the tiny model, and the openai package."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import openai
import pytest

from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from serving import FREE, MAX_QUEUE, MESSAGES, TINY_ENGINE, Server, ask, assert_refused, eventually

LONG_BEFORE_THE_END_S = 3.0  # seconds; a reply that fills the context takes longer


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
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        == whole.choices[0].message.content
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
    drawn = {"n": 3, "temperature": 2.0, "seed": 7}
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
        ask(api, temperature=2.0, seed=seed).choices[0].message.content for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_temperature_defaults_to_greedy(api: openai.OpenAI) -> None:
    assert ask(api).choices == ask(api, temperature=0.0).choices


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_cuts_the_text_before_it_and_frees_the_pages(
    server: Server, api: openai.OpenAI, is_stream: bool
) -> None:
    text = ask(api, max_tokens=60).choices[0].message.content
    stop = text[20:24]
    expected = text[: text.index(stop)]
    fields = {"max_tokens": 60, "stop": [stop, "never in there"]}
    if is_stream:
        chunks = list(ask(api, stream=True, **fields))
        found = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        reply = ask(api, **fields)
        found, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
        assert reply.usage.completion_tokens < 30
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
    plain = {
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {},
    }  # an ignored end has bytes, but no text
    (choice,) = ask(api, **plain).choices
    spelled = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == token.top_logprobs[0].logprob <= 0.0
    streamed = [
        token
        for chunk in ask(api, **plain, stream=True)
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content
    ]
    # Drafts are verified if that pays: a step of several tokens rounds in another order.
    for seen, token in zip(streamed, choice.logprobs.content, strict=True):
        assert seen.token == token.token
        assert seen.logprob == pytest.approx(token.logprob, abs=1e-4)
        assert seen.top_logprobs[0].token == token.token


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
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
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


def test_an_echo_is_scored_like_the_reply(api: openai.OpenAI) -> None:
    """As clients that compare texts request it. The first token has no score, as nothing precedes
    it.
    """
    whole = complete(api, prompt="Once upon a time", echo=True, logprobs=2, max_tokens=3)
    choice, scores = whole.choices[0], whole.choices[0].logprobs
    num_tokens = whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert "".join(scores.tokens) == choice.text
    assert (
        len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == num_tokens
    )
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in scores.token_logprobs[1:])
    assert scores.text_offset == [
        len("".join(scores.tokens[:place])) for place in range(num_tokens)
    ]
    streamed = [
        chunk.choices[0]
        for chunk in complete(
            api, prompt="Once upon a time", echo=True, logprobs=2, max_tokens=3, stream=True
        )
    ]
    assert [token for one in streamed for token in one.logprobs.tokens] == scores.tokens
    # The reply's tokens, sent as a prompt, have the scores that they had when generated.
    again = (
        complete(api, prompt=choice.text, echo=True, logprobs=2, max_tokens=1).choices[0].logprobs
    )
    assert again.tokens[:num_tokens] == scores.tokens
    assert again.token_logprobs[1:num_tokens] == pytest.approx(scores.token_logprobs[1:], abs=1e-3)


def test_scores_of_a_long_prompt_are_streamed_as_its_chunks_are_computed(
    api: openai.OpenAI,
) -> None:
    """The tiny model computes 512 tokens in a step, and a delta has 4,096 scores at most."""
    asked = {"prompt": [70, 71] * 700, "echo": True, "logprobs": 2, "max_tokens": 2}
    (whole,) = complete(api, **asked).choices
    chunks = [chunk.choices[0] for chunk in complete(api, **asked, stream=True)]
    assert len(chunks) >= 1400 / 512 + 1
    assert "".join(chunk.text for chunk in chunks) == whole.text == "".join(whole.logprobs.tokens)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [value for chunk in chunks for value in getattr(chunk.logprobs, name)]
        assert streamed == getattr(whole.logprobs, name)
        assert len(streamed) == 1402


def test_more_scores_than_an_answer_may_have_are_a_400_that_says_what_to_lower(
    server: Server,
) -> None:
    scored = {"max_tokens": 3000, "n": 24}
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, **scored}
    assert_refused(server.post(chat), 400, "logprobs")
    completion = {"prompt": "Once", "logprobs": 20, **scored}
    refusal = server.post(completion, "/v1/completions")
    assert_refused(refusal, 400, "logprobs")
    for part in ("1,512,000", "1,048,576", "n is 24", "Lower"):
        assert part in refusal.json()["error"]["message"]


def test_an_echo_of_one_token_is_scored_too(api: openai.OpenAI) -> None:
    choice = complete(api, prompt=[70], echo=True, logprobs=0, max_tokens=1).choices[0]
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == 2
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [0, len(choice.logprobs.tokens[0])]


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
    *_, last = ask(api, messages=messages, stream=True, stream_options={"include_usage": True})
    assert last.usage == second.usage


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
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
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
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"thinking": "on"}, "thinking"),
    ({"ignore_eos": 1}, "ignore_eos"),
]
NUMBERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "n",
    "repetition_penalty",
)
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
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("change", "param"), CHAT_REFUSALS)
def test_a_wrong_chat_body_is_a_400_that_names_the_field(
    server: Server, change: dict[str, Any], param: str, is_stream: bool
) -> None:
    body = {"messages": MESSAGES, "stream": is_stream} | change
    assert_refused(server.post({k: v for k, v in body.items() if v is not None}), 400, param)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_or_of_another_type_is_a_400_that_names_it(
    server: Server, name: str
) -> None:
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
    names = [
        "model",
        "max_completion_tokens",
        "stop",
        "logit_bias",
        "tools",
        "stream",
        "logprobs",
        *NUMBERS,
    ]
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
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
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
    answer = server.post({"prompt": "word " * 5000}, "/v1/completions")
    assert_refused(answer, 400, "prompt")
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    num_tokens = len(Tokenizer.load(None).encode("word " * 5000, True))
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


def test_more_requests_than_the_queue_holds_are_a_429_with_retry_after(server: Server) -> None:
    with server.stream({"messages": MESSAGES, "stream": True, **FREE}):
        answer = server.post({"messages": MESSAGES, "n": MAX_QUEUE, "max_tokens": 1})
    assert_refused(answer, 429, None)
    assert answer.json()["error"]["code"] == "overloaded"
    assert int(answer.headers["retry-after"]) >= 1
    assert eventually(server.is_idle, LONG_BEFORE_THE_END_S)
    assert server.post({"messages": MESSAGES, "n": MAX_QUEUE, "max_tokens": 1}).status_code == 200


def test_more_replies_than_the_queue_ever_holds_are_a_400_that_says_so(server: Server) -> None:
    assert_refused(
        server.post({"messages": MESSAGES, "n": MAX_QUEUE + 1, "max_tokens": 1}), 400, "n"
    )


# Clients that leave


def test_leaving_a_stream_frees_its_pages(server: Server) -> None:
    body = {"messages": MESSAGES, "stream": True, **FREE}
    with server.stream(body):
        assert not server.is_idle()
    assert eventually(server.is_idle, LONG_BEFORE_THE_END_S)


def send_chat(connection: socket.socket, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        f"{len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)


def test_leaving_before_a_json_answer_frees_its_pages(server: Server) -> None:
    with socket.create_connection(server.address) as connection:
        send_chat(connection, {"messages": MESSAGES, "n": 2, "temperature": 1.0, **FREE})
        assert eventually(lambda: server.stats()["num_running"] == 2)
    assert eventually(server.is_idle, LONG_BEFORE_THE_END_S)
