"""/v1/files: input files of batches, and their results. Other files are not accepted."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from typing import Any, BinaryIO

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from penstock.errors import OverloadedError, RequestError
from penstock.serve.admission import tenant_of
from penstock.serve.answer import UNREAD_HEADERS, ids_of_page, json_response, list_fields
from penstock.serve.batches.byte_ranges import keep_existing_ranges
from penstock.serve.batches.folder import Batch, BatchFolder, FileNotHereError, StoredFile
from penstock.serve.intake import SLOW_BYTES_PER_S
from penstock.serve.state import ServerState

MAX_UPLOADS = 8  # at a time
MAX_FIELD_BYTES = 1024  # per field that is not a file
WRITE_BYTES = 1024**2  # written at once, in a thread
DEFAULT_LIST, MAX_LIST = 10_000, 10_000
MAX_FILENAME = 255
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000  # OpenAI's


class BatchesOffError(FileNotHereError):
    code = "batches_off"


def folder_of(state: ServerState) -> BatchFolder:
    if state.batches is None:
        raise BatchesOffError(
            "Files and batches are off on this server",
            "It was started without a folder for them.",
            "Start it with --batch-folder FOLDER, or run `penstock batch FILE`.",
        )
    return state.batches


def routes(state: ServerState) -> list[Route]:
    api = FileRoutes(state)
    return [
        Route("/v1/files", api.upload, methods=["POST"]),
        Route("/v1/files", api.list, methods=["GET"]),
        Route("/v1/files/{id}", api.show, methods=["GET"]),
        Route("/v1/files/{id}", api.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", api.content, methods=["GET"]),
    ]


def expiry_s(anchor: Any, seconds: Any, param: str) -> int:
    """The seconds from now that `expires_after` gives."""
    if anchor != "created_at":
        raise RequestError(
            f"{param}.anchor is {anchor!r:.64}", "It must be created_at.", param=f"{param}.anchor"
        )
    is_number = isinstance(seconds, int) or (isinstance(seconds, str) and seconds.isdecimal())
    if not is_number or not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:
        raise RequestError(
            f"{param}.seconds is {seconds!r:.64}",
            f"It must be between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}.",
            param=f"{param}.seconds",
        )
    return int(seconds)


def page_of(
    records: Sequence[StoredFile | Batch], request: Request, default: int, most: int
) -> Response:
    """A part of a list, newest first, by `limit`, `after` and `order`."""
    by_id = {record.id: record for record in records}
    ids, has_more = ids_of_page(list(by_id), request, default, most)
    return json_response(list_fields(ids, [by_id[id].view() for id in ids], has_more))


class FileRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._num_uploads = 0

    async def list(self, request: Request) -> Response:
        files = [
            f for f in folder_of(self._state).files.values() if f.tenant == tenant_of(request.scope)
        ]
        if purpose := request.query_params.get("purpose"):
            files = [file for file in files if file.purpose == purpose]
        return page_of(files, request, DEFAULT_LIST, MAX_LIST)

    async def show(self, request: Request) -> Response:
        return json_response(self._file(request).view())

    async def content(self, request: Request) -> Response:
        file = self._file(request)
        path = folder_of(self._state).path_of(file.id)
        found = os.stat(path)
        response = FileResponse(
            path, media_type="application/jsonl", filename=file.filename, stat_result=found
        )
        keep_existing_ranges(request, response, found.st_size)
        return response

    async def delete(self, request: Request) -> Response:
        file = self._file(request)
        folder_of(self._state).delete(file)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    def _file(self, request: Request) -> StoredFile:
        return folder_of(self._state).file(request.path_params["id"], tenant_of(request.scope))

    async def upload(self, request: Request) -> Response:
        folder = folder_of(self._state)
        boundary = boundary_of(request.headers.get("content-type", ""))
        # Until all of it is read, an error closes the connection.
        request.scope["is_unread"] = True
        if self._num_uploads >= MAX_UPLOADS:
            raise OverloadedError(
                f"{MAX_UPLOADS} files are being uploaded", todo="Try again later."
            )
        self._num_uploads += 1
        upload = Upload(folder)
        try:
            await upload.receive(boundary, self._chunks(request))
            file = upload.file(tenant_of(request.scope))
            folder.add(file)
            upload.file_id = ""  # it belongs to the folder now
        finally:
            self._num_uploads -= 1
            upload.drop()
        request.scope["is_unread"] = False
        return json_response(file.view())

    async def _chunks(self, request: Request) -> AsyncIterator[bytes]:
        """A file may take long on a slow connection, but must not stall or fall below a rate."""
        timeout_s = self._state.config.read_timeout
        give_time = request.scope.get("give_time", lambda _: None)
        started, num_bytes = time.monotonic(), 0
        stream = request.stream()
        while True:
            allowed_s = timeout_s + num_bytes / SLOW_BYTES_PER_S - (time.monotonic() - started)
            try:
                async with asyncio.timeout(min(timeout_s, allowed_s)):
                    chunk = await anext(stream, b"")
            except TimeoutError:
                message = f"The file arrived too slowly: {num_bytes} bytes."
                raise HTTPException(408, message, UNREAD_HEADERS) from None
            if not chunk:
                return
            num_bytes += len(chunk)
            give_time(timeout_s)
            yield chunk


class Upload:
    """A form that is being received; its file is written to disk as it arrives."""

    def __init__(self, folder: BatchFolder) -> None:
        folder.require_room(0)
        self._folder = folder
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None  # None: no file has begun
        self._unwritten = bytearray()
        self._num_bytes = 0
        self.file_id = folder.new_id("file-")

    async def receive(self, boundary: bytes, chunks: AsyncIterator[bytes]) -> None:
        parser = MultipartParser(boundary)
        field = bytearray()
        is_file = False
        descriptor = os.open(
            self._folder.path_of(self.file_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
        )
        with open(descriptor, "wb", buffering=0) as output:
            async for chunk in chunks:
                for piece in parser.feed(chunk):
                    if isinstance(piece, Part):
                        is_file = self._begin(piece)
                        field = self._fields.setdefault(piece.name, bytearray())
                    elif is_file:
                        await self._take(piece, output)
                    else:
                        field += piece
                        if len(field) > MAX_FIELD_BYTES:
                            raise multipart_error(f"A field has more than {MAX_FIELD_BYTES} bytes.")
            await self._write(output)
        if not parser.has_ended:
            raise multipart_error("The form is incomplete.")

    def _begin(self, part: Part) -> bool:
        if part.name != "file":
            if len(self._fields) >= 16:
                raise multipart_error("It has more than 16 fields.")
            return False
        if self._filename is not None:
            raise multipart_error("It has more than one file.")
        self._filename = (part.filename or "file.jsonl")[:MAX_FILENAME]
        return True

    async def _take(self, data: bytes, output: BinaryIO) -> None:
        self._num_bytes += len(data)
        most = self._folder.max_file_bytes
        if self._num_bytes > most:
            raise HTTPException(
                413, f"The file has more than {most} bytes (--batch-file-mb).", UNREAD_HEADERS
            )
        self._unwritten += data
        if len(self._unwritten) >= WRITE_BYTES:
            await self._write(output)

    async def _write(self, output: BinaryIO) -> None:
        data, self._unwritten = bytes(self._unwritten), bytearray()
        self._folder.require_room(len(data))
        self._folder.num_bytes += len(data)
        await asyncio.to_thread(_write_all, output, data)

    def file(self, tenant: str) -> StoredFile:
        """The received file, if the form is complete."""
        if self._filename is None:
            raise RequestError("The form has no file", param="file")
        purpose = self._text("purpose")
        if purpose != "batch":
            raise RequestError(
                f"purpose is {purpose!r:.64}",
                "This server stores only files with the purpose batch.",
                param="purpose",
            )
        now = int(time.time())
        anchor, seconds = self._text("expires_after[anchor]"), self._text("expires_after[seconds]")
        expires_at = None
        if anchor is not None or seconds is not None:
            expires_at = now + expiry_s(anchor, seconds, "expires_after")
        return StoredFile(
            id=self.file_id,
            tenant=tenant,
            filename=self._filename,
            purpose=purpose,
            bytes=self._num_bytes,
            created_at=now,
            expires_at=expires_at,
        )

    def _text(self, name: str) -> str | None:
        data = self._fields.get(name)
        return None if data is None else data.decode("utf-8", "replace")

    def drop(self) -> None:
        """Deletes the bytes of an upload that did not become a file."""
        if self.file_id:
            self._folder.discard(self.file_id)


def _write_all(output: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[output.write(rest) :]


MAX_HEADER_BYTES = 8 * 1024
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a field; its bytes follow."""

    name: str
    filename: str | None  # None: not a file


