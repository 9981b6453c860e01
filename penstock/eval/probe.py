"""One server under test: sends requests that may be wrong on purpose, and trusts no answer.

A check that fails raises `CheckFailed` with what was seen and what was expected; a server that
hangs up or answers nonsense fails the check too. The checks are in conformance.py.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError
from penstock.eval.recount import TokenCounter
from penstock.eval.stream_client import RawAnswer, Target, exchange
from penstock.http_client import HttpClient

MAX_SHOWN_CHARS = 120
QUESTION = (
    "Tom has 3 apples and buys 4 more. How many apples does he have now? Solve it step by step."
)
SUM = "What is 7 * 8? Reply with just the number."


class CheckFailed(Exception):
    """The server does not do what a check expects."""


class NotTested(Exception):
    """A check that cannot run here, and why."""


def expect(is_kept: bool, seen: Any, wanted: str) -> None:
    if not is_kept:
        raise CheckFailed(f"saw {show(seen)}; expected {wanted}")


def show(value: Any) -> str:
    """A value in a line of the report: short, and on one line."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole chat completion; each part is checked when it is read."""

    fields: dict[str, Any]

    @property
    def choice(self) -> dict[str, Any]:
        choices = field_of(self.fields, "choices", list)
        expect(len(choices) == 1, f"{len(choices)} choices", "1 in choices")
        expect(isinstance(choices[0], dict), choices[0], "an object in choices")
        first: dict[str, Any] = choices[0]
        return first

    @property
    def content(self) -> str:
        message = field_of(self.choice, "message", dict)
        text: str = field_of(message, "content", str)
        return text

    @property
    def thought(self) -> str:
        """The reasoning that a server separated, under either of its usual names, or empty."""
        message = field_of(self.choice, "message", dict)
        return str(message.get("reasoning_content") or message.get("reasoning") or "")

    @property
    def finish_reason(self) -> str:
        reason: str = field_of(self.choice, "finish_reason", str)
        return reason

    @property
    def usage(self) -> dict[str, int]:
        """The three standard counts, without any others."""
        usage = field_of(self.fields, "usage", dict)
        return {name: field_of(usage, name, int) for name in USAGE}


USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def field_of(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field that must exist and have this type; a boolean is not a number."""
    expect(name in fields, sorted(fields), f"the field {name}")
    value = fields[name]
    is_right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    expect(is_right, f"{name} = {show(value)}", f"{name} to be of type {kind.__name__}")
    return value


class Probe:
    """Sends requests to one server. Every request has its own connection and a time limit."""

    def __init__(
        self, base_url: str, model: str, *, timeout_s: float, counter: TokenCounter | None = None
    ) -> None:
        self.client = HttpClient(base_url, timeout_s=timeout_s)
        self._target = Target.of(base_url)
        self.model = model
        self.timeout_s = timeout_s
        self.counter = counter
        self.max_model_len: int | None = None  # set by the check of the model list

    def read(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """The status and the content of an answer."""
        try:
            return self.client.read(method, path, body)
        except PenstockError as error:
            raise CheckFailed(f"saw no answer to {method} {path}: {error.why}") from error

    def body(self, content: str, **fields: Any) -> bytes:
        """A greedy chat with one message; a field that is None is omitted."""
        messages = [{"role": "user", "content": content}]
        given = {
            "model": self.model,
            "messages": messages,
            "max_tokens": 48,
            "temperature": 0,
            **fields,
        }
        return json.dumps(
            {name: value for name, value in given.items() if value is not None}
        ).encode()

    def send(self, *bodies: bytes, timeout_s: float | None = None) -> list[RawAnswer]:
        """Sends all at once, whatever they contain. On a timeout, the client disconnects."""

        async def send_all() -> list[RawAnswer]:
            requests = [self._target.encode_request(body) for body in bodies]
            limit_s = timeout_s or self.timeout_s
            return await asyncio.gather(
                *(exchange(self._target, request, limit_s) for request in requests)
            )

        return asyncio.run(send_all())

    @functools.cached_property
    def greedy(self) -> Reply:
        """The reply that several checks compare with, requested once."""
        return self.ask(QUESTION)

    def ask(self, content: str, **fields: Any) -> Reply:
        (answer,) = self.send(self.body(content, **fields))
        return read_reply(answer)

    def stream(self, content: str, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed reply that ended correctly."""
        (answer,) = self.send(self.body(content, stream=True, **fields))
        return read_chunks(answer)


def read_reply(answer: RawAnswer) -> Reply:
    return Reply(_read_object(_body_of(answer)))


def read_chunks(answer: RawAnswer) -> list[dict[str, Any]]:
    lines = _body_of(answer).split(b"\n")
    events = [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
    expect(bool(events), show(b" ".join(lines)), "lines that begin with data:")
    expect(events[-1] == b"[DONE]", events[-1], "data: [DONE] at the end")
    chunks = [_read_object(event, "JSON in every event") for event in events[:-1]]
    for chunk in chunks:
        expect("error" not in chunk, chunk, "no error in the stream")
    return chunks


def read_refusal(answer: RawAnswer) -> tuple[int, str]:
    """The status of an answer to a faulty request and its message, which must be JSON."""
    expect(not answer.failure, answer.failure, "an answer")
    data = answer.body
    expect(400 <= answer.status < 500, f"HTTP {answer.status}: {show(data)}", "4xx")
    fields = _read_object(data, "a JSON error")
    error = fields.get("error", fields)
    message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    expect(bool(message), fields, "an error with a message")
    return answer.status, show(message)


def _read_object(data: bytes, wanted: str = "JSON") -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(data)
    except ValueError:
        raise CheckFailed(f"saw {show(data)}; expected {wanted}") from None
    expect(isinstance(fields, dict), fields, "a JSON object")
    return fields


def _body_of(answer: RawAnswer) -> bytes:
    data = answer.body
    if answer.status not in (0, 200):
        raise CheckFailed(f"saw HTTP {answer.status}: {show(data)}; expected 200")
    expect(not answer.failure, answer.failure, "a whole answer")
    expect(bool(answer.status), "no answer: the server hung up", "HTTP 200")
    return data
