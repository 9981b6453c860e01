"""A template that thinks by default, as Qwen's does: client view and operator settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from serving import Server, start_server
from thinking_template import write_thinking_template

TOM = (
    "Tom has 23 apples. He buys 4 bags with 6 apples each and gives 11 apples to Mia. "
    "How many apples does he have?"
)
SUM = "What is 17 + 26? Reply with just the number."
CLOSING = "\n</think>\n\n"
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 99}},
    "required": ["sum"],
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="module")
def server(template: Path) -> Iterator[Server]:
    """Clients that know nothing of thoughts, and an operator who wants varied replies."""
    serve = {
        "chat_template": str(template),
        "reasoning": "content",
        "temperature": 1.5,
        "top_p": 0.9,
    }
    with start_server(serve=serve) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(None)


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def ask(
    server: Server, content: str, path: str = "/v1/chat/completions", **fields: Any
) -> dict[str, Any]:
    answer = server.post(body(content, **fields), path)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def content_of(reply: dict[str, Any]) -> str:
    content: str = reply["choices"][0]["message"]["content"]
    return content


def test_without_thinking_usage_is_what_the_text_and_the_prompt_are_tokenised_to(
    server: Server, template: Path, tokenizer: Tokenizer
) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    rendering = ChatTemplate.load(None, str(template))
    for question, max_tokens in ((TOM, 200), (TOM, 9), (SUM, 40)):
        reply = ask(server, question, max_tokens=max_tokens, **off)
        content, usage = content_of(reply), reply["usage"]
        assert content
        assert "think" not in content
        assert usage["completion_tokens"] == len(tokenizer.encode(content))
        prompt = rendering.render(body(question)["messages"], enable_thinking=False)
        assert usage["prompt_tokens"] == len(tokenizer.encode(prompt))
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_thoughts_that_stay_in_content_are_between_tags_streamed_or_whole(
    server: Server, tokenizer: Tokenizer
) -> None:
    whole = ask(server, SUM, max_tokens=100)
    assert set(whole["choices"][0]["message"]) == {"role", "content"}
    assert content_of(whole) == f"<think>\n17 + 26 = 43.{CLOSING}43"
    counted = len(tokenizer.encode(content_of(whole).removeprefix("<think>\n")))
    assert whole["usage"]["completion_tokens"] == counted, "the prompt has opened the thought"
    with server.stream(body(SUM, max_tokens=100, stream=True)) as lines:
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == content_of(whole)
    assert not any("reasoning_content" in delta for delta in deltas)


def test_content_that_must_be_json_and_apis_with_blocks_keep_thoughts_apart(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    message = ask(server, SUM, max_tokens=100, response_format=form)["choices"][0]["message"]
    assert set(json.loads(message["content"])) == {"sum"}
    assert message["reasoning_content"] == "17 + 26 = 43."
    blocks = ask(server, SUM, "/v1/messages", max_tokens=100, thinking={"type": "adaptive"})[
        "content"
    ]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    items = server.post({"input": SUM, "temperature": 0}, "/v1/responses").json()["output"]
    assert [item["type"] for item in items] == ["reasoning", "message"]


@pytest.mark.parametrize(("max_tokens", "num_thought"), [(40, 20), (26, 16), (20, 16)])
def test_a_thought_without_a_budget_has_half_of_the_tokens_and_at_least_16(
    server: Server, tokenizer: Tokenizer, max_tokens: int, num_thought: int
) -> None:
    reply = ask(server, TOM, max_tokens=max_tokens)
    thought, closing, answer = content_of(reply).partition(CLOSING)
    assert closing
    assert answer
    assert len(tokenizer.encode(thought.removeprefix("<think>\n"))) == num_thought
    assert reply["usage"]["completion_tokens"] == max_tokens
    num_closing = len(tokenizer.encode(CLOSING))
    assert (
        reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_thought + num_closing
    )


def test_a_requests_own_budget_wins_and_a_limit_without_room_for_an_answer_is_kept(
    server: Server,
) -> None:
    own = ask(server, TOM, max_tokens=60, thinking={"type": "enabled", "budget_tokens": 50})
    free = ask(server, TOM, max_tokens=200)
    assert content_of(own).partition(CLOSING)[0] == content_of(free).partition(CLOSING)[0]
    for budget in (None, 4):
        thinking = (
            {"type": "enabled"} if budget is None else {"type": "enabled", "budget_tokens": budget}
        )
        cut = ask(server, TOM, max_tokens=6, thinking=thinking)
        assert CLOSING not in content_of(cut)
        assert (cut["usage"]["completion_tokens"], cut["choices"][0]["finish_reason"]) == (
            6,
            "length",
        )


def test_an_effort_leaves_room_for_the_answer_too(server: Server) -> None:
    body = {"input": TOM, "temperature": 0, "max_output_tokens": 40, "reasoning": {"effort": "low"}}
    thought, message = server.post(body, "/v1/responses").json()["output"]
    assert thought["type"] == "reasoning"
    assert message["content"][0]["text"]


def test_the_operators_sampling_is_for_requests_that_do_not_say_in_every_api(
    server: Server,
) -> None:
    def drawn(**fields: Any) -> str:
        given = {**body(TOM, max_tokens=60, seed=3), **fields}
        return content_of(
            server.post({name: v for name, v in given.items() if v is not None}).json()
        )

    said = drawn(temperature=1.5, top_p=0.9)
    assert drawn(temperature=None) == said
    assert drawn(temperature=0) != said
    prompt = {"prompt": "Once upon a", "max_tokens": 24, "seed": 3}
    texts = [
        server.post({**prompt, **given}, path).json()["choices"][0]["text"]
        for path in ("/v1/completions", "/invocations")
        for given in ({}, {"temperature": 1.5, "top_p": 0.9}, {"temperature": 0})
    ]
    assert texts[0] == texts[1] == texts[3] == texts[4]
    assert texts[0] != texts[2]
    told = server.post({"input": SUM, "max_output_tokens": 4}, "/v1/responses").json()
    assert (told["temperature"], told["top_p"]) == (1.5, 0.9)


# Invocations


def test_a_prompt_that_is_thought_about_is_answered_with_text(template: Path) -> None:
    with start_server(serve={"chat_template": str(template), "thinking_share": 1.0}) as server:

        def invoke(**fields: Any) -> dict[str, Any]:
            answer = server.post(
                {"prompt": SUM, "thinking": True, "max_tokens": 100, **fields}, "/invocations"
            )
            assert answer.status_code == 200, answer.text
            reply: dict[str, Any] = answer.json()
            return reply

        reply = invoke()
        (choice,) = reply["choices"]
        assert reply["object"] == "text_completion"
        assert (choice["text"], choice["reasoning_content"]) == ("43", "17 + 26 = 43.")
        assert invoke(prompt=[SUM])["choices"] == reply["choices"]
        assert choice["finish_reason"] == "stop"

        streamed = {"prompt": SUM, "thinking": True, "max_tokens": 100, "stream": True}
        lines = server.post(streamed, "/invocations").text.split("\n\n")
        choices = [
            json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")
        ]
        assert "".join(piece["text"] for piece in choices) == choice["text"]
        assert (
            "".join(piece.get("reasoning_content", "") for piece in choices)
            == choice["reasoning_content"]
        )

        scored = invoke(logprobs=2)["choices"][0]["logprobs"]
        assert scored["tokens"][0] == "17"[: len(scored["tokens"][0])]
        assert all(len(top) == 2 for top in scored["top_logprobs"])
        assert server.post({**streamed, "echo": True}, "/invocations").status_code == 400

        free = ask(server, TOM, max_tokens=42)
        assert not content_of(free), "a share of 1 is no budget"
        assert free["choices"][0]["finish_reason"] == "length"
