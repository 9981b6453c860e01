"""A client for servers of the OpenAI API over plain HTTP, with the standard library only.

Owns connections, JSON bodies, event streams, and the errors when a server does not answer or
answers with an error. Works with any server of that API and knows nothing about the requests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from penstock.errors import ConfigError, PenstockError

MAX_TIMEOUT_S = 1e6  # sockets refuse larger numbers, and infinite ones


def key_header() -> dict[str, str]:
    """The API key for a server: the first of PENSTOCK_API_KEY, which also sets a server's own
    keys.
    """
    key = os.environ.get("PENSTOCK_API_KEY", "").split(",")[0].strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def read_address(base_url: str) -> SplitResult:
    """A server's address, which may omit http://."""
    try:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        _ = url.port  # is parsed only now
        if url.scheme not in ("http", "https"):
            raise ValueError(f"It begins with {url.scheme}://; http:// or https:// is expected")
    except ValueError as error:
        raise ConfigError(
            f"{base_url} is not the address of a server",
            f"{error}.",
            "Use an address such as http://127.0.0.1:8000.",
        ) from error
    return url


@contextlib.contextmanager
def lost_connection_is_said(base_url: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise PenstockError(
            f"{base_url} does not answer to https",
            f"{error}.",
            "Use http:// for a server without TLS, such as `penstock serve`.",
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise PenstockError(
            f"Nothing answers at {base_url}",
            f"{str(error) or type(error).__name__}.",
            "Start a server with `penstock serve`, or correct --base-url.",
        ) from error


def message_in(body: bytes) -> str:
    """A server's own message, from the API's error body or from whatever it sent."""
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        return body.decode(errors="replace")[:500]
    error = parsed.get("error", parsed)
    return str(error.get("message", error) if isinstance(error, dict) else error)


class HttpClient:
    """A server behind a URL. Safe to use from several threads: every call has its own
    connection.
    """

    def __init__(self, base_url: str, *, timeout_s: float) -> None:
        url = read_address(base_url)
        self.base_url = base_url
        self._kind = (
            http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        )
        self._host, self._port = url.hostname or "127.0.0.1", url.port
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = min(timeout_s, MAX_TIMEOUT_S)

    def read(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None
    ) -> tuple[int, bytes]:
        """The status, whatever it is, and the whole answer. A body of bytes is already JSON."""
        with lost_connection_is_said(self.base_url), self._open(method, path, body) as answer:
            return answer.status, answer.read()

    def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer, if the server reports no error."""
        status, answer = self.read(method, path, body)
        if status != 200:
            raise self._objection(answer, status)
        try:
            return json.loads(answer)
        except ValueError as error:
            raise PenstockError(
                f"{method} {path} did not answer with JSON",
                f"{error}: {answer[:200].decode(errors='replace')!r}.",
                "Point --base-url at a server of the OpenAI API.",
            ) from error

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed answer. Closing the iterator closes the connection."""
        with lost_connection_is_said(self.base_url), self._open("POST", path, body) as answer:
            if answer.status != 200:
                raise self._objection(answer.read(), answer.status)
            for line in answer:
                data = line.decode().strip().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if not data or not line.startswith(b"data:"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise self._objection(data.encode())
                yield event
        raise PenstockError(
            f"{self.base_url} closed the connection in the middle of its answer",
            "The stream ended without [DONE].",
        )

    def watch(self, path: str) -> Generator[dict[str, Any], None, None]:
        """The events of a stream that goes on until the server ends or the iterator is closed."""
        with lost_connection_is_said(self.base_url), self._open("GET", path, None) as answer:
            if answer.status != 200:
                raise self._objection(answer.read(), answer.status)
            yield from (json.loads(line[5:]) for line in answer if line.startswith(b"data:"))

    def models(self) -> list[dict[str, Any]]:
        """The server's list of models; empty if the list has another format."""
        answer = self.json("GET", "/v1/models")
        cards = answer.get("data") if isinstance(answer, dict) else None
        return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []

    def first_model(self) -> str:
        cards = self.models()
        if not cards or "id" not in cards[0]:
            raise PenstockError(
                f"{self.base_url} lists no model",
                f"/v1/models has {json.dumps(cards)[:200]} as data; a model with an id was "
                "expected.",
                "Set the model with --model.",
            )
        return str(cards[0]["id"])

    def metric(self, name: str) -> float | None:
        """The sum of a metric over its labels, if /metrics has it."""
        status, answer = self.read("GET", "/metrics")
        lines = answer.decode(errors="replace").splitlines() if status == 200 else []
        found = [
            line.rpartition(" ")[2] for line in lines if line.startswith((f"{name}{{", f"{name} "))
        ]
        return sum(map(float, found)) if found else None

    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None
    ) -> http.client.HTTPResponse:
        connection = self._kind(self._host, self._port, timeout=self._timeout_s)
        # With this header the connection belongs to the answer, and closes with it.
        headers = {"Content-Type": "application/json", "Connection": "close", **key_header()}
        try:
            data = body if isinstance(body, bytes) else json.dumps(body) if body else None
            connection.request(method, self._prefix + path, data, headers)
            return connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _objection(self, answer: bytes, status: int | None = None) -> PenstockError:
        """The error that the server reported, in its own words."""
        what, _, rest = message_in(answer).partition("\n")
        said_by = f"{self.base_url} reported this error" + (f" (HTTP {status})." if status else ".")
        if status == 401:
            said_by += " Set PENSTOCK_API_KEY to a key of that server."
        return PenstockError(what, rest.replace("\n", " "), said_by)
