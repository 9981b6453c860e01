"""The HTTP ingress: reads a request, lets the router choose an engine, and forwards the reply.

A request whose engine is lost before the first byte of its reply is sent to another. A running
stream continues: another engine gets the request with the tokens so far, and continues after them
(`penstock.serve.journal`). Only replies that cannot be resumed end with their engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.serve.journal import MARKS_HEADER, MarkedStream

log = logging.getLogger("ray.serve")

MAX_TRIES = 4
PAUSE_S = 0.5  # before a retry, and longer before the next: Ray needs time to detect a loss
LOST = (RayActorError, RayServeException, ConnectionError)
ROUTED_CHARS = 65536  # of a prompt: later text does not affect routing


class Door:
    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines.options(stream=True).answer

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        asked = (request.method, target, list(request.headers.items()), body, prompt_text(body))
        status, headers, first, pieces = await self._ask(asked, None)
        names = dict(headers)
        is_marked = names.pop(MARKS_HEADER, None) is not None
        rest = self._resumed(asked, first, pieces) if is_marked else _rest(first, pieces)
        return StreamingResponse(rest, status, names)

    async def _ask(self, asked: Any, resumed: Any) -> tuple[int, Any, bytes, Any]:
        """The head of a response, its first piece, and the others."""
        for tries in range(1, MAX_TRIES + 1):
            pieces = self._engines.remote(*asked, resumed)
            try:
                # Errors of an engine that is about to end come before its first byte, too.
                status, headers, first = await anext(pieces)
                return status, headers, first, pieces
            except Exception as error:
                if not is_lost(error) or tries == MAX_TRIES:
                    raise
                log.warning("an engine was lost before it replied; the request is sent again")
                await asyncio.sleep(PAUSE_S * (tries - 1))
        raise AssertionError("the last try returns or raises")

    async def _resumed(self, asked: Any, first: bytes, pieces: Any) -> AsyncIterator[bytes]:
        """The events of a reply, without marks, from as many engines as needed."""
        stream = MarkedStream()
        for tries in range(1, MAX_TRIES + 1):
            rest = _rest(first, pieces)
            try:
                async for piece in rest:
                    if events := stream.take(piece):
                        yield events
                yield stream.end()
                return
            except Exception as error:
                if not is_lost(error) or not stream.may_resume or tries == MAX_TRIES:
                    raise
                log.warning("an engine was lost while it replied; its reply continues elsewhere")
                status, _, first, pieces = await self._ask(asked, stream.resume())
                if status != 200:  # no engine can continue the reply
                    pieces.cancel()
                    raise
            finally:
                await rest.aclose()


async def _rest(first: bytes, pieces: Any) -> AsyncGenerator[bytes]:
    """If the client disconnects, its request is cancelled, and with it the engine's."""
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
    """The beginning of a prompt, in any of the APIs: prompts that share it share a prefix."""
    try:
        fields = json.loads(body) if body else {}
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    names = ("tools", "system", "instructions", "messages", "prompt", "input", "inputs")
    parts = [fields[name] for name in names if name in fields]
    return json.dumps(parts, ensure_ascii=False)[:ROUTED_CHARS] if parts else ""
