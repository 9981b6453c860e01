"""Sessions over HTTP: which conversation a request belongs to, which are kept, and forgetting one.

A request names its session with the field `session_id` or, in any API, with the header `x-session-id`; the
field is the stronger word. Tenants do not see each other's. What keeping one means is the cache's business.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import PenstockError, RequestError
from penstock.serve.answer import json_response
from penstock.serve.fleet import Fleet
from penstock.serve.openai.requests import MAX_SESSION_ID_CHARS, TextRequest
from penstock.serve.serving import Serving
from penstock.serve.tenants import tenant_of
from penstock.types import SessionInfo

HEADER = "x-session-id"

Asked = TypeVar("Asked", bound=TextRequest)


class SessionNotFoundError(PenstockError):
    """No session that is kept has this id."""

    status = 404
    code = "session_not_found"


def in_session(asked: Asked, request: Request) -> Asked:
    """What was asked, by its tenant, in the session that the header names if the body names none."""
    tenant = tenant_of(request.scope)
    session_id = asked.session_id
    if session_id is None:
        session_id = _session_of_header(request)
    return replace(
        asked, tenant=tenant, session_id=None if session_id is None else _scoped(tenant, session_id)
    )


def _session_of_header(request: Request) -> str | None:
    session_id = request.headers.get(HEADER)
    if session_id is not None and not 0 < len(session_id) <= MAX_SESSION_ID_CHARS:
        raise RequestError(
            f"The header {HEADER} has {len(session_id)} characters",
            f"It may have 1 to {MAX_SESSION_ID_CHARS}.",
            param=HEADER,
        )
    return session_id


def _scoped(tenant: str, session_id: str) -> str:
    """As the engines know it."""
    return f"{tenant}/{session_id}"


def routes(serving: Serving) -> list[Route]:
    api = SessionRoutes(serving)
    return [
        Route("/v1/sessions", api.list),
        Route("/v1/sessions/{id:path}", api.show, methods=["GET"]),
        Route("/v1/sessions/{id:path}", api.delete, methods=["DELETE"]),
    ]


class SessionRoutes:
    def __init__(self, serving: Serving) -> None:
        self._client = serving.client

    async def list(self, request: Request) -> Response:
        """The most recently used first."""
        self._client.require_ready()
        sessions = [_describe(info) for info in await _sessions_of(request, self._client)]
        return json_response({"object": "list", "data": sessions})

    async def show(self, request: Request) -> Response:
        self._client.require_ready()
        session_id = request.path_params["id"]
        for info in await _sessions_of(request, self._client):
            if info.id == session_id:
                return json_response(_describe(info))
        raise _unknown(session_id)

    async def delete(self, request: Request) -> Response:
        self._client.require_ready()
        session_id = request.path_params["id"]
        if not await self._client.drop_session(_scoped(tenant_of(request.scope), session_id)):
            raise _unknown(session_id)
        return json_response({"id": session_id, "object": "session", "deleted": True})


async def _sessions_of(request: Request, client: Fleet) -> list[SessionInfo]:
    """The tenant's own, by the names it gave them."""
    scope = _scoped(tenant_of(request.scope), "")
    infos = await client.sessions()
    return [replace(info, id=info.id.removeprefix(scope)) for info in infos if info.id.startswith(scope)]


def _describe(info: SessionInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "session",
        "tokens": info.num_tokens,
        "bytes": info.num_bytes,
        "hits": info.num_hits,
        "age_seconds": round(info.age_s, 3),
        "idle_seconds": round(info.idle_s, 3),
    }


def _unknown(session_id: str) -> SessionNotFoundError:
    return SessionNotFoundError(
        f"There is no session {session_id[:MAX_SESSION_ID_CHARS]!r}",
        "It never was, was deleted, was not used for too long, or made room for others.",
        "GET /v1/sessions lists those that are kept.",
    )
