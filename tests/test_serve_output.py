"""vLLM's extra output fields are honoured exactly, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.serve.openai.requests import parse_chat
from penstock.text.tokenizer import Tokenizer
from serving import Server, assert_refused

QUESTION = {"role": "user", "content": "What is 17 + 26?"}
STORY = {"messages": [{"role": "user", "content": "Tell me about rivers."}], "max_tokens": 24}
PREFILL = {"role": "assistant", "content": "The answer, in words, is"}
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(None)


def ask(server: Server, body: dict[str, Any], path: str = CHAT, **fields: Any) -> dict[str, Any]:
    answer = server.post({**body, **fields}, path)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def chunks_of(
    server: Server, body: dict[str, Any], path: str = CHAT, **fields: Any
) -> list[dict[str, Any]]:
    lines = server.post({**body, "stream": True, **fields}, path).text.split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def prompt_of(server: Server, tokenizer: Tokenizer, messages: list[Any], **fields: Any) -> str:
    body = {"messages": messages, "max_tokens": 8, "return_token_ids": True}
    return tokenizer.decode(
        ask(server, body, **fields)["prompt_token_ids"], skip_special_tokens=False
    )


START = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_a_reply_continues_the_assistants_last_message(
    server: Server, tokenizer: Tokenizer
) -> None:
    def prompt(*messages: Any, **fields: Any) -> str:
        return prompt_of(server, tokenizer, list(messages), **fields)

    assert prompt(QUESTION, PREFILL).endswith(START + PREFILL["content"])
    explicit = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(QUESTION, PREFILL, **explicit) == prompt(QUESTION, PREFILL)
    assert prompt(QUESTION, PREFILL, add_generation_prompt=False) == prompt(QUESTION, PREFILL)
    exact = {"role": "assistant", "content": "```python\n"}
    assert prompt(QUESTION, exact).endswith(f"{START}```python\n")
    closed = f"{PREFILL['content']}<|im_end|>\n"
    for own_turn in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert prompt(QUESTION, PREFILL, **own_turn).endswith(closed + START)
    bare = {"continue_final_message": False, "add_generation_prompt": False}
    assert prompt(QUESTION, PREFILL, **bare).endswith(closed)
    assert prompt(QUESTION, add_generation_prompt=False).endswith(
        f"{QUESTION['content']}<|im_end|>\n"
    )
    alone = parse_chat(json.dumps({"messages": [PREFILL]}).encode())
    assert (alone.messages, alone.reply_start) == ([PREFILL], ""), "it answers nothing"
    form = {"response_format": {"type": "json_object"}}
    assert prompt(QUESTION, PREFILL, **form).endswith(closed + START), (
        "only a whole reply has a form"
    )


def test_a_continued_reply_has_only_its_own_words_with_their_space(server: Server) -> None:
    whole = ask(server, {"messages": [QUESTION], "max_tokens": 40})["choices"][0]["message"][
        "content"
    ]
    first, _, rest = whole.partition(" ")
    if not rest:
        first, rest = whole[:1], whole[1:]
    messages = [QUESTION, {"role": "assistant", "content": first}]
    content = ask(server, {"messages": messages, "max_tokens": 40})["choices"][0]["message"][
        "content"
    ]
    assert first + content == whole


def test_a_thought_is_closed_before_a_continued_answer_and_goes_on_without_one(
    server: Server, tokenizer: Tokenizer
) -> None:
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    said = {**PREFILL, "reasoning_content": "17 + 26 = 43."}
    prompt = prompt_of(server, tokenizer, [QUESTION, said], **thinks)
    assert prompt.endswith(f"<think>\n17 + 26 = 43.\n</think>\n\n{PREFILL['content']}")
    tagged = {
        "role": "assistant",
        "content": f"<think>\n17 + 26 = 43.\n</think>\n\n{PREFILL['content']}",
    }
    assert prompt_of(server, tokenizer, [QUESTION, tagged], **thinks) == prompt
    thought = {"role": "assistant", "content": "", "reasoning_content": "17 + 26 is"}
    reply = ask(
        server,
        {"messages": [QUESTION, thought], "max_tokens": 60, "return_token_ids": True},
        **thinks,
    )
    prompt = tokenizer.decode(reply["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith("<think>\n17 + 26 is")
    message = reply["choices"][0]["message"]
    assert message["reasoning_content"].startswith(" ")  # between the client's word and the next
    assert_refused(server.post({"messages": [QUESTION, thought]}), 400, "messages")


def test_a_session_holds_a_continued_reply_as_one(server: Server, tokenizer: Tokenizer) -> None:
    body = {"messages": [QUESTION, PREFILL], "max_tokens": 8, "session_id": "continued"}
    rest = ask(server, body)["choices"][0]["message"]["content"]
    thanks = {"role": "user", "content": "Thank you."}
    prompt = prompt_of(server, tokenizer, [thanks], session_id="continued")
    assert f"{PREFILL['content']}{rest}<|im_end|>\n<|im_start|>user\nThank you." in prompt


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([QUESTION], {"continue_final_message": True}),
        ([QUESTION, PREFILL], {"continue_final_message": True, "add_generation_prompt": True}),
        (
            [QUESTION, PREFILL],
            {"continue_final_message": True, "response_format": {"type": "json_object"}},
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(
    server: Server, messages: list[Any], fields: dict[str, Any]
) -> None:
    assert_refused(server.post({"messages": messages, **fields}), 400, "continue_final_message")


def test_tokenize_counts_what_a_chat_would_have(server: Server) -> None:
    def tokens(**fields: Any) -> list[int]:
        body = {"messages": [QUESTION, PREFILL], **fields}
        found: list[int] = server.post(body, "/tokenize").json()["tokens"]
        return found

    reply = ask(
        server, {"messages": [QUESTION, PREFILL], "max_tokens": 1, "return_token_ids": True}
    )
    assert tokens() == reply["prompt_token_ids"]
    assert tokens(add_generation_prompt=False, continue_final_message=True) == tokens()
    closed = tokens(add_generation_prompt=False)
    assert closed != tokens()
    assert tokens(continue_final_message=False)[: len(closed)] == closed


def test_token_ids_are_those_of_the_text_streamed_or_whole(
    server: Server, tokenizer: Tokenizer
) -> None:
    for path, body in (
        (CHAT, {**STORY, "max_tokens": 200}),
        (COMPLETE, {"prompt": "Once upon a time"}),
    ):
        reply = ask(server, body, path, return_token_ids=True)
        (choice,) = reply["choices"]
        text = choice["text"] if path == COMPLETE else choice["message"]["content"]
        assert tokenizer.decode(choice["token_ids"]) == text
        is_ended = choice["finish_reason"] == "stop"
        assert len(choice["token_ids"]) == reply["usage"]["completion_tokens"] + is_ended
        assert (choice["token_ids"][-1] in tokenizer.eos_token_ids) == is_ended
        prompt_ids = (choice if path == COMPLETE else reply)["prompt_token_ids"]
        assert len(prompt_ids) == reply["usage"]["prompt_tokens"]
        chunks = chunks_of(server, body, path, return_token_ids=True)
        first = chunks[0]["choices"][0] if path == COMPLETE else chunks[0]
        assert first["prompt_token_ids"] == prompt_ids
        assert sum("prompt_token_ids" in json.dumps(chunk) for chunk in chunks) == 1
        streamed = [id for chunk in chunks for one in chunk["choices"] for id in one["token_ids"]]
        assert streamed == choice["token_ids"]
        plain = ask(server, body, path)
        assert "token_ids" not in json.dumps(plain)


def test_token_ids_of_calls_and_of_closed_thoughts_are_all_sent(
    server: Server, tokenizer: Tokenizer
) -> None:
    """Chunks without text must keep their ids."""
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "thinking": {"budget_tokens": 6}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    calls = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    for fields in (thinks, calls):
        body = {"messages": [QUESTION], "max_tokens": 64, "return_token_ids": True, **fields}
        whole = ask(server, body)
        ids = whole["choices"][0]["token_ids"]
        chunks = chunks_of(server, body)
        assert [
            id for chunk in chunks for one in chunk["choices"] for id in one["token_ids"]
        ] == ids
        marker = "</think>" if fields is thinks else "</tool_call>"
        assert marker in tokenizer.decode(ids)


def test_scores_of_a_prompt_are_those_of_its_echo(server: Server, tokenizer: Tokenizer) -> None:
    body = {"prompt": "Once upon a time there was a river", "max_tokens": 2, "temperature": 0}
    echo = ask(server, body, COMPLETE, echo=True, logprobs=1)["choices"][0]["logprobs"]
    (choice,) = ask(server, body, COMPLETE, prompt_logprobs=3, return_token_ids=True)["choices"]
    scores, ids = choice["prompt_logprobs"], choice["prompt_token_ids"]
    assert choice["logprobs"] is None
    assert scores[0] is None
    assert len(scores) == len(ids)
    for place, (id, score) in enumerate(zip(ids[1:], scores[1:]), 1):
        own = score[str(id)]
        assert own["logprob"] == pytest.approx(echo["token_logprobs"][place], abs=1e-4)
        assert own["decoded_token"] == echo["tokens"][place]
        ranks = sorted(other["rank"] for other in score.values() if other["rank"])
        assert ranks == [1, 2, 3]
        assert len(score) == (3 if own["rank"] else 4)
        best = next(other for other in score.values() if other["rank"] == 1)
        assert best["logprob"] == max(other["logprob"] for other in score.values())


def test_an_echo_and_scores_of_a_prompt_have_their_own_alternatives(server: Server) -> None:
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    (plain,) = ask(server, body, COMPLETE)["choices"]
    (both,) = ask(server, body, COMPLETE, prompt_logprobs=4)["choices"]
    assert both["logprobs"] == plain["logprobs"]
    assert len(both["prompt_logprobs"][1]) >= 4


def test_a_chat_has_the_scores_of_its_prompt_once(server: Server) -> None:
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "thinking": {"budget_tokens": 4}}
    body = {"messages": [QUESTION], "max_tokens": 40, "prompt_logprobs": 0, "n": 2, **thinks}
    reply = ask(server, body, logprobs=True)
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert all(len(score) == 1 for score in reply["prompt_logprobs"][1:])
    assert all("prompt_logprobs" not in choice for choice in reply["choices"])
    assert len(reply["choices"][0]["logprobs"]["content"]) > 0
    one = ask(server, {"prompt": [5], "max_tokens": 1}, COMPLETE, prompt_logprobs=1)
    assert one["choices"][0]["prompt_logprobs"] == [None]


def test_a_stop_is_reported_and_shown_on_request(server: Server, tokenizer: Tokenizer) -> None:
    for path, body in (
        (CHAT, STORY),
        (COMPLETE, {"prompt": "Once upon a time there was", "max_tokens": 24}),
    ):
        plain = ask(server, body, path, return_token_ids=True)["choices"][0]
        text = plain["text"] if path == COMPLETE else plain["message"]["content"]
        assert plain["stop_reason"] is None
        word = text.split()[2]
        (stopped,) = ask(server, body, path, stop=[word])["choices"]
        (shown,) = ask(server, body, path, stop=[word], include_stop_str_in_output=True)["choices"]
        before, after = ((one.get("text") or one["message"]["content"]) for one in (stopped, shown))
        assert after == before + word
        assert text.startswith(after)
        assert stopped["stop_reason"] == shown["stop_reason"] == word
        end = chunks_of(server, body, path, stop=[word])[-1]["choices"][0]
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", word)
        id = plain["token_ids"][5]
        place = plain["token_ids"].index(id)
        (by_id,) = ask(server, body, path, stop_token_ids=[id], return_token_ids=True)["choices"]
        assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", id)
        assert by_id["token_ids"] == plain["token_ids"][: place + 1]
        until = by_id["text"] if path == COMPLETE else by_id["message"]["content"]
        assert until.rstrip() == tokenizer.decode(plain["token_ids"][:place]).rstrip()
        (with_id,) = ask(server, body, path, stop_token_ids=[id], include_stop_str_in_output=True)[
            "choices"
        ]
        until = with_id["text"] if path == COMPLETE else with_id["message"]["content"]
        assert until.rstrip() == tokenizer.decode(plain["token_ids"][: place + 1]).rstrip()


def test_an_end_of_the_models_own_is_no_stop_reason(server: Server, tokenizer: Tokenizer) -> None:
    body = {
        "messages": [QUESTION],
        "max_tokens": 100,
        "stop_token_ids": list(tokenizer.eos_token_ids),
    }
    (choice,) = ask(server, body)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    (forced,) = ask(server, body, ignore_eos=True)["choices"]
    assert forced["stop_reason"] in tokenizer.eos_token_ids


def test_special_tokens_are_shown_where_that_is_asked(server: Server, tokenizer: Tokenizer) -> None:
    body = {"messages": [QUESTION], "max_tokens": 100, "temperature": 0}
    hidden = ask(server, body)["choices"][0]["message"]["content"]
    shows = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    reply = ask(server, body, **shows, spaces_between_special_tokens=False)
    content = reply["choices"][0]["message"]["content"]
    assert content == f"{hidden}<|im_end|>"
    kept = ask(server, body, skip_special_tokens=False)["choices"][0]["message"]["content"]
    assert kept == hidden, "what ended a reply is no part of it"
    on = {"ignore_eos": True, "max_tokens": 60}
    going_on = ask(server, {**body, **on}, skip_special_tokens=False)["choices"][0]["message"][
        "content"
    ]
    assert "<|im_end|>" in going_on
    assert "<|im_end|>" not in ask(server, {**body, **on})["choices"][0]["message"]["content"]


def test_bad_words_are_not_in_a_reply(server: Server) -> None:
    body = {**STORY, "temperature": 0}
    content = ask(server, body)["choices"][0]["message"]["content"]
    words = [word.strip(".,") for word in content.split()[1:6]]
    held = ask(server, body, bad_words=words, n=2)["choices"]
    for choice in held:
        said = choice["message"]["content"]
        assert said != content
        assert not set(words) & set(said.replace(".", " ").replace(",", " ").split())
    assert_refused(server.post({**STORY, "bad_words": [""]}), 400, "bad_words[0]")


def test_a_prompt_is_cut_to_its_last_tokens(server: Server, tokenizer: Tokenizer) -> None:
    text = "one two three four " * 3000  # more than the context holds
    ids = tokenizer.encode(text, True)
    body = {"prompt": text, "max_tokens": 4, "truncate_prompt_tokens": 10, "return_token_ids": True}
    (choice,) = ask(server, body, COMPLETE, echo=True)["choices"]
    assert choice["prompt_token_ids"] == ids[-10:]
    assert choice["text"].startswith(tokenizer.decode(ids[-10:]))
    (fit,) = ask(server, {**body, "truncate_prompt_tokens": -1}, COMPLETE)["choices"]
    assert fit["prompt_token_ids"] == ids[-(4096 - 4) :]
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    reply = ask(server, chat, truncate_prompt_tokens=12, return_token_ids=True)
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"] == 12
    assert ask(server, STORY, truncate_prompt_tokens=4000)["usage"]["prompt_tokens"] < 100


def test_every_chunk_counts_where_that_is_asked(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in ((CHAT, STORY), (COMPLETE, {"prompt": "Once", "max_tokens": 6})):
        chunks = chunks_of(server, body, path, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] > 2
        assert all(
            chunk["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]
            for chunk in chunks
        )
        plain = chunks_of(server, body, path, stream_options={"continuous_usage_stats": True})
        assert not any("usage" in chunk for chunk in plain)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
    ],
)
def test_wrong_values_are_named(server: Server, fields: dict[str, Any], param: str) -> None:
    assert_refused(server.post({**STORY, **fields}), 400, param)
    assert_refused(server.post({"prompt": "x", **fields}, COMPLETE), 400, param)
