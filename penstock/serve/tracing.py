"""OpenTelemetry traces: one span for each request, if the usual variables are set.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 penstock serve

OpenTelemetry's own variables choose exporter, sampler and resource. The packages come with
`penstock[otel]`. Without the variables nothing is imported and there is no middleware. A span never
contains a word of a prompt or a reply.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.serve.request_log import PROBES, RequestRecord

log = logging.getLogger("penstock.serve")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORTER, DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROVIDER = "penstock"
# The operation of each generating route, in the terms of OpenTelemetry's conventions.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/invocations": "chat",
}


def tracing_middleware(
    model_name: str, environ: Mapping[str, str] | None = None
) -> list[Middleware]:
    """Empty if tracing is off, or if spans cannot be sent, which is logged."""
    environ = os.environ if environ is None else environ
    if not _is_wanted(environ):
        return []
    try:
        tracer = _tracer(environ)
    except ImportError as error:
        asked = next(name for name in (*ENDPOINTS, EXPORTER) if environ.get(name))
        log.warning(
            "%s is set, but no traces are sent: the Python package %r is missing. "
            "Install it with `pip install 'penstock[otel]'`, or unset the variable.",
            asked,
            error.name or str(error),
        )
        return []
    return [Middleware(Traces, tracer=tracer, model_name=model_name)]


def _is_wanted(environ: Mapping[str, str]) -> bool:
    if environ.get(DISABLED, "").lower() == "true" or environ.get(EXPORTER, "").lower() == "none":
        return False
    return any(environ.get(name) for name in (*ENDPOINTS, EXPORTER))


def _tracer(environ: Mapping[str, str]) -> Any:
    """Its spans are sent by a thread; the last ones when the process ends."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({} if environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: PROVIDER})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter(environ)))
    return provider.get_tracer(PROVIDER)


def _exporter(environ: Mapping[str, str]) -> Any:
    if environ.get(EXPORTER, "").lower() == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


class Traces:
    """Runs inside the log's middleware, and reads its record of a request at the request's end."""

    def __init__(self, app: ASGIApp, tracer: Any, model_name: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = tracer
        self._model_name = model_name
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)
        self._parent_of = TraceContextTextMapPropagator().extract

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["record"]
        operation = OPERATIONS.get(record.path)
        name = (
            f"{operation} {self._model_name}"
            if operation
            else f"{record.method} {record.path[:200]}"
        )
        headers = dict(Headers(scope=scope).items())
        span = self._tracer.start_span(name, context=self._parent_of(headers), kind=self._kind)
        started = time.monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            span.set_attributes(self._attributes(record, operation, started))
            if record.status >= 500 or record.error is not None:
                span.set_attribute("error.type", record.error or str(record.status))
                span.set_status(self._failed)
            span.end()

    def _attributes(
        self, record: RequestRecord, operation: str | None, started: float
    ) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "http.request.method": record.method,
            "url.path": record.path[:200],
            "http.response.status_code": record.status,
        }
        if operation is not None:
            attributes |= {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self._model_name,
                "gen_ai.response.model": self._model_name,
                "gen_ai.response.id": record.reply_id,
            }
        if record.usage is not None:
            attributes["gen_ai.usage.input_tokens"] = record.usage.num_prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = record.usage.num_completion_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = record.usage.num_cached_tokens
        if record.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = record.finish_reasons
        if record.first_token_at is not None:
            attributes["gen_ai.latency.time_to_first_token"] = record.first_token_at - started
        return attributes