def multipart_error(why: str) -> RequestError:
    return RequestError(
        "The body is not a form with a file",
        why,
        "Send multipart/form-data with `file` and `purpose`.",
    )


def boundary_of(content_type: str) -> bytes:
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise multipart_error(f"The Content-Type is {content_type[:128]!r}.")
    return (found[1] or found[2]).encode("latin-1")


class MultipartParser:
    """`feed` it the body in pieces of any size; it yields a `Part` for each field and then its
    bytes. It keeps only the end of its last input: a file may be larger than memory. Strict: lines
    end with CRLF, as every client writes them."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # so that the first boundary looks like all others
        self._is_in_part = False
        self.has_ended = False

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        self._buffer += data
        while not self.has_ended:
            place = self._buffer.find(self._delimiter)
            if place < 0:
                # Everything except what could be the beginning of a boundary.
                yield from self._take(max(0, len(self._buffer) - len(self._delimiter) + 1))
                return
            yield from self._take(place)
            part = self._begin_part()
            if part is None:
                return
            yield part
        self._buffer.clear()

    def _take(self, num_bytes: int) -> Iterator[bytes]:
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        if data and self._is_in_part:
            yield data

    def _begin_part(self) -> Part | None:
        """What follows a boundary: headers, or the end. None: it is incomplete, or the end."""
        start = len(self._delimiter)
        if self._buffer[start : start + 2] == b"--":
            self.has_ended = True
            return None
        end = self._buffer.find(b"\r\n\r\n", start)
        if end < 0:
            if len(self._buffer) > start + MAX_HEADER_BYTES:
                raise multipart_error(
                    f"The headers of a field have more than {MAX_HEADER_BYTES} bytes."
                )
            return None
        padding, _, headers = bytes(self._buffer[start : end + 4]).partition(b"\r\n")
        if padding.strip():
            raise multipart_error("A boundary is not followed by a line end.")
        del self._buffer[: end + 4]
        self._is_in_part = True
        return _part_of(headers)


def _part_of(headers: bytes) -> Part:
    fields = HeaderParser().parsestr(headers.decode("utf-8", "replace"))
    name = fields.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise multipart_error("A field has no name.")
    return Part(name, fields.get_filename())
