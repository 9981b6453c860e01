"""The `Range` header of a download: which bytes of a file a client asks for.

Starlette sends the ranges, but reports wrong ones as plain text, and refuses all ranges if one is
beyond the end. So it gets only ranges that exist. HTTP (RFC 9110) ignores the header for methods
other than GET, for units other than bytes, and if `If-Range` names another version of the file.
"""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse

from penstock.errors import RequestError

MAX_RANGES = 100  # with more, the client gets the whole file
_RANGE = re.compile(r"([0-9]{0,20})-([0-9]{0,20})")  # clients ask for 64-bit numbers of bytes


def keep_existing_ranges(request: Request, response: FileResponse, num_bytes: int) -> None:
    """Replaces the request's `Range` by the ranges that the file has."""
    header = request.headers.get("range")
    if header is None:
        return
    others = [pair for pair in request.scope["headers"] if pair[0] != b"range"]
    versions = (None, response.headers["etag"], response.headers["last-modified"])
    if request.method == "GET" and request.headers.get("if-range") in versions:
        ranges = _existing(header, num_bytes)
        if ranges:
            text = ",".join(f"{first}-{last}" for first, last in ranges)
            others.append((b"range", f"bytes={text}".encode()))
    request.scope["headers"] = others


def _existing(header: str, num_bytes: int) -> list[tuple[int, int]]:
    """First and last byte of each range. Empty: the client gets the whole file."""
    unit, equals, text = header.partition("=")
    parts = [part.strip(" \t") for part in text.split(",") if part.strip(" \t")]
    if (equals and unit.strip(" \t").lower() != "bytes") or len(parts) > MAX_RANGES:
        return []
    existing = []
    for part in parts:
        found = _RANGE.fullmatch(part)
        if found is None or part == "-":
            raise _malformed(header)
        first, last = (int(number) if number else None for number in found.groups())
        if first is None:  # the last bytes
            assert last is not None
            first, last = max(num_bytes - last, 0), num_bytes - 1
        elif last is None:
            last = num_bytes - 1
        elif last < first:
            raise _malformed(header)
        if first < num_bytes:
            existing.append((first, min(last, num_bytes - 1)))
    if not parts:
        raise _malformed(header)
    if not existing:
        message = f"The file has {num_bytes} bytes, and none in the range {header[:64]!r}."
        raise HTTPException(416, message, {"content-range": f"bytes */{num_bytes}"})
    return existing


def _malformed(header: str) -> RequestError:
    return RequestError(
        f"The Range header is {header[:64]!r}",
        "A range has a first byte, a last byte, or both, the first one not after the last.",
        "Use bytes=0-99, bytes=100- or bytes=-100.",
    )
