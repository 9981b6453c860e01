"""A replica on Ray: one `penstock serve`, started, called and stopped by the actor around it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools

from penstock.commands.started_server import started_server
from penstock.errors import EngineDeadError
from penstock.ray.settings import RaySettings
from penstock.serve.journal import RELAY_HEADER

CHARS_PER_TOKEN = 4  # of a waiting prompt: scaling depends on tokens, not on requests
HEALTH_TIMEOUT_S = 20.0


class Engine:
    def __init__(self, settings: RaySettings) -> None:
        """Returns when the model is loaded: until then, Ray sends no requests."""
        self._batch_s = settings.batch_ms / 1e3
        self._queued_tokens = 0
        self._life = contextlib.ExitStack()
        self._key = secrets.token_hex(16)
        # If Ray kills an actor, or a node with all of its actors, no process is left behind.
        server = self._life.enter_context(
            started_server(
                settings.words,
                lambda _: None,
                dies_with_us=True,
                variables={"PENSTOCK_RELAY_KEY": self._key},
            )
        )
        address = urlsplit(server.url)
        assert address.hostname is not None
        assert address.port is not None
        self._host, self._port = address.hostname, address.port

    async def answer(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        text: str,
        resumed: tuple[str, bytes] | None = None,
    ) -> AsyncIterator[tuple[int, Headers, bytes] | bytes]:
        """The head with the first piece of the body, since each message costs Ray some time, then
        the other pieces. `text` is the prompt's text, for the router; `resumed` is a reply of a
        lost engine: its id, and its tokens so far.
        """
        num_tokens = len(text) // CHARS_PER_TOKEN
        self._queued_tokens += num_tokens
        answer = LocalAnswer(self._host, self._port, self._batch_s)
        try:
            headers = [(name, value) for name, value in headers if name != RELAY_HEADER]
            if resumed is None:
                headers.append((RELAY_HEADER, self._key))
            else:
                reply_id, said = resumed
                headers.append((RELAY_HEADER, f"{self._key} {reply_id} {len(said)}"))
                body = said + body
            status, named = await answer.open(method, target, headers, body)
            pieces = answer.pieces()
            first = await anext(pieces, b"")
            self._queued_tokens -= num_tokens
            num_tokens = 0
            yield status, named, first
            async for piece in pieces:
                yield piece
        finally:
            self._queued_tokens -= num_tokens
            answer.close()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"queued_tokens": float(self._queued_tokens)}

    async def check_health(self) -> None:
        """The server replaces its own engine; a server that does not answer is replaced by Ray."""
        answer = LocalAnswer(self._host, self._port, 0.0)
        try:
            await asyncio.wait_for(answer.open("GET", "/health", [], b""), HEALTH_TIMEOUT_S)
        finally:
            answer.close()

    def __del__(self) -> None:
        """Ray has waited for the running requests."""
        self._life.close()


Headers = list[tuple[str, str]]
READ_BYTES = 65536
# They belong to one connection, or are set here.
OWN_HEADERS = {"connection", "content-length", "host", "transfer-encoding", "keep-alive"}


class _Parts:
    """What the parser of an answer has found."""

    def __init__(self) -> None:
        self.headers: Headers = []
        self.body: list[bytes] = []
        self.has_head = self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True


class LocalAnswer:
    """One request to a server on this machine: its head, then its body in pieces as they arrive."""

    def __init__(self, host: str, port: int, batch_s: float) -> None:
        self._host, self._port, self._batch_s = host, port, batch_s
        self._parts = _Parts()
        self._parser: Any = httptools.HttpResponseParser(self._parts)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def open(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> tuple[int, Headers]:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        kept = [(name, value) for name, value in headers if name.lower() not in OWN_HEADERS]
        kept += [("host", f"{self._host}:{self._port}"), ("connection", "close")]
        if body or method in ("POST", "PUT", "PATCH"):
            kept.append(("content-length", str(len(body))))
        head = "".join(f"{name}: {value}\r\n" for name, value in kept)
        self._writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
        while not self._parts.has_head:
            await self._read()
        if method == "HEAD":  # its length is that of a body that is not sent
            self._parts.is_complete = True
        named = [one for one in self._parts.headers if one[0] not in OWN_HEADERS]
        return self._parser.get_status_code(), named

    async def pieces(self) -> AsyncIterator[bytes]:
        """The first bytes at once; then what has arrived within `batch_s`, together."""
        loop, sent_s = asyncio.get_running_loop(), -1e9
        while True:
            if self._parts.body:
                wait_s = sent_s + self._batch_s - loop.time()
                while wait_s > 0 and not self._parts.is_complete:
                    try:
                        await asyncio.wait_for(self._read(), wait_s)
                    except TimeoutError:
                        break
                    wait_s = sent_s + self._batch_s - loop.time()
                piece = b"".join(self._parts.body)
                self._parts.body.clear()
                sent_s = loop.time()
                yield piece
            elif self._parts.is_complete:
                return
            else:
                await self._read()

    async def _read(self) -> None:
        data = await self._reader.read(READ_BYTES)
        if data:
            self._parser.feed_data(data)
        elif not self._parts.is_complete:
            raise EngineDeadError("The server of this engine closed the connection")

    def close(self) -> None:
        """A server whose client is gone ends the request."""
        if self._writer is not None:
            self._writer.close()
