"""/v1/batches: create, inspect and cancel batches."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import RequestError
from penstock.serve.admission import tenant_of
from penstock.serve.answer import json_response, read_body
from penstock.serve.batches.files import expiry_s, folder_of, page_of
from penstock.serve.batches.folder import Batch
from penstock.serve.batches.runner import BatchRunner
from penstock.serve.body import decode_body, wrong_choice
from penstock.serve.fields import BATCHES
from penstock.serve.requests import Metadata
from penstock.serve.state import ServerState

DEFAULT_LIST, MAX_LIST = 20, 100
MAX_WINDOW_S = 14 * 24 * 3600
_WINDOW = re.compile(r"([1-9]\d{0,3})(m|h|d)")
_UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600}


class ExpiresAfter(msgspec.Struct):
    anchor: str
    seconds: int


class BatchBody(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def routes(state: ServerState, runner: BatchRunner | None) -> list[Route]:
    api = BatchRoutes(state, runner)
    return [
        Route("/v1/batches", api.create, methods=["POST"]),
        Route("/v1/batches", api.list, methods=["GET"]),
        Route("/v1/batches/{id}", api.show, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", api.cancel, methods=["POST"]),
    ]


class BatchRoutes:
    def __init__(self, state: ServerState, runner: BatchRunner | None) -> None:
        self._state = state
        self._runner = runner
        self._table = BATCHES.ignoring(state.config.ignore_field)

    async def create(self, request: Request) -> Response:
        folder, tenant = folder_of(self._state), tenant_of(request.scope)
        assert self._runner is not None
        asked = decode_body(await read_body(request, for_reply=False), BatchBody, table=self._table)
        if asked.endpoint not in self._runner.endpoints:
            raise wrong_choice("endpoint", asked.endpoint, self._runner.endpoints)
        window_s = _window_s(asked.completion_window)
        file = folder.file(asked.input_file_id, tenant, "input_file_id")
        if file.purpose != "batch":
            raise RequestError(
                f"The file's purpose is {file.purpose}", "It must be batch.", param="input_file_id"
            )
        expires, param = asked.output_expires_after, "output_expires_after"
        folder.require_place()
        folder.require_room(0)
        now = int(time.time())
        batch = Batch(
            id=folder.new_id("batch_"),
            tenant=tenant,
            model=self._state.model_name,
            endpoint=asked.endpoint,
            input_file_id=file.id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + window_s,
            output_id=folder.new_id("file-"),
            errors_id=folder.new_id("file-"),
            metadata=asked.metadata,
            output_expires_s=None
            if expires is None
            else expiry_s(expires.anchor, expires.seconds, param),
        )
        folder.save(batch)
        self._runner.wake()
        return json_response(batch.view())

    async def list(self, request: Request) -> Response:
        tenant = tenant_of(request.scope)
        batches = [one for one in folder_of(self._state).batches.values() if one.tenant == tenant]
        return page_of(batches, request, DEFAULT_LIST, MAX_LIST)

    async def show(self, request: Request) -> Response:
        return json_response(self._batch(request).view())

    async def cancel(self, request: Request) -> Response:
        batch = self._batch(request)
        assert self._runner is not None
        if batch.status in ("completed", "failed", "expired", "finalizing"):
            raise RequestError(f"The batch can no longer be cancelled: it is {batch.status}")
        self._runner.cancel(batch)
        return json_response(batch.view())

    def _batch(self, request: Request) -> Batch:
        return folder_of(self._state).batch(request.path_params["id"], tenant_of(request.scope))


def _window_s(window: str) -> int:
    found = _WINDOW.fullmatch(window)
    seconds: Any = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise RequestError(
            f"completion_window is {window[:64]!r}",
            "It must be a time such as 24h: minutes (m), hours (h) or days (d), 14 days at most.",
            param="completion_window",
        )
    return int(seconds)
