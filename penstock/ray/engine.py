"""A replica on Ray: one `penstock serve`, started, called and stopped by the actor around it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from penstock.commands.started_server import started_server
from penstock.ray.local_http import Headers, LocalAnswer
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
