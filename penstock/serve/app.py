"""The HTTP side put together: the routes of every API, and what stands in front of all of them.

Knows nothing of processes, ports or signals: see server.py.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.serve import openapi, operations, sagemaker, sessions
from penstock.serve.access import access_middleware
from penstock.serve.anthropic import routes as anthropic_routes
from penstock.serve.error_answers import (
    UnexpectedErrors,
    answer_disconnect,
    answer_http_error,
    answer_penstock_error,
)
from penstock.serve.intake import ReleasePlaces
from penstock.serve.llama_server import routes as llama_server_routes
from penstock.serve.ollama import routes as ollama_routes
from penstock.serve.openai import embeddings
from penstock.serve.openai import routes as openai_routes
from penstock.serve.request_log import RequestLog
from penstock.serve.responses import conversation_routes
from penstock.serve.responses import routes as responses_routes
from penstock.serve.responses.store import ResponseStore
from penstock.serve.serving import Serving


class TrailingSlashes:
    """A path with a slash at its end is the same without it, in front of whatever looks at paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The id of a session may end with one itself.
        if scope["type"] == "http" and not scope["path"].startswith("/v1/sessions/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


def create_app(serving: Serving) -> Starlette:
    store = ResponseStore()
    app = Starlette(
        routes=[
            *operations.routes(serving),
            *openai_routes.routes(serving),
            *responses_routes.routes(serving, store),
            *conversation_routes.routes(store),
            *embeddings.routes(serving),
            *anthropic_routes.routes(serving),
            *ollama_routes.routes(serving),
            *llama_server_routes.routes(serving),
            *sagemaker.routes(serving),
            *sessions.routes(serving),
            *openapi.routes(),
        ],
        exception_handlers={
            PenstockError: answer_penstock_error,
            HTTPException: answer_http_error,
            ClientDisconnect: answer_disconnect,
        },
        middleware=[
            Middleware(TrailingSlashes),
            Middleware(RequestLog, metrics=serving.metrics),
            *access_middleware(serving.config),
            Middleware(UnexpectedErrors),
            Middleware(ReleasePlaces),
        ],
    )
    app.router.redirect_slashes = False  # a redirect would lose the body of a POST and say where it goes
    app.state.serving = serving
    return app
