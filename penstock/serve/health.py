"""Endpoints for operators and their tools: health, readiness, metrics, version."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock
from penstock.serve.access import is_stranger
from penstock.serve.answer import json_response
from penstock.serve.fleet import Fleet
from penstock.serve.metrics import CONTENT_TYPE as METRICS_TYPE
from penstock.serve.metrics import render as render_metrics
from penstock.serve.metrics import render_vllm_names
from penstock.serve.replica import sum_stats
from penstock.serve.state import ServerState


def routes(state: ServerState) -> list[Route]:
    health = HealthRoutes(state)
    return [
        Route("/", health.root),
        Route("/health", health.health),
        Route("/ready", health.ready),
        Route("/version", health.version),
        Route("/metrics", health.metrics),
    ]


class HealthRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._client = state.client

    async def root(self, request: Request) -> Response:
        """Clients check here whether a server is running, mostly with HEAD."""
        return Response("Penstock is running", media_type="text/plain")

    async def health(self, request: Request) -> Response:
        """The state of the server and of each engine; `stats` is null for one in a long step.
        Requests without the API key get only the status."""
        client = self._client
        if is_stranger(request.scope):
            status = _status_of(client)
            return json_response({"status": status}, 200 if status == "ok" else 503)
        replicas = await client.report()
        answer: dict[str, Any] = {"status": _status_of(client)}
        if client.failure is not None:
            answer |= {"reason": client.failure.what}
        elif client.info is None:
            answer |= {"phase": dataclasses.asdict(client.phase)}
        else:
            answer |= {"model": self._state.model_name, "weights": self._state.weights}
            if self._state.experts is not None:
                answer |= {"experts": self._state.experts}
            answer |= {"kv_dtype": client.info.kv_dtype, "speculate": client.info.speculate}
            answer |= {"stats": sum_stats(replicas)}
        answer["sampling"] = self._state.config.silent_sampling  # defaults of requests
        answer["replicas"] = replicas
        return json_response(answer, 200 if answer["status"] == "ok" else 503)

    async def ready(self, request: Request) -> Response:
        """For load balancers: whether requests should be sent here."""
        if self._state.is_ready:
            return json_response({"status": "ready"})
        is_draining = self._state.draining.is_set()
        return json_response({"status": "draining" if is_draining else "not ready"}, 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": penstock.__version__})

    async def metrics(self, request: Request) -> Response:
        """Always answers: the server's counters also matter while no engine runs."""
        client = self._client
        replicas = await client.report()
        text = render_metrics(self._state.metrics, replicas, client.num_moves)
        text += render_vllm_names(self._state.metrics, replicas, self._state.model_name)
        return Response(text, media_type=METRICS_TYPE)


def _status_of(client: Fleet) -> str:
    if client.failure is not None:
        return "dead"
    return "starting" if client.info is None else "ok"
