"""Offline calls: one conversation or many, optional progress, nothing left after a failed call."""

from __future__ import annotations

import io
import re
import sys
import time
from typing import Any

import pytest

from penstock.errors import RequestError
from penstock.llm import LLM
from penstock.types import SamplingParams

SHORT = SamplingParams(max_tokens=4)


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


CONVERSATIONS = [ask("What is 2 + 3?"), ask("Tell me about rivers."), ask("Hello!")]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", memory_gb=0.05, max_model_len=512, deterministic=True)


class Steps:
    """Counts the steps of an engine; `seconds` makes each last a while."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
        self.count = 0
        step = llm.engine.step

        def counted() -> Any:
            self.count += 1
            time.sleep(seconds)
            return step()

        monkeypatch.setattr(llm.engine, "step", counted)


def test_a_list_of_conversations_gives_the_replies_that_each_has_alone(llm: LLM) -> None:
    alone = [llm.chat(messages, SHORT) for messages in CONVERSATIONS]
    together = llm.chat(CONVERSATIONS, SHORT)
    assert [reply.text for reply in together] == [reply.text for reply in alone]
    assert [reply.token_ids for reply in llm.chat(tuple(CONVERSATIONS), SHORT)] == [
        reply.token_ids for reply in alone
    ]
    assert llm.chat(CONVERSATIONS[:1], SHORT)[0].text == alone[0].text


def test_conversations_are_computed_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    steps = Steps(llm, monkeypatch)
    llm.chat(CONVERSATIONS[0], sampling)
    for_one, steps.count = steps.count, 0
    llm.chat(CONVERSATIONS, sampling)
    assert steps.count < 2 * for_one


def test_a_list_has_n_replies_to_each_conversation_and_one_conversation_has_one(llm: LLM) -> None:
    two = SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=1)
    replies = llm.chat(CONVERSATIONS[:2], two)
    assert [reply.num_prompt_tokens for reply in replies] == [
        len(llm.encode_chat(messages)) for messages in CONVERSATIONS[:2] for _ in range(2)
    ]
    with pytest.raises(RequestError, match=r"n is 2") as caught:
        llm.chat(CONVERSATIONS[0], two)
    assert "chat([messages], ...)" in caught.value.todo
    with pytest.raises(RequestError, match=r"n is 2"):
        next(llm.stream("Once", two))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("Hello", "messages is a str"),
        (ask("Hello")[0], "messages is a dict"),
        (["Hello"], r"messages\[0\] is a str"),
        ([ask("Hello"), "Hello"], r"messages\[1\] is a str"),
        ([ask("Hello"), ask("Hello")[0]], r"messages\[1\] is a dict"),
        ([], "no messages"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_place(
    llm: LLM, messages: Any, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        llm.chat(messages, SHORT)


def test_a_prompt_that_is_refused_leaves_none_of_the_others_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match="too long"):
        llm.generate(["Once upon a time", "word " * 3000], SHORT)
    with pytest.raises(RequestError, match="too long"):
        llm.chat([ask("Hello"), ask("word " * 3000)], SHORT)
    assert not llm.engine.has_work


def test_progress_is_shown_on_request_and_only_then(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    silent = llm.generate(["One", "Two"], SHORT)
    llm.chat(CONVERSATIONS, SHORT)
    assert log.getvalue() == ""
    shown = llm.generate(["One", "Two"], SHORT, progress=True)
    assert [reply.text for reply in shown] == [reply.text for reply in silent]
    num_tokens = sum(len(reply.token_ids) for reply in shown)
    line = rf"generate +\d+\.\d\d s  2 of 2 replies, {num_tokens} tokens, [\d,]+ tok/s\n"
    assert re.fullmatch(line, log.getvalue())
    log.truncate(0)
    llm.chat(CONVERSATIONS, SHORT, progress=True)
    assert "3 of 3 replies" in log.getvalue()


def test_a_terminal_shows_a_bar_that_moves_with_the_replies(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("penstock.llm.PROGRESS_INTERVAL_S", 0.0)
    Steps(llm, monkeypatch, seconds=0.03)  # a bar is drawn ten times a second
    llm.generate(["One"] * 3, SamplingParams(max_tokens=15, ignore_eos=True), progress=True)
    assert "0 of 3 replies" in terminal.getvalue()
    assert re.search(r"generate +\d+\.\d\d s  3 of 3 replies, 45 tokens", terminal.getvalue())
