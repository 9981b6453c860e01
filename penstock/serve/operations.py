"""What operators and their tools ask: is it alive, is it ready, what does it do, which version is it."""

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
from penstock.serve.replica import sum_stats
from penstock.serve.serving import Serving
from penstock.serve.vllm_metrics import render as render_vllm_names


def routes(serving: Serving) -> list[Route]:
    operations = Operations(serving)
    return [
        Route("/", operations.root),
        Route("/health", operations.health),
        Route("/ready", operations.ready),
        Route("/version", operations.version),
        Route("/metrics", operations.metrics),
    ]


class Operations:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._client = serving.client

    async def root(self, request: Request) -> Response:
        """Clients look here whether a server is there at all, mostly with HEAD."""
        return Response("Penstock is running", media_type="text/plain")

    async def health(self, request: Request) -> Response:
        """Of all engines together and of each; `stats` is null where one is in a long step. Without the key
        that others need, only whether it can serve."""
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
            answer |= {"model": self._serving.model_name, "weights": client.info.weights}
            answer |= {"stats": sum_stats(replicas)}
        answer["sampling"] = self._serving.config.silent_sampling  # of requests that do not say
        answer["replicas"] = replicas
        return json_response(answer, 200 if answer["status"] == "ok" else 503)

    async def ready(self, request: Request) -> Response:
        """For load balancers: whether requests should be sent here."""
        if self._serving.is_ready:
            return json_response({"status": "ready"})
        is_draining = self._serving.draining.is_set()
        return json_response({"status": "draining" if is_draining else "not ready"}, 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": penstock.__version__})

    async def metrics(self, request: Request) -> Response:
        """Answers always: what the server counted is of interest when the engine is dead, too."""
        client = self._client
        replicas = await client.report()
        text = render_metrics(self._serving.metrics, replicas, client.num_moves)
        text += render_vllm_names(self._serving.metrics, replicas, self._serving.model_name)
        return Response(text, media_type=METRICS_TYPE)


def _status_of(client: Fleet) -> str:
    if client.failure is not None:
        return "dead"
    return "starting" if client.info is None else "ok"
