"""The files of the page: their paths, and how they are sent.

All of them are in static/, built from web/source by `make page`. They are the same for every user,
need no key, and load nothing from elsewhere: the policy that goes with each forbids it.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
PREFIX = "/page/"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX, SANDBOX = "index.html", "sandbox.html"
# The page runs only its own modules and calls only this server. It parses no HTML: Trusted Types
# without a policy make every attempt an error, so no text of a model can become an element or a
# script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src "
    "'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# The sandbox runs a user's own functions for tool calls: in a worker without network access, with
# a separate origin.
SANDBOX_POLICY = (
    "default-src 'none'; script-src 'self' blob:; worker-src blob:; base-uri 'none'; form-action "
    "'none'; frame-ancestors 'self'; sandbox allow-scripts"
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file, also compressed, with the headers of every answer that has it."""

    plain: bytes
    compressed: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> StaticFile:
        plain = path.read_bytes()
        policy = SANDBOX_POLICY if path.name == SANDBOX else POLICY
        headers = {
            "content-type": TYPES[path.suffix],
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "etag": f'"{hashlib.sha256(plain).hexdigest()[:20]}"',
            "cache-control": "no-cache",  # browsers keep it, and revalidate it by its ETag
            "vary": "accept-encoding, accept",
        }
        return cls(plain, gzip.compress(plain, mtime=0), headers)

    def answer(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if self.headers["etag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self.headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.compressed, headers={**self.headers, "content-encoding": "gzip"})
        return Response(self.plain, headers=self.headers)


def file_names() -> list[str]:
    """Paths relative to FOLDER; their URLs are relative to PREFIX."""
    files = (path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return sorted(path.relative_to(FOLDER).as_posix() for path in files)


PAGE_PATHS = frozenset(PREFIX + name for name in file_names())
