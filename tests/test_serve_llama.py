"""llama-server's own endpoints, over plain HTTP: the embedded model on a real server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ollama_cases import QUESTION, SUM
from serving import Server, eventually

PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def complete(server: Server, prompt: Any = PROMPT, path: str = "/completion", **fields: Any) -> Any:
    answer = server.post({"prompt": prompt, **fields}, path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post({"prompt": PROMPT, "stream": True, **fields}, "/completion")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def token_ids(server: Server, text: str) -> list[int]:
    ids: list[int] = server.post({"content": text}, "/tokenize").json()["tokens"]
    return ids


# Completions


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_prompt_is_continued(server: Server, path: str) -> None:
    reply = complete(server, path=path)
    assert (reply["content"], reply["stop"], reply["model"]) == ("43", True, "penstock-tiny")
    assert (reply["stop_type"], reply["stopping_word"], reply["truncated"]) == ("eos", "", False)
    assert (reply["tokens_predicted"], reply["tokens"]) == (2, [])
    assert reply["tokens_evaluated"] == len(token_ids(server, PROMPT))
    assert reply["prompt"] == PROMPT
    timings = reply["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == reply["tokens_evaluated"]
    assert timings["predicted_n"] == 2
    assert all(value > 0 for name, value in timings.items() if name != "cache_n")


def test_a_stream_tells_text_and_tokens_and_then_everything(server: Server) -> None:
    *pieces, end = stream(server, n_predict=20)
    assert "".join(piece["content"] for piece in pieces) == "43"
    assert not any(piece["stop"] for piece in pieces)
    ids = [token_id for piece in pieces for token_id in piece["tokens"]]
    whole = complete(server, return_tokens=True)
    assert ids == whole["tokens"], "the end token, too"
    assert ids[:-1] == token_ids(server, "43")
    assert (end["stop"], end["content"], end["stop_type"], end["tokens_predicted"]) == (
        True,
        "",
        "eos",
        2,
    )
    assert end.keys() == whole.keys()


def test_the_reason_why_a_reply_ended_is_reported(server: Server) -> None:
    cut = complete(server, n_predict=1)
    assert (cut["content"], cut["stop_type"]) == ("4", "limit")
    word = complete(server, stop=["3"])
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("4", "word", "3")
    for free in (-1, -2, 10**6):
        assert complete(server, n_predict=free)["stop_type"] == "eos"


def test_prompts_may_be_token_ids_mixtures_objects_and_several(server: Server) -> None:
    begin, rest = PROMPT[:20], PROMPT[20:]
    ids = token_ids(server, begin) + token_ids(server, rest)
    ways = (ids, [*token_ids(server, begin), rest], [begin, *token_ids(server, rest)])
    for one in (*ways, {"prompt_string": PROMPT}):
        reply = complete(server, one)
        assert (reply["content"], reply["prompt"]) == ("43", PROMPT)
    other = PROMPT.replace("26", "11")
    replies = complete(server, [PROMPT, ids, [begin, *token_ids(server, rest)], other], n_cmpl=2)
    assert [reply["content"] for reply in replies] == ["43"] * 6 + ["28"] * 2
    assert [reply["index"] for reply in replies] == list(range(8))
    assert replies[7]["prompt"] == other
    assert replies[7]["tokens_evaluated"] == len(token_ids(server, other))


def test_streams_of_several_prompts_have_an_end_each(server: Server) -> None:
    events = stream(server, prompt=[PROMPT, PROMPT.replace("26", "11")])
    for index, expected in enumerate(("43", "28")):
        own = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in own) == expected
        assert [event["stop"] for event in own] == [False] * (len(own) - 1) + [True]


def test_probabilities_have_ids(server: Server) -> None:
    whole = complete(server, n_probs=3)["completion_probabilities"]
    *pieces, end = stream(server, n_probs=3)
    streamed = [token for piece in pieces for token in piece["completion_probabilities"]]
    assert "completion_probabilities" not in end
    for tokens in (whole, streamed):
        assert [token["id"] for token in tokens] == token_ids(server, "43")
        for token in tokens:
            assert bytes(token["bytes"]).decode() == token["token"]
            assert len(token["top_logprobs"]) == 3
            best = max(token["top_logprobs"], key=lambda top: top["logprob"])
            assert (best["id"], best["token"]) == (token["id"], token["token"])


def test_a_grammar_and_a_schema_are_enforced(server: Server) -> None:
    gbnf = 'root ::= answer "." ws\nanswer ::= ("yes" | "\\u006eo")\nws ::= [ \\t\\n]?\n'
    assert complete(server, grammar=gbnf)["content"].strip() in ("yes.", "no.")
    assert set(json.loads(complete(server, json_schema=SUM)["content"])) == {"sum"}


def test_replies_are_drawn_as_asked(server: Server) -> None:
    wild = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "n_predict": 8}
    drawn = [complete(server, **wild, seed=seed)["content"] for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1
    assert complete(server, **{**wild, "top_k": 1})["content"] == "43"
    without = complete(server, **{**wild, "top_k": 1}, samplers=["top_p", "temperature"], seed=1)
    assert without["content"] == drawn[0]
    four = token_ids(server, "4")[0]
    assert not complete(server, logit_bias=[[four, False]], n_predict=1)["content"].startswith("4")
    assert complete(server, logit_bias={str(four): -100}, n_predict=1)["content"] != "4"
    settings = complete(server, temperature=0.5, seed=7, n_predict=1)["generation_settings"]
    assert (settings["temperature"], settings["seed"], settings["n_predict"]) == (0.5, 7, 1)
    for samplers, penalty in ((["top_k"], 1.0), (["top_k", "penalties"], 1.5)):
        reply = complete(server, samplers=samplers, repeat_penalty=1.5, n_predict=1)
        assert reply["generation_settings"]["repeat_penalty"] == penalty


def test_fields_that_change_no_reply_are_taken_and_fields_can_be_chosen(server: Server) -> None:
    harmless = {
        "cache_prompt": False,
        "id_slot": 0,
        "n_keep": 5,
        "timings_per_token": True,
        "mirostat": 0,
        "dry_multiplier": 0.0,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    }
    reply = complete(
        server, **harmless, response_fields=["content", "timings/predicted_n", "nothing"]
    )
    assert reply == {"content": "43", "predicted_n": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 2},
        {"typical_p": 0.5},
        {"dry_multiplier": 0.8},
        {"xtc_probability": 0.5},
        {"dynatemp_range": 0.5},
        {"n_indent": 4},
        {"t_max_predict_ms": 10},
        {"post_sampling_probs": True},
        {"lora": [{"id": 0, "scale": 1.0}]},
        {"grammar_lazy": True},
        {"samplers": ["infill"]},
        {"grammar": "root ::= nothing"},
        {"grammar": "no grammar"},
        {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
        {"grammar": "#" * 40_000},
        {"json_schema": {"type": "nothing"}},
        {"n_predict": 0},
        {"n_probs": 99},
        {"n_cmpl": 0},
        {"repeat_last_n": 64, "repeat_penalty": 1.1},
        {"logit_bias": [[1, True]]},
        {"logit_bias": [["word", 1.0]]},
    ],
)
def test_what_cannot_be_honoured_is_named(server: Server, fields: dict[str, Any]) -> None:
    answer = server.post({"prompt": PROMPT, **fields}, "/completion")
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == next(iter(fields))
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "",
        [1, ["x"]],
        [10**6],
        [-1, "x"],
        "x " * 9000,
        ["x", 1] * 300,
        {"prompt_string": "x", "multimodal_data": ["AAAA"]},
        None,
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(server: Server, prompt: Any) -> None:
    answer = server.post({"prompt": prompt}, "/completion")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("prompt", "multimodal_data")


def test_a_client_that_leaves_ends_its_reply(server: Server) -> None:
    body = {"prompt": "Once", "temperature": 50.0, "stream": True}
    with server.http.stream("POST", f"{server.url}/completion", json=body) as answer:
        next(answer.iter_lines())
    assert eventually(lambda: server.stats()["num_running"] == 0)


# Descriptions of the server


def test_a_chat_is_rendered_as_its_prompt(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "enable_thinking": False}
    assert server.post(body, "/apply-template").json() == {"prompt": PROMPT}
    assert server.post({"messages": "x"}, "/apply-template").status_code == 400


def test_tokens_are_reported_as_llama_server_does(server: Server) -> None:
    text = "Hello <|im_end|> wörld 🌍"
    ids = token_ids(server, text)
    pieces = server.post({"content": text, "with_pieces": True}, "/tokenize").json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    data = b"".join(
        piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"])
        for piece in pieces
    )
    assert data.decode() == text
    plain = server.post({"content": text, "parse_special": False}, "/tokenize").json()["tokens"]
    assert len(plain) > len(ids)
    assert server.post({"tokens": ids}, "/detokenize").json()["content"] == text
    both = server.post({"content": text, "prompt": text}, "/tokenize")
    assert both.status_code == 400


def test_props_slots_and_the_tokenizer_are_described(server: Server) -> None:
    def get(path: str) -> Any:
        answer = server.http.get(f"{server.url}{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    props, slots, tokenizer = get("/props"), get("/slots?fail_on_no_slot=1"), get("/tokenizer_info")
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["default_generation_settings"]["params"]["temperature"] == 0.0
    assert props["total_slots"] == len(slots) > 0
    assert [slot["id"] for slot in slots] == list(range(len(slots)))
    assert not any(slot["is_processing"] for slot in slots)
    assert props["chat_template"] == tokenizer["chat_template"]
    assert token_ids(server, tokenizer["eos_token"]) == token_ids(server, props["eos_token"])
    assert len(token_ids(server, tokenizer["eos_token"])) == 1
