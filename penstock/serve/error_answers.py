"""Errors as answers: status, headers, and a body in the format of the API that owns the path.

The path is the one that the router used: the client's `Host` must not decide anything. A client
never sees a stack trace.
"""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import (
    AuthenticationError,
    DeadlineError,
    EngineLossError,
    OverloadedError,
    PenstockError,
)
from penstock.serve.answer import JSON_TYPE, UNREAD_HEADERS, unexpected_error
from penstock.serve.anthropic import replies as anthropic_replies
from penstock.serve.batches.folder import StorageFullError
from penstock.serve.ollama import replies as ollama_replies
from penstock.serve.openai import replies as openai_replies
from penstock.serve.request_log import CLIENT_CLOSED

log = logging.getLogger("penstock.serve")

RETRY_AFTER_S = 1
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_VERSION = b"anthropic-version"
MODELS_PATH = "/v1/models"
OLLAMA_PATHS = "/api/"


def answer_error(scope: Scope, error: PenstockError) -> Response:
    headers = _headers(error) | (UNREAD_HEADERS if scope.get("is_unread") else {})
    return Response(error_body(scope, error), _status(scope, error.status), headers, JSON_TYPE)


def error_body(scope: Scope, error: PenstockError | str, status: int = 500) -> bytes:
    """An error in the format of the API that owns the path; `status`: for an error that is only a
    message."""
    if _is_anthropic(scope):
        request_id = scope["record"].id
        if isinstance(error, str):
            return anthropic_replies.encode_error_fields(error, status, request_id)
        return anthropic_replies.encode_error(error, request_id)
    if scope["path"].startswith(OLLAMA_PATHS):
        return ollama_replies.encode_error(error)
    if isinstance(error, str):
        return openai_replies.encode_error_fields(error, status)
    return openai_replies.encode_error(error)


def _status(scope: Scope, status: int) -> int:
    return anthropic_replies.error_status(status) if _is_anthropic(scope) else status


def _is_anthropic(scope: Scope) -> bool:
    """Both APIs have the path of models; only clients of Anthropic's send a version."""
    if _is_below(ANTHROPIC_PATH, scope):
        return True
    return _is_below(MODELS_PATH, scope) and any(
        name == ANTHROPIC_VERSION for name, _ in scope["headers"]
    )


def _is_below(path: str, scope: Scope) -> bool:
    asked: str = scope["path"]
    return asked == path or asked.startswith(f"{path}/")


def _headers(error: PenstockError) -> dict[str, str]:
    """Headers that tell clients whether and when to retry, or how to authenticate."""
    if isinstance(error, OverloadedError) or error.status == 503:
        return {"retry-after": str(RETRY_AFTER_S)}
    # A retry would take as long, kill as many engines, or find as little room.
    if isinstance(error, DeadlineError | EngineLossError | StorageFullError):
        return {"x-should-retry": "false"}
    if isinstance(error, AuthenticationError):
        return {"www-authenticate": "Bearer"}
    return {}


async def answer_penstock_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    return answer_error(request.scope, error)


async def answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    scope, status = request.scope, error.status_code
    headers, message = error.headers, error.detail
    if message in ("Not Found", "Method Not Allowed"):
        message = f"{request.method} {scope['path'][:200]} does not exist here."
    if status == 405:
        methods = _methods_of(request)
        headers = {"allow": ", ".join(methods)}
        message += f"\nThe path exists for {' and '.join(methods)}."
    return Response(error_body(scope, message, status), _status(scope, status), headers, JSON_TYPE)


def _methods_of(request: Request) -> list[str]:
    """All methods of the path; the framework reports only its first route."""
    matching = [
        route for route in request.app.routes if route.path_regex.match(request.scope["path"])
    ]
    return sorted({method for route in matching for method in route.methods})


async def answer_disconnect(request: Request, error: Exception) -> Response:
    """No client reads this, but the framework needs an answer, and the log a status."""
    return Response(status_code=CLIENT_CLOSED)


class UnexpectedErrors:
    """Answers 500 for a bug in the server, and logs its traceback. Innermost middleware, so that
    this answer is counted, has an id, and can be read by pages of other origins, like any other.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def note_beginning(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, note_beginning)
        except Exception:
            if has_begun:  # the server logs it and closes the connection: nothing else can be sent
                raise
            log.exception("a request failed unexpectedly")
            await answer_error(scope, unexpected_error())(scope, receive, send)
