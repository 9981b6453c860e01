"""A relay continues the stream of a lost server on another one: the client's bytes are those of an
uninterrupted stream, wherever it was cut.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from penstock.config import ServeConfig
from penstock.progress import OnPhase
from penstock.serve.fleet import Fleet
from penstock.serve.journal import (
    MARK_BEGIN,
    MARKS_HEADER,
    RELAY_HEADER,
    MarkedStream,
    current_journal,
    open_journal,
    without_said,
)
from penstock.serve.metrics import Metrics, TokenTimer
from penstock.serve.openai.replies import ChatReplyFormat
from penstock.serve.text_stream import Reply, TextStream, Thought
from penstock.text.dialects import DIALECTS, StreamParser
from penstock.text.tokenizer import Tokenizer
from penstock.types import Request, SamplingParams, TokenDelta
from serving import MESSAGES, Server, start_server
from test_fleet import FakeEngine, settle
from thinking_template import write_thinking_template
from two_layers import two_layers

KEY = "of-the-relay"
# Replies are bitwise equal on any engine only with fixed tiles and whole chunks. With drafts, the
# tokens per event depend on which of them were tried.
ENGINE = {"deterministic": True, "page_size": 64, "max_rows": 4, "speculate": "off"}
FREE = {"max_tokens": 24, "ignore_eos": True, "stream": True}
CHAT = {"messages": MESSAGES, **FREE}
USAGE = {"stream_options": {"include_usage": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/chat/completions", {**CHAT, **USAGE, "temperature": 0.0}),
    "drawn without a seed": ("/v1/chat/completions", {**CHAT, "temperature": 1.0}),
    "stop string": ("/v1/chat/completions", {**CHAT, "temperature": 0.0, "stop": ["e"]}),
    "thinking with a budget": (
        "/v1/chat/completions",
        {
            **CHAT,
            "seed": 3,
            "temperature": 1.0,
            "chat_template_kwargs": {"enable_thinking": True},
            "thinking_token_budget": 8,
        },
    ),
    "completion": ("/v1/completions", {**FREE, "prompt": "A river", "seed": 5, "temperature": 0.9}),
    "messages": (
        "/v1/messages",
        {"model": "any", "messages": MESSAGES, "max_tokens": 24, "stream": True, "temperature": 0},
    ),
    "ollama": (
        "/api/chat",
        {"model": "any", "messages": MESSAGES, "options": {"num_predict": 12, "temperature": 0}},
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = write_thinking_template(tmp_path_factory.mktemp("template"))
    serve = {"relay_key": KEY, "chat_template": str(template), "enable_thinking": False}
    with start_server(engine={**ENGINE, "model": two_layers()}, serve=serve) as server:
        yield server


def ask(server: Server, case: str, relay: str, said: bytes = b"") -> bytes:
    path, body = CASES[case]
    answer = server.http.post(
        server.url + path,
        content=said + json.dumps(body).encode(),
        headers={RELAY_HEADER: relay, "content-type": "application/json"},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers[MARKS_HEADER] == "1"
    return answer.content


def without_clocks(data: bytes) -> bytes:
    """Removes times, which Ollama's events contain."""
    lines = data.splitlines()
    if not lines[0].startswith(b"{"):
        return data
    clocks = {"created_at", "total_duration", "load_duration"}
    clocks |= {"prompt_eval_duration", "eval_duration"}
    events = [json.loads(line) for line in lines]
    kept = [{k: v for k, v in event.items() if k not in clocks} for event in events]
    return json.dumps(kept).encode()


