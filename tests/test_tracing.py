"""Tracing: one span per request with its generation statistics, and none unless enabled."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.serve.tracing import tracing_middleware
from serving import FREE, MESSAGES, Server, eventually, start_server

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {ENDPOINT: "http://x", "OTEL_SDK_DISABLED": "true"},
        {ENDPOINT: "x", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_traces_there_is_no_middleware(
    environ: dict[str, str],
) -> None:
    assert tracing_middleware("m", environ) == []


def test_a_missing_package_is_reported_and_the_server_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with caplog.at_level(logging.WARNING, "penstock.serve"):
        assert tracing_middleware("m", {ENDPOINT: "http://127.0.0.1:1"}) == []
    (record,) = caplog.records
    assert f"{ENDPOINT} is set" in record.getMessage()
    assert "penstock[otel]" in record.getMessage()


class Collector:
    """An OTLP receiver; the spans that it received, as plain values."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
                    ExportTraceServiceRequest,
                )

                sent = ExportTraceServiceRequest()
                sent.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in sent.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    collector = Collector()
    yield collector
    collector.http.shutdown()


@pytest.fixture
def server(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    from opentelemetry.sdk import trace

    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{collector.http.server_address[1]}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    packages = Path(trace.__file__).parents[3]  # where they are may be unknown to a new process
    with start_server(path=packages) as running:
        yield running


@pytest.mark.slow
def test_a_span_says_what_was_generated_and_whose_child_it_is(
    server: Server, collector: Collector
) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
    body = {"messages": MESSAGES, "max_tokens": 5, **FREE}
    url = f"{server.url}/v1/chat/completions"
    usage = server.http.post(url, json=body, headers=headers).json()["usage"]
    assert server.http.post(url, json={"messages": MESSAGES, "max_tokens": -1}).status_code == 400
    server.http.get(f"{server.url}/health")
    assert eventually(lambda: len(collector.spans) == 2)
    good, bad = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert good.name == "chat penstock-tiny"
    assert (good.trace_id.hex(), good.parent_span_id.hex()) == (trace_id, parent_id)
    found = {one.key: one.value for one in good.attributes}
    assert found["gen_ai.operation.name"].string_value == "chat"
    assert found["gen_ai.request.model"].string_value == "penstock-tiny"
    assert found["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"].int_value == 5
    reasons = found["gen_ai.response.finish_reasons"].array_value.values
    assert [reason.string_value for reason in reasons] == ["length"]
    seconds = (good.end_time_unix_nano - good.start_time_unix_nano) / 1e9
    assert 0 < found["gen_ai.latency.time_to_first_token"].double_value <= seconds
    found = {one.key: one.value for one in bad.attributes}
    assert found["http.response.status_code"].int_value == 400
    assert "gen_ai.usage.output_tokens" not in found
