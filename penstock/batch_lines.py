"""The lines of OpenAI's batch files: requests in, results out, one JSON object per line.

Used by the server's batches and by `penstock batch`. Files may have millions of lines, so they are
read one line at a time, and only a bit or eight bytes of each are remembered. Knows no HTTP and no
engine.
"""

from __future__ import annotations

import os
from array import array
from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from penstock.errors import RequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_PROBLEMS = 100  # listed by a scan
_TAIL_BYTES = 64 * 1024
_BUCKETS = 1024

CustomId = Annotated[str, Meta(min_length=1, max_length=512)]


class BatchLine(msgspec.Struct):
    """One request of a batch."""

    custom_id: CustomId
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: CustomId | None = None


class _Response(msgspec.Struct):
    status_code: int = 0


class Result(msgspec.Struct):
    """The parts of a result that are needed without its response body."""

    id: str
    custom_id: str | None = None
    response: _Response | None = None

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response.status_code == 200

    @property
    def number(self) -> int:
        """The number of the line that it answers."""
        number = self.id.rpartition("_")[2]
        return int(number) if number.isdigit() else 0


class _Delivery(msgspec.Struct):
    """Fields for other ways of delivery, which a batch does not have."""

    stream: bool | None = None
    background: bool | None = None


class LineError(RequestError):
    """A line that is not a request; `code` says why."""

    def __init__(self, code: str, what: str, why: str = "", param: str | None = None) -> None:
        super().__init__(what, why, param=param)
        self.code = code


def numbered_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1. A line that is too long is cut to one byte
    more than allowed; the rest of it is skipped. A byte order mark is no part of the first."""
    if file.read(len(BOM_UTF8)) != BOM_UTF8:
        file.seek(0)
    number = 0
    while line := file.readline(max_bytes + 2):
        number += 1
        if not line.endswith(b"\n") and len(line) == max_bytes + 2:
            while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
                pass
            yield number, line[: max_bytes + 1]
        elif line := line.strip():
            yield number, line


def read_line(line: bytes, max_bytes: int, endpoints: Collection[str]) -> BatchLine:
    """Raises `LineError` if it is not a request to one of the endpoints."""
    if len(line) > max_bytes:
        raise LineError("line_too_long", f"The line has more than {max_bytes} bytes")
    try:
        asked = msgspec.json.decode(line, type=BatchLine)
    except msgspec.ValidationError as error:
        raise LineError("invalid_request", f"{error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError(
            "invalid_json_line", "The line is not a JSON object", f"{error}."
        ) from error
    if asked.method != "POST":
        raise LineError(
            "invalid_method", f"method is {asked.method[:64]!r}", "It must be POST.", "method"
        )
    if asked.url not in endpoints:
        why = f"It must be {' or '.join(endpoints)}."
        raise LineError("invalid_url", f"url is {asked.url[:128]!r}", why, "url")
    if not bytes(asked.body).lstrip().startswith(b"{"):
        raise LineError("invalid_request", "body is not a JSON object", param="body")
    try:
        delivery = msgspec.json.decode(asked.body, type=_Delivery)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_request", f"body: {error}", param="body") from error
    for name in delivery.__struct_fields__:
        if getattr(delivery, name):
            why = "A batch writes each answer when it is complete."
            raise LineError("invalid_request", f"body.{name} is true", why, f"body.{name}")
    return asked


def custom_id_of(line: bytes) -> str | None:
    """The line's custom_id, also if the line is not a request."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def result_line(id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """`body`: the response, which is JSON if its sender is correct."""
    if not _is_json(body):
        message = body.decode("utf-8", "replace")[:2000]
        body = msgspec.json.encode({"error": {"message": message, "type": "server_error"}})
    head = msgspec.json.encode({"id": id, "custom_id": custom_id})[:-1]
    response = msgspec.json.encode({"status_code": status, "request_id": request_id})[:-1]
    body = body.replace(b"\r", b" ").replace(b"\n", b" ")  # in JSON these are white space
    return b'%b,"response":%b,"body":%b},"error":null}\n' % (head, response, body)


def error_line(id: str, custom_id: str | None, code: str, message: str) -> bytes:
    error = {"code": code, "message": message}
    return (
        msgspec.json.encode({"id": id, "custom_id": custom_id, "response": None, "error": error})
        + b"\n"
    )


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


class LineSet:
    """Numbers of lines, one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, number: int) -> None:
        place = number >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits) + len(self._bits) // 2))
        self._bits[place] |= 1 << (number & 7)

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and bool(self._bits[place] >> (number & 7) & 1)


class HashedTexts:
    """Which texts occurred more than once, by their hashes: eight bytes per text."""

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = defaultdict(lambda: array("q"))

    def add(self, text: str) -> None:
        value = hash(text)
        self._buckets[value % _BUCKETS].append(value)

    def repeated(self) -> set[int]:
        """The hashes that occurred again; two texts may have the same hash."""
        found: set[int] = set()
        for bucket in self._buckets.values():
            if len(set(bucket)) < len(bucket):
                ordered = sorted(bucket)
                found |= {value for value, following in pairwise(ordered) if value == following}
        return found


@dataclass(slots=True)
class Scan:
    """The result of reading a whole file of requests."""

    num_lines: int = 0
    # The first ones, in OpenAI's format.
    problems: list[dict[str, Any]] = field(default_factory=list)

    def note(self, number: int | None, error: LineError) -> None:
        message = str(error).replace("\n", ". ").replace("..", ".")
        problem = {"code": error.code, "line": number, "message": message, "param": error.param}
        self.problems.append(problem)

    @property
    def is_full(self) -> bool:
        return len(self.problems) >= MAX_PROBLEMS


def scan(
    path: Path,
    max_bytes: int,
    endpoints: Collection[str],
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Scan:
    """Reads a whole file of requests, once or, if ids are not unique, twice."""
    found, ids = Scan(), HashedTexts()
    with path.open("rb") as file:
        for number, line in numbered_lines(file, max_bytes):
            found.num_lines += 1
            try:
                ids.add(read_line(line, max_bytes, endpoints).custom_id)
            except LineError as error:
                found.note(number, error)
            if found.is_full or is_cancelled():
                return found
    if repeated := ids.repeated():
        _name_repeated(path, max_bytes, repeated, found)
    if not found.num_lines:
        found.note(
            None, LineError("empty_file", "The file has no lines", "Each line must be a request.")
        )
    return found


def _name_repeated(path: Path, max_bytes: int, repeated: set[int], found: Scan) -> None:
    first_at: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in numbered_lines(file, max_bytes):
            custom_id = custom_id_of(line)
            if custom_id is None or hash(custom_id) not in repeated:
                continue
            if custom_id in first_at:
                what = f"custom_id is {custom_id[:64]!r}, as on line {first_at[custom_id]}"
                why = "Results are identified by it."
                found.note(number, LineError("duplicate_custom_id", what, why, "custom_id"))
            first_at.setdefault(custom_id, number)
            if found.is_full:
                return


def mend_tail(path: Path) -> None:
    """Cuts off an incomplete last line."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


def is_result(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=Result)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def results_in(path: Path) -> Iterator[Result]:
    """Skips lines that are not results."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=Result)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
