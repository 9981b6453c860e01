"""The HTTP app: the routes of every API, and the middleware in front of them.

Knows nothing of processes, ports or signals: see server.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.batch_lines import ENDPOINTS
from penstock.errors import PenstockError
from penstock.serve import health, openapi, sagemaker, sessions
from penstock.serve.access import access_middleware
from penstock.serve.anthropic import routes as anthropic_routes
from penstock.serve.batches import files
from penstock.serve.batches import routes as batch_routes
from penstock.serve.batches.runner import BatchRunner
from penstock.serve.error_answers import (
    UnexpectedErrors,
    answer_disconnect,
    answer_http_error,
    answer_penstock_error,
)
from penstock.serve.intake import ReleasePlaces
from penstock.serve.journal import Relayed
from penstock.serve.llama_server import routes as llama_server_routes
from penstock.serve.ollama import routes as ollama_routes
from penstock.serve.openai import embeddings
from penstock.serve.openai import routes as openai_routes
from penstock.serve.page import routes as page_routes
from penstock.serve.request_log import RequestLog
from penstock.serve.responses import conversation_routes
from penstock.serve.responses import routes as responses_routes
from penstock.serve.responses.store import ResponseStore
from penstock.serve.state import ServerState
from penstock.serve.tracing import tracing_middleware


class TrailingSlashes:
    """Removes a trailing slash from the path, before any route or middleware reads it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The id of a session may end with a slash.
        if scope["type"] == "http" and not scope["path"].startswith("/v1/sessions/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


def create_app(state: ServerState) -> Starlette:
    """The app's `state.batch_runner` runs batches; it is None if batches are off."""
    store = ResponseStore()
    routes = [
        *page_routes.routes(state),
        *health.routes(state),
        *openai_routes.routes(state),
        *embeddings.routes(state),
        *responses_routes.routes(state, store),
        *conversation_routes.routes(state, store),
        *anthropic_routes.routes(state),
        *ollama_routes.routes(state),
        *llama_server_routes.routes(state),
        *sagemaker.routes(state),
        *sessions.routes(state),
        *files.routes(state),
        *openapi.routes(),
    ]
    runner = None
    if state.batches is not None:
        answering = [route for route in routes if route.path in ENDPOINTS]
        endpoints = tuple(dict.fromkeys(route.path for route in answering))
        runner = BatchRunner(state.batches, state, _app(state, answering), endpoints)
    routes += batch_routes.routes(state, runner)
    in_front = [
        Middleware(TrailingSlashes),
        Middleware(Relayed, key=state.config.relay_key),
        Middleware(RequestLog, metrics=state.metrics),
        *tracing_middleware(state.model_name),
        *access_middleware(state.config),
    ]
    app = _app(state, routes, in_front)
    app.state.batch_runner = runner
    return app


def _app(state: ServerState, routes: list[Route], in_front: Sequence[Middleware] = ()) -> Starlette:
    app = Starlette(
        routes=routes,
        exception_handlers={
            PenstockError: answer_penstock_error,
            HTTPException: answer_http_error,
            ClientDisconnect: answer_disconnect,
        },
        middleware=[*in_front, Middleware(UnexpectedErrors), Middleware(ReleasePlaces)],
    )
    app.router.redirect_slashes = False  # a redirect would lose the body of a POST
    app.state.server = state
    return app
