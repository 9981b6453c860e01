"""Prefix reuse over HTTP: prefixes, sessions, the system prompt; and the loop guard. The embedded
model on a CPU, with pages of 16 tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.serve.system_prompt import read_system_prompt
from serving import Server, assert_refused, eventually, start_server

PAGE = 16
SYSTEM = "You know rivers, their banks, their deltas and the weirs that people build in them. " * 3
TURN_START = "<|im_start|>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file: Path = tmp_path_factory.mktemp("prompt") / "system.txt"
    file.write_text(f"\n{SYSTEM}\n")
    with start_server(
        {"max_rows": 16}, {"system_prompt_file": str(file)}
    ) as server:  # 64 checkpoints
        yield server


@pytest.fixture(scope="module")
def cold() -> Iterator[Server]:
    """The same model without a prefix cache; it guards against loops by default."""
    with start_server({"prefix_cache": False}, {"loop_guard": True}) as server:
        yield server


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def tokens_of(server: Server, messages: list[dict[str, str]]) -> list[int]:
    tokens: list[int] = server.post({"messages": messages}, "/tokenize").json()["tokens"]
    return tokens


def chat(server: Server, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    answer = server.post({"messages": messages, "max_tokens": 24, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def complete(server: Server, prompt: list[int] | list[list[int]], **fields: Any) -> dict[str, Any]:
    answer = server.post({"prompt": prompt, "max_tokens": 1, **fields}, "/v1/completions")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def num_cached(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 2000) for _ in range(num_tokens)]


def flood(server: Server, seed: int) -> None:
    """Sends more other prompts than there are checkpoints."""
    complete(server, [prompt(PAGE + 1, 1000 * seed + number) for number in range(72)])


def metric(server: Server, name: str) -> float:
    (value,) = re.findall(
        rf"^{re.escape(name)} (\S+)$", server.http.get(f"{server.url}/metrics").text, re.M
    )
    return float(value)


def sessions(server: Server) -> dict[str, dict[str, Any]]:
    listed = server.http.get(f"{server.url}/v1/sessions").json()
    assert listed["object"] == "list"
    return {session["id"]: session for session in listed["data"]}


def test_the_first_chat_finds_the_system_prompt_of_the_operator(server: Server) -> None:
    """Runs first: only the start of the server has computed it."""
    mine, theirs = [user("Hello!")], [{"role": "system", "content": SYSTEM.strip()}, user("Hello!")]
    assert tokens_of(server, mine) == tokens_of(server, theirs)
    parts_at = next(
        i
        for i, (one, other) in enumerate(
            zip(tokens_of(server, mine), tokens_of(server, [user("Why?")]))
        )
        if one != other
    )
    assert num_cached(chat(server, mine)) == parts_at // PAGE * PAGE > 3 * PAGE
    assert (
        num_cached(chat(server, [{"role": "system", "content": "Be terse."}, user("Hello!")])) == 0
    )


def test_a_conversation_hits_up_to_its_last_turn_and_answers_as_without_a_cache(
    server: Server, cold: Server
) -> None:
    messages, before = [user("Tell me about the bank of a river.")], 0
    answers = []
    for question in ("And of a lake?", "What is 2 + 3?", "Who are you?"):
        answer = chat(server, messages)
        assert num_cached(answer) >= before // PAGE * PAGE
        start_id = tokens_of(server, messages)[
            0
        ]  # of every turn; the model answers in the last one
        before = (
            len(tokens_of(server, messages)) - 1 - tokens_of(server, messages)[::-1].index(start_id)
        )
        answers.append(text_of(answer))
        messages += [{"role": "assistant", "content": text_of(answer)}, user(question)]
    system = {"role": "system", "content": SYSTEM.strip()}
    for turn, expected in enumerate(answers):
        answer = chat(cold, [system, *messages[: 2 * turn + 1]])
        assert (text_of(answer), num_cached(answer)) == (expected, 0)
    assert metric(cold, 'penstock_prefix_lookups_total{replica="0",outcome="miss_disabled"}') >= 3


def test_a_prompt_that_goes_on_after_a_reply_finds_the_reply_and_its_exact_state(
    server: Server, cold: Server
) -> None:
    first = prompt(3 * PAGE + 5, seed=1)
    complete(server, first, max_tokens=30, ignore_eos=True, logit_bias={"400": 100})
    hits = metric(server, 'penstock_prefix_lookups_total{replica="0",outcome="hit"}')
    reused = metric(server, 'penstock_prefix_tokens_reused_total{replica="0"}')
    going_on = {
        "prompt": [*first, *[400] * 30, 500],
        "max_tokens": 12,
        "ignore_eos": True,
        "logprobs": 0,
    }
    answer, expected = (complete(one, **going_on) for one in (server, cold))
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    logprobs, others = (
        one["choices"][0]["logprobs"]["token_logprobs"] for one in (answer, expected)
    )
    assert logprobs == pytest.approx(others, abs=1e-3)
    assert (
        num_cached(answer) == (len(first) + 29) // PAGE * PAGE == 80
    )  # the last of 30 was never computed
    assert metric(server, 'penstock_prefix_lookups_total{replica="0",outcome="hit"}') == hits + 1
    assert metric(server, 'penstock_prefix_tokens_reused_total{replica="0"}') == reused + 80


def document(seed: int, num_words: int = 600) -> str:
    words = ("river", "bank", "delta", "weir", "flood", "tide", "ford", "bridge", "mouth", "source")
    return " ".join(random.Random(seed).choices(words, k=num_words))


def as_chat(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [user(text)]}


def as_raw_prompt(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text}


@pytest.mark.parametrize(("ask", "n"), [(as_chat, 1), (as_chat, 2), (as_raw_prompt, 1)])
def test_the_third_question_about_a_document_reuses_it(server: Server, ask: Any, n: int) -> None:
    """One message with a document and a question, as people send it: no message starts between
    them.
    """
    text = f"{ask.__name__} {n} {document(seed=n)}"
    about = server.post({"prompt": text}, "/tokenize").json()["count"]
    reused = []
    for question in ("Where?", "Who was it?", "And why?", "Say it in one word."):
        path, body = ask(f"{text}\n\n{question}")
        answer = server.post({**body, "max_tokens": 2, "n": n}, path)
        assert answer.status_code == 200, answer.text
        reused.append(num_cached(answer.json()))
    assert about > 512
    assert min(reused[2:]) >= 0.95 * (about // PAGE * PAGE)


def test_questions_about_a_document_that_come_at_once_as_token_ids_reuse_it(server: Server) -> None:
    shared = prompt(600, seed=7)
    questions = [[*shared, *prompt(20, seed=70 + number)] for number in range(4)]
    answer = complete(server, questions)
    assert num_cached(answer) >= 3 * (600 // PAGE * PAGE)
    assert num_cached(complete(server, [*shared, *prompt(20, seed=80)])) >= 600 // PAGE * PAGE


def test_health_says_how_many_tokens_were_reused_and_why_others_were_not(server: Server) -> None:
    before = server.stats()["prefix"]
    complete(server, prompt(600, seed=9))
    complete(server, [*prompt(500, seed=9), *prompt(100, seed=10)])
    after = server.stats()["prefix"]
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed["missed_tokens_no_prefix"] == 592 + (592 - 496)
    assert changed["missed_tokens_no_checkpoint"] == 496
    assert changed["missed_tokens_partial_page"] == 8 + 8


def test_a_session_outlives_the_traffic_of_others(server: Server) -> None:
    kept, lost = prompt(3 * PAGE, seed=2), prompt(3 * PAGE, seed=3)
    header = {"x-session-id": "by header"}
    body = json.dumps(
        {"prompt": kept, "max_tokens": 20, "ignore_eos": True, "logit_bias": {"400": 100}}
    )
    assert (
        server.http.post(f"{server.url}/v1/completions", content=body, headers=header).status_code
        == 200
    )
    complete(server, lost, max_tokens=20, ignore_eos=True, logit_bias={"400": 100})
    flood(server, seed=1)
    assert num_cached(complete(server, [*kept, *[400] * 20], session_id="by header")) == 4 * PAGE
    assert num_cached(complete(server, [*lost, *[400] * 20])) == 0
    session = sessions(server)["by header"]
    assert (session["object"], session["tokens"], session["hits"]) == ("session", 3 * PAGE + 21, 1)
    assert session["bytes"] > 0
    assert session["age_seconds"] > session["idle_seconds"] >= 0
    server.http.delete(f"{server.url}/v1/sessions/by header")


def test_every_api_takes_the_header_and_sessions_are_shown_and_deleted(server: Server) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [user("Hi")], "max_tokens": 2},
        "/v1/completions": {"prompt": prompt(20, seed=5), "max_tokens": 2},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
        "/v1/messages": {"model": "any", "messages": [user("Hi")], "max_tokens": 2},
        "/invocations": {"messages": [user("Hi")], "max_tokens": 2},
    }
    for path, body in bodies.items():
        answer = server.http.post(
            f"{server.url}{path}", json=body, headers={"x-session-id": f"of {path}"}
        )
        assert answer.status_code == 200, answer.text
    with server.stream({"messages": [user("Hi")], "stream": True, "session_id": "stream"}):
        pass  # a client that disconnects
    expected = {f"of {path}" for path in bodies} | {"stream"}
    assert eventually(lambda: sessions(server).keys() == expected)
    assert metric(server, 'penstock_sessions{replica="0"}') == len(expected)
    for name in expected:
        url = f"{server.url}/v1/sessions/{name}"
        assert server.http.get(url).json()["id"] == name
        assert server.http.delete(url).json() == {"id": name, "object": "session", "deleted": True}
        assert_refused(server.http.get(url), 404, None)
        assert_refused(server.http.delete(url), 404, None)
    assert sessions(server) == {}
    assert eventually(server.is_idle)


def test_session_ids_are_checked(server: Server) -> None:
    body = {"messages": [user("Hi")], "max_tokens": 1}
    for wrong in ("", "x" * 257, 7):
        assert_refused(server.post({**body, "session_id": wrong}), 400, "session_id")
    too_long = {"x-session-id": "x" * 257}
    answer = server.http.post(f"{server.url}/v1/chat/completions", json=body, headers=too_long)
    assert_refused(answer, 400, "x-session-id")


def test_the_loop_guard_ends_a_reply_that_repeats_itself_and_says_so(
    server: Server, cold: Server
) -> None:
    forced = {"max_tokens": 300, "ignore_eos": True, "logit_bias": {"400": 100}}
    for guarding, fields in ((server, {"loop_guard": True}), (cold, {})):
        answer = complete(guarding, prompt(8, seed=6), **forced, **fields)
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "loop_guard")
        assert 192 <= answer["usage"]["completion_tokens"] < 300
        assert metric(guarding, "penstock_loops_total") == 1
        assert eventually(guarding.is_idle)


@pytest.mark.parametrize(
    "content", [None, b" \n", b"\xff\xfe"], ids=["missing", "empty", "not UTF-8"]
)
def test_a_system_prompt_that_cannot_be_used_is_refused_with_its_name(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "system.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"system prompt .* .*system\.txt"):
        read_system_prompt(str(file))


# Before a prompt is sent


def expected(server: Server, body: dict[str, Any]) -> int | None:
    answer = server.post({**body, "count_cached": True}, "/tokenize").json()
    assert answer["count"] == len(answer["tokens"])
    cached: int | None = answer["cached_tokens"]
    return cached


def test_the_cached_part_of_a_draft_is_reported_and_nothing_is_run_or_counted(
    server: Server,
) -> None:
    first = [user("Tell me of the weir that was built across the slow brown river. " * 4)]
    assert "cached_tokens" not in server.post({"messages": first}, "/tokenize").json()
    assert expected(server, {"messages": first}) == num_cached(chat(server, first))
    longer = [*first, {"role": "assistant", "content": "It leaks."}, user("Who mends it now?")]
    before = metric(server, 'penstock_prefix_lookups_total{replica="0",outcome="hit"}')
    promised = expected(server, {"messages": longer})
    assert metric(server, 'penstock_prefix_lookups_total{replica="0",outcome="hit"}') == before
    assert promised == num_cached(chat(server, longer)) > 4 * PAGE
    assert expected(server, {"prompt": "Nobody has asked this before. " * 9}) == 0


def test_a_server_without_a_prefix_cache_promises_nothing(cold: Server) -> None:
    messages = [user("Tell me of the weir that was built across the river. " * 4)]
    chat(cold, messages)
    assert expected(cold, {"messages": messages}) == 0