@pytest.mark.parametrize("case", CASES)
def test_a_stream_goes_on_at_another_server_as_if_nothing_had_happened(
    server: Server, case: str
) -> None:
    sent = ask(server, case, KEY)
    whole = MarkedStream()
    expected = whole.take(sent) + whole.end()
    assert whole.may_resume
    num_marks = sent.count(MARK_BEGIN)
    assert num_marks > 4
    for number in {1, 2, num_marks // 2, num_marks}:
        cut = [place for place, byte in enumerate(sent) if byte == MARK_BEGIN[0]][number - 1]
        cut = sent.index(b"\n", cut) + 1 + 3  # and some of the following text, which is sent again
        stream = MarkedStream()
        seen = stream.take(sent[:cut])
        id, said = stream.resume()
        rest = ask(server, case, f"{KEY} {id} {len(said)}", said)
        seen += stream.take(rest) + stream.end()
        assert without_clocks(seen) == without_clocks(expected), number
        assert stream.said == whole.said  # so it may be lost again


def test_with_drafts_it_says_the_same_tokens_in_other_pieces() -> None:
    with start_server(engine={**ENGINE, "speculate": "mtp:3"}, serve={"relay_key": KEY}) as server:
        sent = ask(server, "greedy", KEY)
        whole = MarkedStream()
        expected = whole.take(sent) + whole.end()
        marks = [place for place, byte in enumerate(sent) if byte == MARK_BEGIN[0]]
        for cut in (marks[1], marks[len(marks) // 2]):
            stream = MarkedStream()
            seen = stream.take(sent[: sent.index(b"\n", cut) + 1])
            id, said = stream.resume()
            seen += stream.take(ask(server, "greedy", f"{KEY} {id} {len(said)}", said))
            assert text_of(seen + stream.end()) == text_of(expected) != ""
            assert [*chain(*stream.said.deltas)] == [*chain(*whole.said.deltas)]


def text_of(events: bytes) -> str:
    lines = [line.removeprefix(b"data: ") for line in events.splitlines() if line]
    found = [json.loads(line) for line in lines if line != b"[DONE]"]
    choices = [choice for event in found for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_only_a_relay_gets_marks_or_resumes(server: Server) -> None:
    path, body = CASES["greedy"]
    said = b'{"id":"' + b"a" * 32 + b'","deltas":[[5]]}'
    for relay in ("", "another", f"another {'a' * 32} {len(said)}"):
        answer = server.http.post(server.url + path, json=body, headers={RELAY_HEADER: relay})
        assert MARKS_HEADER not in answer.headers
        assert MARK_BEGIN not in answer.content
        assert b"a" * 32 not in answer.content


def test_streams_of_several_replies_cannot_be_resumed(server: Server) -> None:
    path, body = CASES["greedy"]
    answer = server.http.post(server.url + path, json={**body, "n": 2}, headers={RELAY_HEADER: KEY})
    stream = MarkedStream()
    stream.take(answer.content)
    assert not stream.may_resume
    assert stream.end().endswith(b"data: [DONE]\n\n")


PROMPT, END_ID, BUDGET = (1, 2, 3), 0, 4
# Thoughts and answers. White space around them makes no event, so several steps may precede one
# mark.
SCRIPTS = {
    "an answer without text": ("one two\n\n\n\n\n\n\n\n", "\n\n\n\n\n\n\n\n\n\n"),
    "an answer that begins late": ("one two\n\n\n\n\n\n\n\n", "\n\n\nforty two rivers\n"),
    "a thought that ends behind its budget": (" a b c d e", "forty two rivers"),
    "a thought that ends within its budget": ("one\n</think>\n\nforty two\n", ""),
    "no text at all": ("", ""),
}


class ScriptedEngine(FakeEngine):
    """Sends the scripted thought, and the scripted answer once thinking was closed: by another
    request or, if it `closes`, by itself.
    """

    def __init__(
        self, script: tuple[str, str], num_at_once: int, closes: bool, tokenizer: Tokenizer
    ) -> None:
        super().__init__()
        self._closes = closes
        self.closing_ids = tuple(tokenizer.encode("\n</think>\n\n"))
        self.end_id = tokenizer.id_of("</think>")
        self._thought, self._answer = (tokenizer.encode(text) for text in script)
        self._num_at_once = num_at_once

    def step(self, num_cached_tokens: int = 0) -> None:
        for id, (_, receiver, tokens) in list(self.rows.items()):
            said = tuple(tokens[len(PROMPT) :])
            closed = said[BUDGET : BUDGET + len(self.closing_ids)] == self.closing_ids
            before = BUDGET + len(self.closing_ids) if closed else 0
            script = [*(self._answer if closed else self._thought), END_ID]
            num_new = self._num_at_once
            may_close = self._closes and not closed and len(said) < BUDGET
            if may_close:
                num_new = min(num_new, BUDGET - len(said))
            new = tuple(script[len(said) - before :][:num_new])
            tokens += new
            finish: Any = "stop" if new[-1] == END_ID else None
            if finish:
                del self.rows[id]
            receiver.take(TokenDelta(id, new, finish=finish))
            is_spent = len(said) + len(new) == BUDGET and not finish
            if may_close and is_spent and self.end_id not in (*said, *new):
                tokens += self.closing_ids
                receiver.take(TokenDelta(id, self.closing_ids))


@functools.cache
def own_tokenizer() -> Tokenizer:
    return Tokenizer.load(None)


async def relayed(
    script: tuple[str, str], num_at_once: int, closes: bool, said: bytes = b""
) -> bytes:
    """The events and marks of a reply without HTTP; `said` was received from a lost server."""
    scope = {"request_id": "a" * 32, "is_relayed": True, "said_bytes": len(said)}
    open_journal(scope)
    without_said(scope, said)
    journal = current_journal()
    assert journal is not None
    tokenizer = own_tokenizer()
    engine = ScriptedEngine(script, num_at_once, closes, tokenizer)

    async def launch(on_phase: OnPhase) -> ScriptedEngine:
        return engine

    fleet = Fleet([launch], ServeConfig(), lambda _: None)  # type: ignore[list-item]
    await fleet.wait_ready()
    style = ChatReplyFormat("r", "m", include_usage=True)
    sent = bytearray()
    stream = TextStream(fleet, lambda delta: sent.extend(journal.marked(style.encode_chunk(delta))))
    reply = Reply(
        stream,
        Request(
            id="r",
            token_ids=PROMPT,
            sampling=SamplingParams(max_tokens=100),
            end_token_ids=(END_ID,),
        ),
        0,
        tokenizer,
        TokenTimer(Metrics(), len(PROMPT), 0.0),
        StreamParser(DIALECTS["qwen_xml"], [], in_thinking=True),
        thought=Thought(tokenizer.id_of("</think>"), BUDGET, engine.closing_ids),
    )
    stream.submit([[reply]])
    await settle()
    for _ in range(100):
        engine.step()
    await asyncio.wait_for(stream.wait_ended(), 5.0)
    assert fleet.num_outstanding == 0
    await fleet.close()
    return bytes(sent) + style.encode_end(stream.usage)


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("num_at_once", [1, 3])
@pytest.mark.parametrize("case", SCRIPTS)
def test_a_stream_that_is_cut_after_any_mark_has_the_events_of_an_uncut_one(
    case: str, num_at_once: int, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts, an engine sends several tokens at once: the same text in other events."""
    monkeypatch.setattr(time, "time", itertools.count(10**9).__next__)  # every call differs
    script = SCRIPTS[case]
    sent = asyncio.run(relayed(script, num_at_once, closes))
    whole = MarkedStream()
    expected = whole.take(sent) + whole.end()
    assert expected.count(b'"finish_reason":"stop"') == 1
    marks = [place for place, byte in enumerate(sent) if byte == MARK_BEGIN[0]]
    for mark in marks:
        stream = MarkedStream()
        seen = stream.take(sent[: sent.index(b"\n", mark) + 1])
        _, said = stream.resume()
        seen += stream.take(asyncio.run(relayed(script, num_at_once, closes, said))) + stream.end()
        if num_at_once == 1:
            assert seen == expected
            if not closes:  # a thought that is cut at its limit is closed by another request
                assert stream.said == whole.said
        else:
            assert text_of(seen) == text_of(expected)
            assert seen.count(b'"finish_reason":"stop"') == 1
            assert seen.splitlines()[-4:] == expected.splitlines()[-4:], "usage and the end"
            if not closes:
                assert [*chain(*stream.said.deltas)] == [*chain(*whole.said.deltas)]
