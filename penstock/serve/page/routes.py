"""The page over HTTP: `GET /` for browsers, its files, and the numbers of its live view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.serve.answer import event_stream
from penstock.serve.metrics import Histogram
from penstock.serve.page.files import FOLDER, INDEX, PREFIX, StaticFile, file_names
from penstock.serve.replica import ReplicaReport, sum_stats
from penstock.serve.state import ServerState

PERIOD_S = 1.0


def routes(state: ServerState) -> list[Route]:
    """These come before the health routes: at `/`, a client that accepts HTML gets the page."""
    live = Route("/live", LiveRoute(state).stream)
    if not state.config.page:
        return [live]
    files = {name: StaticFile.read(FOLDER / name) for name in file_names()}

    async def send_file(request: Request) -> Response:
        found = files.get(request.path_params["file"])
        if found is None:
            raise HTTPException(404)
        return found.answer(request)

    async def send_index(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return files[INDEX].answer(request)
        return Response("Penstock is running", media_type="text/plain", headers={"vary": "accept"})

    return [Route("/", send_index), Route(f"{PREFIX}{{file:path}}", send_file), live]


class LiveRoute:
    """`GET /live`: the numbers of /metrics and /health as one event a second, for the page and
    `top`. Totals only ever grow; clients compute differences. The engines are queried once a second
    however many clients there are, and not at all without any."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._event = b""
        self._taken_at = 0.0  # on the monotonic clock
        self._taking = asyncio.Lock()

    async def stream(self, request: Request) -> Response:
        return event_stream(self._events(), request)

    async def _events(self) -> AsyncIterator[bytes]:
        """Runs until the client disconnects or the server drains."""
        draining = self._state.draining
        while not draining.is_set():
            yield await self._latest()
            try:
                await asyncio.wait_for(draining.wait(), PERIOD_S)
            except TimeoutError:
                continue

    async def _latest(self) -> bytes:
        async with self._taking:
            if time.monotonic() - self._taken_at > PERIOD_S / 2:
                self._event = b"data: %b\n\n" % msgspec.json.encode(await self.snapshot())
                self._taken_at = time.monotonic()
            return self._event

    async def snapshot(self) -> dict[str, Any]:
        client, metrics = self._state.client, self._state.metrics
        replicas = await client.report()
        return {
            "time": time.time(),
            "model": self._state.model_name,
            "is_ready": self._state.is_ready,
            "phase": None if client.info is not None else client.phase,
            "failure": None if client.failure is None else client.failure.what,
            "engine": client.info,
            "stats": sum_stats(replicas),
            "replicas": [_told(one) for one in replicas],
            "prompt_tokens": metrics.num_prompt_tokens,
            "generated_tokens": metrics.num_generated_tokens,
            "answers": {str(status): n for status, n in metrics.num_answers.items()},
            "first_token_s": _described(metrics.first_token_s),
            "inter_token_s": _described(metrics.inter_token_s),
        }


def _told(one: ReplicaReport) -> dict[str, Any]:
    names = ("replica", "state", "restarts", "requests", "problem")
    stats = one.stats
    return {name: getattr(one, name) for name in names} | {
        "memory_used": 0 if stats is None else stats.memory_used,
        "memory_total": 0 if stats is None else stats.memory_total,
        "expert_heat": () if stats is None else stats.expert_heat,  # bytes as base64
    }


def _described(histogram: Histogram) -> dict[str, Any]:
    """`counts` are cumulative: values up to each bound, and a last one for all values."""
    return {"bounds": histogram.bounds, "counts": histogram.cumulative_counts, "sum": histogram.sum}
