"""multipart/form-data, parsed as it arrives: a file may be larger than memory.

Strict: lines end with CRLF, as every client writes them. Knows no fields and keeps only the end of
its last input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser

from penstock.errors import RequestError

MAX_HEADER_BYTES = 8 * 1024
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """A field begins; its bytes follow."""

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
    bytes."""

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
