"""The HTTP side: routes, limits, status codes, and what happens when a client leaves.

An error that happens before the first token has a status of its own; after that it is an SSE error event and
no [DONE]. A client never sees a stack trace. Knows nothing of processes, ports or signals: see server.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import EngineDeadError, PenstockError
from penstock.serve.chat import TextEngine
from penstock.serve.client import EngineClient
from penstock.serve.connection import EventWriter
from penstock.serve.metrics import CONTENT_TYPE as METRICS_TYPE
from penstock.serve.metrics import Metrics
from penstock.serve.metrics import render as render_metrics
from penstock.serve.openai import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from penstock.serve.replies import (
    DONE,
    ChatReplyFormat,
    Choice,
    CompletionReplyFormat,
    ReplyFormat,
    encode_error,
    encode_error_fields,
    encode_event,
)
from penstock.serve.text_stream import Deliver, ReplyDelta, TextStream
from penstock.types import EngineStats

log = logging.getLogger("penstock.serve")

MAX_BODY_BYTES = 32 * 1024 * 1024
RETRY_AFTER_S = 1
STATS_TIMEOUT_S = 0.5  # /health and /metrics answer without the engine's numbers rather than late
JSON_TYPE = "application/json"


Start = Callable[[Deliver], Awaitable[TextStream]]


def create_app(client: EngineClient, text: TextEngine, metrics: Metrics, model_name: str) -> Starlette:
    api = Api(client, text, metrics, model_name)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/metrics", api.show_metrics),
            Route("/v1/models", api.list_models),
            Route("/v1/models/{name:path}", api.show_model),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.complete, methods=["POST"]),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/detokenize", api.detokenize, methods=["POST"]),
        ],
        exception_handlers={
            PenstockError: answer_penstock_error,
            HTTPException: answer_http_error,
            ClientDisconnect: answer_disconnect,
            Exception: answer_unexpected_error,
        },
        middleware=[Middleware(RequestIds)],
    )


class Api:
    """The routes."""

    def __init__(self, client: EngineClient, text: TextEngine, metrics: Metrics, model_name: str) -> None:
        self._client = client
        self._text = text
        self._metrics = metrics
        self._model_name = model_name
        self._started_at = int(time.time())

    async def health(self, request: Request) -> Response:
        client = self._client
        if client.failure is not None:
            return _json({"status": "dead", "reason": client.failure.what}, 503)
        if client.info is None:
            return _json({"status": "starting", "phase": dataclasses.asdict(client.phase)}, 503)
        try:
            stats = await self._stats()
        except EngineDeadError as error:
            return _json({"status": "dead", "reason": error.what}, 503)
        return _json({"status": "ok", "model": self._model_name, "stats": stats})

    async def show_metrics(self, request: Request) -> Response:
        """Answers always: what the server counted is of interest when the engine is dead, too."""
        try:
            stats = await self._stats()
        except EngineDeadError:
            stats = None
        return Response(render_metrics(self._metrics, stats), media_type=METRICS_TYPE)

    async def _stats(self) -> EngineStats | None:
        """None while the engine is in a long step."""
        try:
            return await asyncio.wait_for(self._client.stats(), STATS_TIMEOUT_S)
        except TimeoutError:
            return None

    async def list_models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def show_model(self, request: Request) -> Response:
        if request.path_params["name"] != self._model_name:
            raise HTTPException(404, f"There is no such model here; there is {self._model_name}.")
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        info = self._client.info
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "penstock",
            "max_model_len": None if info is None else info.max_model_len,
        }

    async def chat(self, request: Request) -> Answer:
        chat = parse_chat(await read_body(request))
        request_id = request.scope["request_id"]
        style = ChatReplyFormat(request_id, self._model_name, chat.sampling.logprobs is not None)
        return Answer(lambda deliver: self._text.stream_chat(request_id, chat, deliver), style, chat)

    async def complete(self, request: Request) -> Answer:
        completion = parse_completion(await read_body(request))
        request_id = request.scope["request_id"]
        style = CompletionReplyFormat(request_id, self._model_name, completion.sampling.logprobs is not None)
        return Answer(
            lambda deliver: self._text.stream_completion(request_id, completion, deliver), style, completion
        )

    async def tokenize(self, request: Request) -> Response:
        asked = parse_tokenize(await read_body(request))
        tokens = await self._text.tokenize(asked)
        info = self._client.info
        found: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": None if info is None else info.max_model_len,
        }
        if asked.shows_texts:
            found["token_strs"] = [self._text.token_text(token_id) for token_id in tokens]
        return _json(found)

    async def detokenize(self, request: Request) -> Response:
        tokens = parse_detokenize(await read_body(request))
        return _json({"prompt": await self._text.detokenize(tokens)})


class Answer:
    """Generates and sends a reply for as long as the client is there."""

    def __init__(self, start: Start, style: ReplyFormat, asked: ChatRequest | CompletionRequest) -> None:
        self._start = start
        self._style = style
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._send_events if self._asked.is_stream else self._send_json
        await run_while_connected(receive, answer(scope, receive, send))

    async def _send_json(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices: dict[int, Choice] = {}

        def deliver(delta: ReplyDelta) -> None:
            choices.setdefault(delta.index, Choice()).take(delta)

        with await self._start(deliver) as stream:
            await stream.wait_ended()
            body = self._style.encode_body(choices, stream.usage)
        await Response(body, media_type=JSON_TYPE)(scope, receive, send)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventWriter(scope["transport"])

        def deliver(delta: ReplyDelta) -> None:
            if chunk := self._style.encode_chunk(delta):  # an empty one would end the answer
                events.write(chunk)

        with await self._start(deliver) as stream:
            # Headers wait for the first token, so that whatever fails before it has a status code.
            await stream.wait_started()
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
            try:
                events.open()
                await stream.wait_ended()
                tail = self._style.encode_usage_chunk(stream.usage) if self._asked.include_usage else b""
                tail += DONE
            except PenstockError as error:
                tail = encode_event(encode_error(error))
            except Exception:
                log.exception("a reply failed while it was streamed")
                tail = encode_event(_unexpected_error_body())
            await send({"type": "http.response.body", "body": tail})


EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx collects tokens before it passes them on
]


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work; cancels it when the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})
    if not working.cancelled():
        working.result()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _body_too_large()
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > MAX_BODY_BYTES:
            raise _body_too_large()
        chunks.append(chunk)
    return b"".join(chunks)


def _body_too_large() -> HTTPException:
    # The rest of the body is never read, so the connection cannot be used again.
    return HTTPException(413, f"The body has more than {MAX_BODY_BYTES} bytes.", {"connection": "close"})


class RequestIds:
    """Gives every request an id: the name of its reply, in its answer's headers and in our log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope["request_id"] = request_id
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self._app(scope, receive, send_with_id)


async def answer_penstock_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.status == 503 else None
    return Response(encode_error(error), error.status, headers, JSON_TYPE)


async def answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    message = error.detail
    if error.status_code in (404, 405) and message in ("Not Found", "Method Not Allowed"):
        message = f"{request.method} {request.url.path[:200]} does not exist here."
    body = encode_error_fields(message, "invalid_request_error", code=codes.get(error.status_code))
    return Response(body, error.status_code, error.headers, JSON_TYPE)


async def answer_disconnect(request: Request, error: Exception) -> Response:
    """Nobody reads this; the framework wants an answer nevertheless."""
    return Response(status_code=400)


async def answer_unexpected_error(request: Request, error: Exception) -> Response:
    """The traceback goes to the log: the framework raises the error again after this answer."""
    return Response(_unexpected_error_body(), 500, media_type=JSON_TYPE)


def _unexpected_error_body() -> bytes:
    return encode_error_fields(
        "The server failed on this request. It has been logged.", "server_error", code="internal_error"
    )


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON_TYPE)
