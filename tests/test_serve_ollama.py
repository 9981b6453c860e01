"""Ollama's API as its own client sees it, and over plain HTTP: the embedded model on a real
server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from ollama_cases import QUESTION, SUM
from penstock.serve.answer import ReplyClock
from penstock.serve.ollama.replies import ChatFormat, GenerateFormat, OllamaFormat
from serving import Server, eventually, start_server

MODEL = "penstock-tiny"
ASKED = [{"role": "user", "content": QUESTION}]
FEED = {
    "type": "function",
    "function": {
        "name": "feed_pet",
        "description": "Release food for a pet.",
        "parameters": {
            "type": "object",
            "properties": {"pet": {"type": "string"}, "grams": {"type": "integer"}},
            "required": ["pet", "grams"],
        },
    },
}
LENA = [{"role": "user", "content": "Give 225 grams of food to Lena."}]


@pytest.fixture(scope="module")
def api(server: Server) -> Any:
    return ollama.Client(host=server.url, timeout=60.0)


def lines_of(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(body, path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def refusal(server: Server, path: str, body: dict[str, Any], status: int = 400) -> str:
    answer = server.post({"model": MODEL, **body}, path)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    message: str = answer.json()["error"]
    return message


# Chats


def test_a_chat_is_answered_whole_and_streamed_alike(api: Any) -> None:
    whole = api.chat(MODEL, ASKED)
    parts = list(api.chat(MODEL, ASKED, stream=True))
    assert (whole.model, whole.message.role, whole.message.content) == (MODEL, "assistant", "43")
    assert "".join(part.message.content for part in parts) == "43"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for last in (whole, parts[-1]):
        assert (last.done, last.done_reason, last.eval_count) == (True, "stop", 2)
        assert last.prompt_eval_count > 10
        assert last.total_duration == last.prompt_eval_duration + last.eval_duration
        assert min(last.prompt_eval_duration, last.eval_duration) > 0
        assert last.load_duration == 0


def test_a_stream_is_the_default_and_lines_of_json(server: Server) -> None:
    lines = lines_of(server, "/api/chat", {"model": f"{MODEL}:latest", "messages": ASKED})
    assert all(line["model"] == MODEL and line["created_at"].endswith("Z") for line in lines)
    assert lines[0]["message"] == {"role": "assistant", "content": "4"}
    assert set(lines[0]) == {"model", "created_at", "message", "done"}
    assert lines[-1]["message"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("kind", [ChatFormat, GenerateFormat])
def test_a_heartbeat_is_a_line_without_text(kind: type[OllamaFormat]) -> None:
    line = json.loads(kind(MODEL, ReplyClock(), False).encode_heartbeat())
    assert line["done"] is False
    assert line.get("response", line.get("message", {}).get("content")) == ""


def test_calls_come_whole_with_arguments_as_objects_and_their_results_are_taken(api: Any) -> None:
    whole = api.chat(MODEL, LENA, tools=[FEED]).message
    streamed = [
        call
        for part in api.chat(MODEL, LENA, tools=[FEED], stream=True)
        for call in part.message.tool_calls or ()
    ]
    for calls in (whole.tool_calls, streamed):
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("feed_pet", {"pet": "Lena", "grams": 225})
        ]
    result = {"role": "tool", "tool_name": "feed_pet", "content": "done"}
    after = api.chat(MODEL, [*LENA, whole, result], tools=[FEED])
    assert after.done_reason == "stop"
    assert after.message.content


def test_a_call_cut_off_has_the_arguments_that_were_whole(api: Any) -> None:
    seen = set()
    for num_predict in range(10, 32, 3):
        options = {"num_predict": num_predict}
        whole = api.chat(MODEL, LENA, tools=[FEED], options=options)
        *parts, _ = api.chat(MODEL, LENA, tools=[FEED], options=options, stream=True)
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        for found in (whole.message.tool_calls or [], calls):
            seen |= {json.dumps(call.function.arguments) for call in found}
        assert len(calls) == len(whole.message.tool_calls or ())
    assert {"{}", '{"pet": "Lena"}'} <= seen


@pytest.mark.parametrize("think", [True, "low", "medium", "high"])
def test_thoughts_have_a_field_of_their_own(api: Any, think: bool | str) -> None:
    whole = api.chat(MODEL, ASKED, think=think).message
    parts = [part.message for part in api.chat(MODEL, ASKED, think=think, stream=True)]
    assert whole.content == "43"
    assert whole.thinking
    assert "".join(part.thinking or "" for part in parts) == whole.thinking
    assert "".join(part.content for part in parts) == "43"
    assert api.chat(MODEL, ASKED, think=False).message.thinking is None
    assert api.generate(MODEL, QUESTION, think=think).thinking == whole.thinking


def test_a_format_is_enforced(api: Any) -> None:
    options = {"num_predict": 60}
    for form in (SUM, {**SUM, "additionalProperties": True}, "json"):
        reply = api.chat(
            MODEL, [{"role": "user", "content": "What is 17 + 26?"}], format=form, options=options
        )
        assert reply.message.content.lstrip().startswith("{")
    for raw in (False, True):
        text = api.generate(
            MODEL, "What is 17 + 26?", format=SUM, raw=raw, options=options
        ).response
        assert set(json.loads(text)) == {"sum"}


def test_the_last_message_may_begin_the_reply(api: Any) -> None:
    reply = api.chat(MODEL, [*ASKED, {"role": "assistant", "content": "4"}])
    assert reply.message.content == "3"


def test_the_last_message_begins_the_reply_as_in_chat_completions(server: Server, api: Any) -> None:
    """Its reasoning counts, and the model's reasoning ends before it; an earlier message stays, and
    a format makes it a turn of its own.
    """
    last = {"role": "assistant", "content": "4"}
    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        ([last], {"think": True}, {"thinking": True}),
        ([{**last, "thinking": "17 + 26 = 43."}], {"think": True}, {"thinking": True}),
        ([{"role": "assistant", "content": "Hm."}, last], {}, {}),
        ([last], {"format": "json"}, {"response_format": {"type": "json_object"}}),
    ]
    for turns, ours, theirs in cases:
        said = [*ASKED, *turns]
        reply = api.chat(MODEL, said, options={"num_predict": 12}, **ours)
        messages = [{**m, "reasoning_content": m.get("thinking")} for m in said]
        chat = server.post({"messages": messages, "max_tokens": 12, **theirs}).json()
        assert reply.prompt_eval_count == chat["usage"]["prompt_tokens"]
        assert reply.message.content == chat["choices"][0]["message"]["content"]


def test_logprobs_are_those_of_the_tokens(api: Any) -> None:
    whole = api.chat(MODEL, ASKED, logprobs=True, top_logprobs=2)
    parts = list(api.chat(MODEL, ASKED, logprobs=True, top_logprobs=2, stream=True))
    streamed = [token for part in parts for token in part.logprobs or ()]
    for tokens in (whole.logprobs, streamed):
        assert "".join(token.token for token in tokens) == "43"
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
    raw = api.generate(MODEL, "Once upon", raw=True, logprobs=True, options={"num_predict": 3})
    assert len(raw.logprobs) == 3


def test_a_session_goes_on(server: Server) -> None:
    texts = []
    for text in ("My name is Alice.", "What is my name?"):
        body = {
            "messages": [{"role": "user", "content": text}],
            "session_id": "ollama",
            "stream": False,
        }
        texts.append(server.post(body, "/api/chat").json()["message"]["content"])
    assert texts == ["Nice to meet you, Alice!", "Your name is Alice."]


# Prompts


def test_a_prompt_is_answered_as_a_chat_is(api: Any) -> None:
    whole = api.generate(MODEL, QUESTION, system="You are brief.")
    streamed = list(api.generate(MODEL, QUESTION, system="You are brief.", stream=True))
    chat = api.chat(MODEL, [{"role": "system", "content": "You are brief."}, *ASKED])
    assert whole.response == "".join(part.response for part in streamed) == chat.message.content
    assert whole.prompt_eval_count == streamed[-1].prompt_eval_count == chat.prompt_eval_count


@pytest.mark.parametrize("streams", [False, True])
def test_a_context_holds_the_conversation(api: Any, streams: bool) -> None:
    first = api.generate(MODEL, "My name is Alice.", stream=streams)
    context = list(first)[-1].context if streams else first.context
    assert (
        api.generate(MODEL, "What is my name?", context=context).response == "Your name is Alice."
    )
    assert api.generate(MODEL, "Once upon", raw=True, options={"num_predict": 1}).context is None


def test_a_raw_prompt_is_continued_as_it_is(api: Any, server: Server) -> None:
    prompt = (
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert api.generate(MODEL, prompt, raw=True).response == "43"
    counted = server.post({"prompt": prompt}, "/tokenize").json()["count"]
    assert api.generate(MODEL, prompt, raw=True).prompt_eval_count == counted


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_for_nothing_says_that_the_model_is_loaded(server: Server, path: str) -> None:
    for keep_alive in (0, "5m"):
        answer = server.post({"model": MODEL, "keep_alive": keep_alive}, path).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")


# Options


def test_replies_are_drawn_as_the_options_say(api: Any) -> None:
    def drawn(**options: Any) -> Any:
        return api.chat(MODEL, ASKED, options={"num_predict": 8, **options})

    wild = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert drawn(**wild, seed=1).message.content == drawn(**wild, seed=1).message.content
    assert len({drawn(**wild, seed=seed).message.content for seed in (1, 2, 3)}) > 1
    assert len({drawn(**wild, seed=-1).message.content for _ in range(3)}) > 1
    assert drawn(**{**wild, "top_k": 1}).message.content == "43"
    assert drawn(**{**wild, "top_k": 1.0}).message.content == "43"
    assert drawn(stop=["3"]).message.content == "4"
    limited = drawn(num_predict=1)
    assert (limited.message.content, limited.done_reason) == ("4", "length")
    for free in (-1, -2, 0, 100_000):
        assert drawn(num_predict=free).message.content == "43"


def test_options_that_cannot_change_a_reply_are_taken(api: Any) -> None:
    options = {
        "num_ctx": 8192,
        "num_keep": 5,
        "num_gpu": 1,
        "num_thread": 8,
        "use_mmap": True,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "tfs_z": 1.0,
        "typical_p": 1.0,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "penalize_newline": False,
    }
    assert api.chat(MODEL, ASKED, options=options, keep_alive="5m").message.content == "43"
    off = {"repeat_penalty": 9.0, "repeat_last_n": 0}
    assert api.chat(MODEL, ASKED, options=off).message.content == "43"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("mirostat", 1),
        ("typical_p", 0.5),
        ("tfs_z", 0.5),
        ("temperature", 1000),
        ("num_predict", "many"),
        ("num_predict", 2**40),
        ("top_k", 1.5),
        ("repeat_penalty", -1),
        ("stop", [""]),
        ("temprature", 1),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_an_option_that_cannot_be_honoured_is_named(
    server: Server, option: str, value: Any, raw: bool
) -> None:
    body = {"prompt": QUESTION, "raw": raw, "options": {option: value}}
    assert option in refusal(server, "/api/generate", body)


def test_a_window_of_penalties_is_refused_where_there_are_any(server: Server) -> None:
    options = {"repeat_penalty": 1.1, "repeat_last_n": 64}
    assert "repeat_last_n" in refusal(server, "/api/chat", {"messages": ASKED, "options": options})


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"messages": [{**ASKED[0], "images": ["AAAA"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "nobody", "content": "x"}]}, "role"),
        ("/api/chat", {"messages": ASKED, "think": "hardly"}, "think is 'hardly'"),
        ("/api/chat", {"messages": ASKED, "format": "yaml"}, "format"),
        ("/api/chat", {"messages": ASKED, "format": {"type": "nothing"}}, "schema"),
        ("/api/chat", {"messages": ASKED, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("/api/chat", {"messages": "x"}, "messages"),
        ("/api/generate", {"prompt": "x", "images": ["AAAA"]}, "images"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x", "template": "y"}, "template"),
        ("/api/generate", {"prompt": "x", "context": [1, 2, 3]}, "context"),
        ("/api/generate", {"prompt": "x", "context": [2**40]}, "context"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        (
            "/api/generate",
            {"prompt": "x", "raw": True, "logprobs": True, "top_logprobs": 99},
            "top_logprobs",
        ),
        ("/api/generate", {"prompt": "x " * 9000}, "context"),
        ("/api/show", {"model": ""}, "model"),
    ],
)
def test_what_cannot_be_answered_is_named(
    server: Server, path: str, fields: dict[str, Any], named: str
) -> None:
    assert named in refusal(server, path, fields)


# The model


def test_the_model_is_listed_shown_and_running(api: Any, server: Server) -> None:
    for models in (api.list().models, api.ps().models):
        (model,) = models
        assert model.model == f"{MODEL}:latest"
        assert len(model.digest) == 64
        assert model.size > 0
        assert model.details.quantization_level == "F32"
    assert api.ps().models[0].context_length == 4096
    for name in (MODEL, f"{MODEL}:latest"):
        shown = api.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        architecture = shown.modelinfo["general.architecture"]
        assert shown.modelinfo[f"{architecture}.context_length"] == 4096
        assert "im_start" in shown.template
    version = server.http.get(f"{server.url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) > (0, 6, 4)
    assert server.http.head(f"{server.url}/api/tags").status_code == 200


def test_what_a_server_of_one_model_cannot_do_is_refused(api: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'other' not found") as unknown:
        api.show("other")
    assert unknown.value.status_code == 404
    for refused in (
        lambda: api.pull("other"),
        lambda: api.create("other", from_=MODEL),
        lambda: api.copy(MODEL, "other"),
        lambda: api.delete(MODEL),
        lambda: api.push(MODEL),
    ):
        with pytest.raises(ollama.ResponseError, match="not supported here") as refusal:
            refused()
        assert refusal.value.status_code == 501
    assert api.pull(MODEL).status == "success"
    assert [part.status for part in api.pull(MODEL, stream=True)] == ["success"]


# Errors and ends


def test_errors_have_ollamas_form_wherever_they_are_found(server: Server) -> None:
    url = f"{server.url}/api"
    answers = {
        404: server.http.get(f"{url}/nothing"),
        405: server.http.get(f"{url}/chat"),
        413: server.http.post(f"{url}/chat", content=b" " * (33 * 1024**2)),
        415: server.http.post(f"{url}/chat", content=b"{}", headers={"content-type": "text/plain"}),
        400: server.http.post(f"{url}/chat", content=b"{"),
        403: server.http.get(f"{url}/tags", headers={"origin": "http://elsewhere.example"}),
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        assert set(answer.json()) == {"error"}
        assert isinstance(answer.json()["error"], str)


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    with start_server(serve={"request_timeout": 1.5, "api_key": ["secret"]}) as server:
        yield server


def test_an_error_inside_a_stream_is_a_line_of_it(strict: Server) -> None:
    api = ollama.Client(host=strict.url, timeout=60.0, headers={"Authorization": "Bearer secret"})
    endless = {"temperature": 50.0, "seed": 1, "num_predict": -1}
    parts: list[Any] = []
    with pytest.raises(ollama.ResponseError, match="not complete in time"):
        parts.extend(api.generate(MODEL, "Once", raw=True, stream=True, options=endless))
    assert parts


def test_keys_are_needed_here_too(strict: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="API key") as refused:
        ollama.Client(host=strict.url).list()
    assert refused.value.status_code == 401
    known = ollama.Client(host=strict.url, headers={"Authorization": "Bearer secret"})
    assert known.chat(MODEL, ASKED).message.content == "43"


def test_a_client_that_leaves_ends_its_reply(server: Server) -> None:
    body = {"prompt": "Once", "raw": True, "options": {"temperature": 50.0, "num_predict": -1}}
    with httpx.stream("POST", f"{server.url}/api/generate", json=body) as answer:
        next(answer.iter_lines())
    assert eventually(lambda: server.stats()["num_running"] == 0)
