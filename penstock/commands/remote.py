"""Chat with a running server over plain HTTP, with the standard library only.

Speaks the part of the OpenAI API a conversation needs: the model list and a streamed chat completion. Any
server of that API will do; nothing here is particular to ours.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import PenstockError

_TIMEOUT_S = 600.0


@dataclass(slots=True)
class RemoteModel:
    """A model behind a URL. `num_tokens` is the length of the last answer, as the server counted it."""

    base_url: str
    name: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            with self._open("GET", "/v1/models") as answer:
                self.name = json.load(answer)["data"][0]["id"]

    def stream(self, messages: list[dict[str, str]], thinking: bool | None) -> Generator[tuple[str, bool]]:
        """Pieces of the answer, each with whether it belongs to the reasoning."""
        body: dict[str, Any] = {"model": self.name, "messages": messages, **self.sampling}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        self.num_tokens = None
        with self._open("POST", "/v1/chat/completions", body) as answer:
            for chunk in _events(answer):
                if "error" in chunk:
                    raise _server_error(chunk, self.base_url)
                if chunk.get("usage"):
                    self.num_tokens = chunk["usage"]["completion_tokens"]
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", {})
                    if delta.get("reasoning_content"):
                        yield delta["reasoning_content"], True
                    if delta.get("content"):
                        yield delta["content"], False

    def _open(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        url = urlsplit(self.base_url if "//" in self.base_url else f"http://{self.base_url}")
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "127.0.0.1", url.port, timeout=_TIMEOUT_S)
        prefix = url.path.rstrip("/").removesuffix("/v1")
        # Closing the connection with the answer is what tells the server that we stopped listening.
        headers = {"Content-Type": "application/json", "Connection": "close"}
        try:
            connection.request(method, prefix + path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
        except OSError as error:
            raise PenstockError(
                f"Nothing answers at {self.base_url}",
                f"{error}.",
                "Start a server with `penstock serve`, or correct --base-url.",
            ) from None
        if answer.status != 200:
            raise _server_error(_json_or_text(answer.read()), self.base_url, answer.status)
        return answer


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        data = line.decode().strip().removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if data and line.startswith(b"data:"):
            yield json.loads(data)


def _json_or_text(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"error": {"message": body.decode(errors="replace")[:500]}}


def _server_error(chunk: dict[str, Any], url: str, status: int | None = None) -> PenstockError:
    error = chunk.get("error", chunk)
    message = str(error.get("message", error) if isinstance(error, dict) else error)
    what, _, rest = message.partition("\n")
    return PenstockError(
        what, rest.replace("\n", " "), f"So said {url}" + (f" (HTTP {status})." if status else ".")
    )
