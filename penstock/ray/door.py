"""Where HTTP enters: reads a request, lets the router choose an engine, and passes the reply on.

A request whose engine is lost before the first byte of its reply is asked again elsewhere. After
that, a client has part of a reply that no other engine could continue: its connection is closed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

log = logging.getLogger("ray.serve")

MAX_TRIES = 4
LOST = (RayActorError, RayServeException, ConnectionError)
ROUTED_CHARS = 65536  # of a prompt: what is behind them does not decide where it goes


class Door:
    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines.options(stream=True).answer

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        asked = (request.method, target, list(request.headers.items()), body, prompt_text(body))
        for tries_left in reversed(range(MAX_TRIES)):
            pieces = self._engines.remote(*asked)
            try:
                status, headers = await anext(pieces)
                # Errors of an engine that is about to end come before its first byte, too.
                first = await anext(pieces, b"")
            except Exception as error:
                if not is_lost(error) or not tries_left:
                    raise
                log.warning("an engine was lost before it replied; the request is sent again")
                continue
            names = dict(headers)
            return StreamingResponse(_rest(first, pieces), status, names)
        raise AssertionError("the last try returns or raises")


async def _rest(first: bytes, pieces: Any) -> AsyncIterator[bytes]:
    """A client that is gone cancels its request, and with it the engine's."""
    is_complete = False
    try:
        yield first
        async for piece in pieces:
            yield piece
        is_complete = True
    finally:
        if not is_complete:
            pieces.cancel()


def is_lost(error: Exception) -> bool:
    """Whether the engine, not the request, is at fault."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return isinstance(cause, (ConnectionError, OSError)) or "EngineDead" in type(cause).__name__
    return isinstance(error, LOST)


def prompt_text(body: bytes) -> str:
    """What a prompt begins with, in any of the APIs: prompts that share it share a prefix."""
    try:
        fields = json.loads(body) if body else {}
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    names = ("tools", "system", "instructions", "messages", "prompt", "input", "inputs")
    parts = [fields[name] for name in names if name in fields]
    return json.dumps(parts, ensure_ascii=False)[:ROUTED_CHARS] if parts else ""
