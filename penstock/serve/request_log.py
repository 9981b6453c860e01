"""The server's log: one line for every request, formatted for people or for programs.

A request's line says what was requested, how it ended, how much was generated and how long it took.
Never a word of a prompt or a reply, and never a key. Probes are logged only when debugging is on.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.serve.journal import open_journal
from penstock.serve.metrics import Metrics
from penstock.serve.page.files import PAGE_PATHS
from penstock.serve.text_stream import Usage

log = logging.getLogger("penstock.requests")

# Requested often, by programs: probes, and the files that the page loads.
PROBES = frozenset({"/health", "/ready", "/ping", "/metrics"}) | PAGE_PATHS
CLIENT_CLOSED = 499  # the usual status for a client that disconnected before its answer began
_CLIENTS_ID = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class RequestRecord:
    """What is logged about one request at its end; each part of the server sets its fields."""

    id: str  # the client's own, or else the reply's
    reply_id: str
    method: str
    path: str
    status: int = CLIENT_CLOSED
    usage: Usage | None = None
    error: str | None = None  # the code of the error that ended a stream after its status was sent
    first_token_at: float | None = None  # on the monotonic clock
    finish_reasons: tuple[str, ...] = ()

    def fields(self, seconds: float) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": self.id,
            "method": self.method,
            "route": self.path[:200],
            "status": self.status,
            "ms": round(seconds * 1000, 1),
        }
        if self.reply_id != self.id:
            fields["reply_id"] = self.reply_id
        if self.usage is not None:
            fields["prompt_tokens"] = self.usage.num_prompt_tokens
            fields["cached_tokens"] = self.usage.num_cached_tokens
            fields["completion_tokens"] = self.usage.num_completion_tokens
        if self.error is not None:
            fields["error"] = self.error
        return fields


class RequestLog:
    """Gives every request an id, which its answer's headers repeat, and logs how it ended.

    A client may send an id of its own. It is repeated and logged, but identifies nothing here:
    `scope["request_id"]` is always ours, so that it is unique.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        reply_id = scope.get("request_id") or uuid.uuid4().hex  # a relay resumes a reply
        brought = Headers(scope=scope).get("x-request-id", "")
        id = brought if _CLIENTS_ID.fullmatch(brought) else reply_id
        record = RequestRecord(id, reply_id, scope["method"], scope["path"])
        headers = [
            (b"x-request-id", id.encode()),
            (b"request-id", id.encode()),
        ]  # the second is Anthropic's
        scope["request_id"] = reply_id
        open_journal(scope)
        scope["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._metrics.num_answers[record.status] += 1
            level = logging.DEBUG if record.path in PROBES else logging.INFO
            if log.isEnabledFor(level):
                log.log(
                    level, "request", extra={"fields": record.fields(time.perf_counter() - started)}
                )


def configure_log(log_format: str) -> None:
    """Sends the log of this process to stderr, one line per event."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    log.setLevel(logging.INFO)


class TextLines(logging.Formatter):
    """For people: a time, a level and a message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        fields: dict[str, Any] = getattr(record, "fields", {})
        return " ".join([line, *(f"{name}={_printable(value)}" for name, value in fields.items())])


class JsonLines(logging.Formatter):
    """For programs: one JSON object per line, with a traceback as one of its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _printable(value: Any) -> str:
    """A path may contain anything, even line breaks, but a log entry is one line."""
    return ascii(value)[1:-1] if isinstance(value, str) else str(value)
