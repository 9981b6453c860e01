"""The gates: a perfect server gets full marks in any mode, and each flaw fails its own gate."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.errors import PenstockError
from penstock.eval import held_out
from penstock.eval.conversation import Conversation
from penstock.eval.gates import GATES, REPORTED, THRESHOLDS, run_gates, score
from penstock.eval.reply import Reply
from penstock.progress import Phase

LIMIT = 12
Answer = tuple[int, dict[str, Any]]


@dataclass
class Served:
    """A server of the OpenAI API that knows the answers, and spoils them as configured."""

    answer: Callable[[Conversation], Answer]
    metrics: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def reply(self, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, b'{"object": "list", "data": [{"id": "tiny", "object": "model"}]}'
        if path == "/metrics":
            return (200, self.metrics.encode()) if self.metrics is not None else (404, b"none")
        assert body is not None
        self.bodies.append(body)
        key = _key(body["messages"], body["chat_template_kwargs"]["enable_thinking"])
        status, answer = self.answer(asked_problems()[key])
        return status, json.dumps(answer).encode()


@cache
def asked_problems() -> dict[str, Conversation]:
    """The requests of all gates with the default seed, by what the server receives."""
    measured = (*GATES, *REPORTED)
    problems = [problem for gate in measured for problem in held_out.take(gate, LIMIT, seed=0)]
    return {_key(problem.prompt, problem.enable_thinking): problem for problem in problems}


def _key(messages: Any, thinking: bool) -> str:
    plain = json.loads(json.dumps(messages))
    for message in plain:
        for call in message.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return json.dumps([plain, thinking])


class PatientServer(ThreadingHTTPServer):
    request_queue_size = (
        128  # a gate sends all at once: a connection that is not accepted retries after a second
    )


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    servers: list[PatientServer] = []

    def start(answer: Callable[[Conversation], Answer], metrics: str | None = None) -> Served:
        served = Served(answer, metrics)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(*served.reply(self.path, None))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*served.reply(self.path, body))

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        server = PatientServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        served.url = f"http://127.0.0.1:{server.server_port}"
        return served

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def choice(message: dict[str, Any], finish_reason: str = "stop") -> Answer:
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}


def split_answer(conversation: Conversation) -> Answer:
    """Answers like a server with reasoning and tool parsers."""
    turn = dict(conversation.messages[-1])
    if "tool_calls" in turn:
        turn["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in turn["tool_calls"]
        ]
        return choice(turn, "tool_calls")
    return choice(turn)


def raw_answer(conversation: Conversation) -> Answer:
    """Answers like a server without parsers: all text is content."""
    return choice(
        {"role": "assistant", "content": conversation.completion.removesuffix("<|im_end|>")}
    )


def run_main(
    capsys: pytest.CaptureFixture[str], url: str, *words: str
) -> tuple[int, dict[str, Any], str]:
    code = main(["eval", "gates", "--base-url", url, "--limit", str(LIMIT), *words])
    printed = capsys.readouterr()
    return code, json.loads(printed.out.strip().splitlines()[-1]), printed.out


@pytest.mark.parametrize("answer", [split_answer, raw_answer])
def test_a_perfect_server_gets_full_marks(
    answer: Callable[[Conversation], Answer],
    serve: Callable[..., Served],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    served = serve(answer)
    code, line, table = run_main(capsys, served.url, "--json", str(tmp_path / "gates.json"))
    assert code == 0
    assert line["passed"] is True
    assert line["model"] == "tiny"
    measured = line["gates"]
    assert measured == {**dict.fromkeys(THRESHOLDS, 1.0), "mtp_acceptance": None}
    assert line["details"]["mtp_acceptance"]["passed"] is None
    assert line["reported"]["refusals"] == 1.0
    assert json.loads((tmp_path / "gates.json").read_text()) == line
    assert all(name in table for name in THRESHOLDS)
    assert all(body["temperature"] == 0 and body["model"] == "tiny" for body in served.bodies)
    assert any("tools" in body for body in served.bodies)


def spoiled(kind: str, spoil: Callable[[str], str]) -> Callable[[Conversation], Answer]:
    def answer(conversation: Conversation) -> Answer:
        text = conversation.completion.removesuffix("<|im_end|>")
        return choice({"content": spoil(text) if conversation.kind == kind else text})

    return answer


@pytest.mark.parametrize(
    ("gate", "spoil"),
    [
        ("word_problems", lambda text: text + "1"),
        ("word_problems", lambda text: text.replace("####", "Answer:")),
        ("spot_checks", lambda text: text + " apples"),
        (
            "tool_calls",
            lambda text: text.replace("</function>", "<parameter=x>\n1\n</parameter>\n</function>"),
        ),
        ("tool_calls", lambda text: text.replace("<tool_call>\n", "")),
        ("recall", lambda text: text.rpartition(" is ")[0] + " is unknown."),
    ],
)
def test_a_wrong_answer_costs_the_gate_of_its_kind_and_no_other(
    gate: str,
    spoil: Callable[[str], str],
    serve: Callable[..., Served],
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, line, _ = run_main(capsys, serve(spoiled(gate, spoil)).url)
    assert code == 1
    missed = {name for name, result in line["details"].items() if result.get("passed") is False}
    assert missed == {gate}


def test_what_is_only_reported_closes_no_gate(
    serve: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    def call_what_is_missing(text: str) -> str:
        thought, end, _ = text.rpartition("</think>")
        return f"{thought}{end}<tool_call>\n<function=missing>\n</function>\n</tool_call>"

    code, line, table = run_main(capsys, serve(spoiled("refusals", call_what_is_missing)).url)
    assert code == 0
    assert line["passed"] is True
    assert all(gate.get("passed") is not False for gate in line["details"].values())
    assert line["reported"] == {"refusals": 0.0}
    assert line["details"]["refusals"]["asked"] == LIMIT // 2
    (row,) = [row for row in table.splitlines() if row.startswith("refusals")]
    assert row.split()[1:] == [f"0/{LIMIT // 2}", "0.0%", "-", "reported,", "not", "gated"]


def test_every_gate_has_a_threshold_and_what_is_reported_has_none() -> None:
    assert [*GATES, "mtp_acceptance"] == list(THRESHOLDS)
    assert REPORTED == ("refusals",)
    assert not THRESHOLDS.keys() & REPORTED


def test_the_gate_of_tool_calls_asks_for_no_refusal() -> None:
    kinds = {gate: {problem.kind for problem in held_out.take(gate, 200, seed=0)} for gate in GATES}
    assert kinds["tool_calls"] == {"tool_calls"}
    assert "refusals" in kinds["thinking_closed"]
    (measure,) = REPORTED
    assert {problem.kind for problem in held_out.take(measure, 200, seed=0)} == {"refusals"}


@pytest.mark.parametrize(
    "answer",
    [
        lambda c: choice({"content": c.completion.replace("</think>", "")}),
        lambda c: choice({"content": "</think>" + c.completion}),
        lambda c: choice({"content": c.completion}, "length"),
    ],
)
def test_a_thought_must_end_once_and_the_turn_by_itself(
    answer: Callable[[Conversation], Answer],
    serve: Callable[..., Served],
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, line, _ = run_main(capsys, serve(answer).url)
    assert code == 1
    assert line["gates"]["thinking_closed"] == 0.0


def test_a_request_without_a_reply_counts_as_wrong_and_is_reported(
    serve: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(conversation: Conversation) -> Answer:
        return (
            (500, {"error": "out of memory"})
            if conversation.kind == "recall"
            else split_answer(conversation)
        )

    code, line, table = run_main(capsys, serve(answer).url)
    assert code == 1
    assert line["details"]["recall"] == {
        "share": 0.0, "threshold": 0.95, "passed": False, "right": 0, "asked": LIMIT, "errors": LIMIT
    }  # fmt: skip
    assert f"{LIMIT} without a reply" in table


def test_arguments_of_the_wrong_type_are_wrong(
    serve: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(conversation: Conversation) -> Answer:
        status, body = split_answer(conversation)
        for call in body["choices"][0]["message"].get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(
                {name: str(value) for name, value in arguments.items()}
            )
        return status, body

    _, line, _ = run_main(capsys, serve(answer).url)
    assert line["gates"]["tool_calls"] < 1.0
    assert line["gates"]["thinking_closed"] == 1.0


@pytest.mark.parametrize(("accepted", "code"), [(80, 0), (60, 1)])
def test_mtp_acceptance_is_what_the_counters_gained(
    accepted: int, code: int, serve: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    def counters(drafted: int, right: int) -> str:
        return (
            "# HELP penstock_draft_tokens_total drafts\n"
            f'penstock_draft_tokens_total{{engine="0"}} {drafted}\n'
            f'penstock_draft_tokens_accepted_total{{engine="0"}} {right}.0\n'
        )

    served = serve(split_answer, counters(1000, 10))
    counted = served.answer

    def answer(conversation: Conversation) -> Answer:
        served.metrics = counters(1100, 10 + accepted)
        return counted(conversation)

    served.answer = answer
    result, line, _ = run_main(capsys, served.url)
    assert line["gates"]["mtp_acceptance"] == accepted / 100
    assert result == code


def test_mtp_acceptance_can_come_from_a_file(
    serve: Callable[..., Served], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mtp.json"
    file.write_text('{"mtp_acceptance": 0.69}')
    code, line, _ = run_main(capsys, serve(split_answer).url, "--mtp", str(file))
    assert (code, line["gates"]["mtp_acceptance"]) == (1, 0.69)
    file.write_text("{}")
    assert main(["eval", "gates", "--base-url", serve(split_answer).url, "--mtp", str(file)]) == 1
    assert "mtp_acceptance" in capsys.readouterr().err


def test_wrong_replies_are_shown_on_request(
    serve: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(spoiled("spot_checks", lambda text: "</think>banana"))
    _, _, printed = run_main(capsys, served.url, "--show", "2")
    assert printed.count("'banana [stop]'") == 2


def test_a_missing_server_is_an_error_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "gates", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "penstock serve" in capsys.readouterr().err


def test_each_gate_says_how_many_were_asked_and_the_result_is_written(
    serve: Callable[..., Served], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "new" / "gates.json"
    assert (
        main(
            [
                "eval",
                "gates",
                "--base-url",
                serve(split_answer).url,
                "--limit",
                "4",
                "--output",
                str(file),
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    for gate in (*GATES, *REPORTED):
        num_asked = 4 if gate in GATES else 2
        assert re.search(
            rf"^{gate} +[\d.]+ s  {num_asked} of {num_asked} asked$", said.err, re.MULTILINE
        )
    assert file.read_text() == said.out.splitlines()[-1] + "\n"
    assert json.loads(file.read_text()).keys() >= {"gates", "time", "commit", "version"}


def test_every_reply_of_a_gate_is_reported() -> None:
    told: list[Phase] = []
    run_gates(
        lambda problem: problem.completion,
        num_problems=3,
        bars=lambda: contextlib.nullcontext(told.append),
    )
    fractions = [phase.fraction for phase in told if phase.name == "recall"]
    assert fractions == [None, *(pytest.approx(share / 3) for share in (1, 2, 3)), 1.0]


def test_the_same_gates_run_in_process() -> None:
    def ask(conversation: Conversation) -> str:
        return conversation.completion

    results = run_gates(ask, num_problems=8, seed=4, mtp_acceptance=0.8)
    assert [result.share for result in results] == [1.0] * len(GATES) + [0.8]
    assert not any(result.is_missed for result in results)

    def fail(conversation: Conversation) -> Reply:
        raise PenstockError("no")

    assert all(result.num_errors == 2 for result in run_gates(fail, num_problems=2)[:-1])


def test_batches_of_replies_are_scored_like_single_ones() -> None:
    gate = GATES[0]
    problems = held_out.take(gate, 10, seed=1)
    replies: list[Reply | str | None] = [problem.completion for problem in problems]
    replies[3:5] = ["#### 1000", None]
    result = score(gate, problems, replies)
    assert (result.num_right, result.num_errors, len(result.failures)) == (8, 1, 1)


def test_problems_depend_on_the_seed_and_on_nothing_else() -> None:
    for gate in (*GATES, *REPORTED):
        assert held_out.take(gate, 5, seed=1) == held_out.take(gate, 5, seed=1)
        assert held_out.take(gate, 5, seed=1) != held_out.take(gate, 5, seed=2)
