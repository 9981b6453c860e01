"""A server of the OpenAI API as someone to ask: one conversation in, one reply out, over plain HTTP.

Standard library only. Any server will do; what a server does not offer (a model list, metrics) is None.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import PenstockError
from penstock.eval.problems.conversation import Conversation, Message
from penstock.eval.problems.reply import Reply

MAX_REPLY_TOKENS = 512
TIMEOUT_S = 300.0

DRAFTED, ACCEPTED = "penstock_draft_tokens_total", "penstock_draft_tokens_accepted_total"


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """How many tokens a server has drafted with the model's MTP head, and how many of them were right."""

    num_drafted: float
    num_accepted: float

    def acceptance_since(self, earlier: DraftCounts) -> float | None:
        num_drafted = self.num_drafted - earlier.num_drafted
        return (self.num_accepted - earlier.num_accepted) / num_drafted if num_drafted > 0 else None


class Endpoint:
    """A server behind a URL. Safe to use from several threads: every call has its own connection."""

    def __init__(self, base_url: str, model: str = "") -> None:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        self.base_url = base_url
        self._is_secure = url.scheme == "https"
        self._host, self._port = url.hostname or "127.0.0.1", url.port
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self.model = model or self._first_model()

    def ask(self, conversation: Conversation) -> Reply:
        """The server's greedy last turn of the conversation."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_as_sent(message) for message in conversation.prompt],
            "temperature": 0,
            "max_tokens": MAX_REPLY_TOKENS,
            "chat_template_kwargs": {"enable_thinking": conversation.enable_thinking},
        }
        if conversation.tools:
            body["tools"] = conversation.tools
        answer = self._json("POST", "/v1/chat/completions", body)
        try:
            choice = answer["choices"][0]
            return Reply.from_message(
                choice["message"],
                choice.get("finish_reason") or "",
                is_thinking=conversation.enable_thinking,
                tools=conversation.tools,
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise PenstockError(
                f"{self.base_url} answered a chat completion without a message",
                f"{type(error).__name__}: {error}, in {json.dumps(answer)[:200]}.",
                "Point --base-url at a server of the OpenAI API.",
            ) from error

    def draft_counts(self) -> DraftCounts | None:
        """From the server's metrics; None where it has none or does not draft."""
        status, body = self._request("GET", "/metrics")
        if status != 200:
            return None
        totals: dict[str, float] = {}
        for line in body.decode(errors="replace").splitlines():
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name in (DRAFTED, ACCEPTED):
                totals[name] = totals.get(name, 0.0) + float(value)
        return DraftCounts(totals[DRAFTED], totals[ACCEPTED]) if len(totals) == 2 else None

    def _first_model(self) -> str:
        answer = self._json("GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise PenstockError(
                f"{self.base_url} lists no model",
                f"/v1/models answered {json.dumps(answer)[:200]}.",
                "Name the model with --model.",
            ) from error

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        status, answer = self._request(method, path, body)
        text = answer.decode(errors="replace")
        if status != 200:
            raise PenstockError(f"{method} {path} failed with HTTP {status}", text[:500])
        try:
            return json.loads(text)
        except ValueError as error:
            raise PenstockError(
                f"{method} {path} did not answer with JSON", f"{error}: {text[:200]!r}."
            ) from error

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            payload = json.dumps(body) if body is not None else None
            connection.request(method, self._prefix + path, payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise PenstockError(
                f"{self.base_url} does not answer",
                f"{type(error).__name__}: {error}.",
                "Start a server with `penstock serve`, or correct --base-url.",
            ) from error
        finally:
            connection.close()


def _as_sent(message: Message) -> Message:
    """On the wire, the arguments of a call are a string."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
