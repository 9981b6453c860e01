"""Runs batches: each line is a request to the API's own route, with the lowest priority, while rows
are free.

A line's result is appended to a file in one write, so that a killed server loses only what it was
generating: the next one reads which lines have results and runs the others. Each tenant has one
running batch, and lines of different tenants take turns. Knows no API's fields: routes answer a
line as they answer a client.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from penstock.batch_lines import (
    BatchLine,
    LineSet,
    custom_id_of,
    error_line,
    mend_tail,
    numbered_lines,
    read_line,
    result_line,
    results_in,
    scan,
)
from penstock.errors import PenstockError
from penstock.serve.admission import tenant_of_key
from penstock.serve.batches.folder import Batch, BatchFolder, Status, StorageFullError, StoredFile
from penstock.serve.request_log import RequestRecord
from penstock.serve.requests import MAX_PRIORITY
from penstock.serve.state import ServerState

log = logging.getLogger("penstock.serve")

LOOK_S = 0.2  # how often a line that waits for a row checks for one
SWEEP_S = 30.0
LINES_AT_ONCE, BYTES_AT_ONCE = 64, 4 * 1024**2  # read ahead, in a thread
RETRY_S, MAX_RETRY_S = 0.5, 10.0
UNAVAILABLE = ("overloaded", "engine_unavailable")  # temporary: retried without a limit
MAX_TRIES = 5  # for other errors that may be temporary


@dataclass(slots=True)
class _Results:
    """The two result files of a batch, and the lines that have a result."""

    output: int
    errors: int
    done: LineSet = field(default_factory=LineSet)


class BatchRunner:
    def __init__(
        self, folder: BatchFolder, state: ServerState, app: ASGIApp, endpoints: tuple[str, ...]
    ) -> None:
        self.endpoints = endpoints
        self._folder = folder
        self._state = state
        self._app = app  # the routes, without the middleware for clients
        self._changed = asyncio.Event()
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()  # lines wait for a row in order
        self._num_in_flight = 0
        self._running: dict[str, asyncio.Task[None]] = {}  # by batch
        keys = state.config.load_api_keys()
        self._tenants = {tenant_of_key(key) for key in keys} or {""}  # a revoked key runs nothing

    def wake(self) -> None:
        """Called when there is a new batch."""
        self._changed.set()

    def cancel(self, batch: Batch) -> None:
        if batch.has_ended or batch.status == "cancelling":
            return
        batch.reach("cancelling")
        self._folder.save(batch)
        if (task := self._running.get(batch.id)) is not None:
            task.cancel()
        self._changed.set()

    async def run(self) -> None:
        """Runs until the server drains. The next server continues open batches."""
        draining = asyncio.ensure_future(self._state.draining.wait())
        try:
            await self._state.client.wait_ready()
            while not draining.done():
                self._changed.clear()
                self._start_next()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait(
                    {draining, changed}, timeout=SWEEP_S, return_when=asyncio.FIRST_COMPLETED
                )
                changed.cancel()
                self._delete_expired()
        except PenstockError:  # no engine can start; the server reports why
            pass
        finally:
            draining.cancel()
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start_next(self) -> None:
        """Starts the oldest batch of each tenant that has none running, and all cancelled ones."""
        busy = {self._folder.batches[id].tenant for id in self._running}
        for batch in list(self._folder.batches.values()):
            if batch.has_ended or batch.id in self._running or not self._is_ours(batch):
                continue
            if batch.tenant in busy and batch.status != "cancelling":
                continue
            busy.add(batch.tenant)
            task = self._running[batch.id] = asyncio.create_task(self._live(batch))
            task.add_done_callback(lambda _, id=batch.id: self._end(id))  # type: ignore[misc]

    def _is_ours(self, batch: Batch) -> bool:
        """A batch of another model is not run, but it may be cancelled or expire."""
        is_over = batch.status == "cancelling" or batch.expires_at <= time.time()
        return batch.tenant in self._tenants and (is_over or batch.model == self._state.model_name)

    def _end(self, id: str) -> None:
        del self._running[id]
        self._changed.set()

    def _delete_expired(self) -> None:
        for file in list(self._folder.files.values()):
            if self._folder.is_expired(file):
                self._folder.delete(file)

    async def _live(self, batch: Batch) -> None:
        """Takes a batch from its current state to its end. If this task is cancelled but the batch
        is not, the server is stopping."""
        try:
            await self._process(batch)
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise
            batch.ends_as = "cancelled"
        except (OSError, StorageFullError) as error:
            self._fail(batch, "storage", _storage_problem(error))
        except Exception:
            log.exception("a batch failed unexpectedly")
            message = "The server failed on this batch. Its log has the details."
            self._fail(batch, "internal_error", message)
        try:
            await self._finalize(batch)
        except (OSError, StorageFullError) as error:
            log.error("the results of batch %s could not be written: %s", batch.id, error)
            self._fail(batch, "storage", _storage_problem(error))
            batch.reach("failed")  # not on disk: the next server tries again

    def _fail(self, batch: Batch, code: str, message: str) -> None:
        batch.problems = [{"code": code, "line": None, "message": message, "param": None}]
        batch.ends_as = "failed"

    async def _process(self, batch: Batch) -> None:
        if batch.status == "cancelling":
            batch.ends_as = "cancelled"
        if batch.ends_as is not None:  # decided before the last server ended
            return
        try:
            async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                if batch.status == "validating" and not await self._validate(batch):
                    return
                await self._answer_lines(batch)
                batch.ends_as = "completed"
        except TimeoutError:
            batch.ends_as = "expired"

    async def _validate(self, batch: Batch) -> bool:
        is_over = False
        try:
            found = await asyncio.to_thread(
                scan, self._input_of(batch), self._max_line, (batch.endpoint,), lambda: is_over
            )
        finally:
            is_over = True
        batch.num_total = found.num_lines
        if found.problems:
            batch.problems, batch.ends_as = found.problems, "failed"
            return False
        batch.reach("in_progress")
        self._folder.save(batch)
        return True

    @property
    def _max_line(self) -> int:
        return self._state.config.max_body_bytes

    def _input_of(self, batch: Batch) -> Path:
        return self._folder.path_of(batch.input_file_id)

    async def _answer_lines(self, batch: Batch) -> None:
        results = await asyncio.to_thread(self._open_results, batch)
        answering: set[asyncio.Task[None]] = set()
        try:
            async for number, line in self._lines(batch):
                if number in results.done:
                    continue
                await self._wait_row()
                task = asyncio.create_task(self._answer_line(batch, results, number, line))
                answering.add(task)
                task.add_done_callback(self._free_row)
                for done in [task for task in answering if task.done()]:
                    answering.discard(done)
                    done.result()
            for task in list(answering):
                await task
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
            os.close(results.output)
            os.close(results.errors)

    async def _lines(self, batch: Batch) -> AsyncIterator[tuple[int, bytes]]:
        with self._input_of(batch).open("rb") as file:
            lines = numbered_lines(file, self._max_line)

            def read() -> list[tuple[int, bytes]]:
                some: list[tuple[int, bytes]] = []
                num_bytes = 0
                for number, line in islice(lines, LINES_AT_ONCE):
                    some.append((number, line))
                    num_bytes += len(line)
                    if num_bytes > BYTES_AT_ONCE:
                        break
                return some

            while some := await asyncio.to_thread(read):
                for number, line in some:
                    yield number, line

    def _open_results(self, batch: Batch) -> _Results:
        """Opens the result files, which may have results of a previous server."""
        paths = [self._folder.path_of(id) for id in (batch.output_id, batch.errors_id)]
        output, errors = (
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in paths
        )
        results = _Results(output, errors)
        counts = [0, 0]
        for place, path in enumerate(paths):
            before = path.stat().st_size
            mend_tail(path)
            self._folder.num_bytes -= before - path.stat().st_size
            for result in results_in(path):
                results.done.add(result.number)
                counts[place] += 1
        batch.num_completed, batch.num_failed = counts
        return results

    async def _wait_row(self) -> None:
        async with self._turn:
            while self._num_in_flight >= self._num_rows():
                self._freed.clear()
                waking = asyncio.ensure_future(self._freed.wait())
                try:
                    await asyncio.wait({waking}, timeout=LOOK_S)
                finally:
                    waking.cancel()
            self._num_in_flight += 1

    def _num_rows(self) -> int:
        """Rows for batches: those that clients leave free, but at least one, whose line waits
        behind all clients in the engine."""
        # A line that has just started has no place yet, so the difference may be negative.
        others = max(0, self._state.intake.replies.num_taken - self._num_in_flight)
        most = min(self._state.client.num_rows, self._state.config.max_queue // 2)
        return max(1, most - others)

    def _free_row(self, task: asyncio.Task[None]) -> None:
        self._num_in_flight -= 1
        self._freed.set()

    async def _answer_line(self, batch: Batch, results: _Results, number: int, data: bytes) -> None:
        line = read_line(data, self._max_line, (batch.endpoint,))
        status, request_id, body = await self._answer(batch, line)
        is_good = status == 200
        result = result_line(_result_id(batch, number), line.custom_id, status, request_id, body)
        self._append(results.output if is_good else results.errors, result)
        if is_good:
            batch.num_completed += 1
        else:
            batch.num_failed += 1

    def _append(self, file: int, result: bytes) -> None:
        self._folder.require_room(len(result))
        self._folder.num_bytes += len(result)
        while result:
            result = result[os.write(file, result) :]

    async def _answer(self, batch: Batch, line: BatchLine) -> tuple[int, str, bytes]:
        """The answer to one line. Retries temporary errors."""
        num_tries, wait_s = 0, RETRY_S
        while True:
            num_tries += 1
            status, request_id, body = await self._call(batch, line)
            if status not in (429, 503):
                return status, request_id, body
            code = msgspec.json.decode(body, type=_ErrorBody).error.code
            if code not in UNAVAILABLE and num_tries >= MAX_TRIES:
                return status, request_id, body
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    async def _call(self, batch: Batch, line: BatchLine) -> tuple[int, str, bytes]:
        request_id = uuid.uuid4().hex
        body = bytes(line.body)
        path = line.url.encode()
        length = str(len(body)).encode()
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": line.method,
            "scheme": "http",
            "path": line.url,
            "raw_path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", length)],
            "server": None,
            "client": None,
            "tenant": batch.tenant,
            "request_id": request_id,
            "record": RequestRecord(request_id, request_id, line.method, line.url),
            "least_priority": MAX_PRIORITY,
        }
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, answer = 500, bytearray()

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # forever: there is no client to disconnect
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            answer.extend(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, request_id, bytes(answer)

    async def _finalize(self, batch: Batch) -> None:
        """Turns results into files. Runs again if the server was killed meanwhile."""
        assert batch.ends_as is not None
        status: Status = batch.ends_as
        if batch.status != "finalizing":
            if status == "completed" or status == "expired":
                batch.reach("finalizing")
            self._folder.save(batch)
        await asyncio.to_thread(self._close_results, batch)
        batch.has_output = self._publish(batch, batch.output_id, "output", batch.num_completed)
        batch.has_errors = self._publish(batch, batch.errors_id, "errors", batch.num_failed)
        batch.reach(status)
        self._folder.save(batch)
        log.info(
            "batch %s %s: %d of %d answered", batch.id, status, batch.num_completed, batch.num_total
        )

    def _close_results(self, batch: Batch) -> None:
        results = self._open_results(batch)
        try:
            if batch.ends_as == "expired":
                self._write_expired(batch, results)
            os.fsync(results.output)
            os.fsync(results.errors)
        finally:
            os.close(results.output)
            os.close(results.errors)

    def _write_expired(self, batch: Batch, results: _Results) -> None:
        """Writes an error for each line without a result."""
        message = (
            f"The completion window of {batch.completion_window} ended before this request "
            "was answered."
        )
        with self._input_of(batch).open("rb") as file:
            for number, line in numbered_lines(file, self._max_line):
                if number not in results.done:
                    id, custom_id = _result_id(batch, number), custom_id_of(line)
                    self._append(
                        results.errors, error_line(id, custom_id, "batch_expired", message)
                    )
                    batch.num_failed += 1
        # It may have expired before it was counted.
        batch.num_total = batch.num_completed + batch.num_failed

    def _publish(self, batch: Batch, id: str, kind: str, num_lines: int) -> bool:
        if not num_lines:
            self._folder.discard(id)
            return False
        now = int(time.time())
        file = StoredFile(
            id=id,
            tenant=batch.tenant,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            bytes=self._folder.path_of(id).stat().st_size,
            created_at=now,
            expires_at=None if batch.output_expires_s is None else now + batch.output_expires_s,
        )
        self._folder.add(file)
        return True


class _ErrorFields(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


def _storage_problem(error: OSError | StorageFullError) -> str:
    if isinstance(error, PenstockError):
        return error.what
    return f"A file could not be written: {error}"


def _result_id(batch: Batch, number: int) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{number}"
