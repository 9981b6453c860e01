"""Requests from web pages in a user's browser: which pages may send them, and how to recognise
them.

A page of any site can make its visitor's browser send requests to 127.0.0.1 or to the local
network. But the browser sets three headers itself: `Origin` names the page's site, `Host` is the
name in the URL, and a `Content-Type` other than a form's is sent only after this server has agreed.
A server with API keys does not check the first two: a page has no key.

Knows headers and paths only; access.py has the keys.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence, Set
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config import ServeConfig
from penstock.errors import PenstockError
from penstock.serve.error_answers import answer_error

ANY = "*"
# SageMaker passes on any type that its callers set; only the FORM_TYPES are refused there.
ANY_TYPE_PATH = "/invocations"
# Files come in a form, which pages may send without preflight: the origin check keeps others out.
UPLOAD_PATH, UPLOAD_TYPE = "/v1/files", "multipart/form-data"
# Types that a page can send without preflight.
FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
WILDCARD_ADDRESSES = (
    "0.0.0.0",
    "::",
)  # a client that connects to one of them reaches its own machine
# Names by which containers reach their host, even its loopback interface.
CONTAINERS_HOSTS = ("host.docker.internal", "host.containers.internal")
# Names that no registrar sells: no outsider can make one of them point here.
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
_JSON_TYPE = re.compile(r"application/([a-z0-9!#$&^_.-]+\+)?json")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.%]+\]|[^\[\]:/@\s]+)(:(?P<port>\d{0,5}))?")


class ForbiddenError(PenstockError):
    """A request that a page of another site may have sent through a browser."""

    status = 403
    code = "forbidden"


class MediaTypeError(PenstockError):
    """A body that is not declared as JSON, or is compressed."""

    status = 415
    code = "unsupported_media_type"


class JsonBodies:
    """Answers 415 to a POST whose body is declared as anything but JSON, or as compressed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        error = _objection(scope) if is_post else None
        if error is not None:
            await answer_error(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _objection(scope: Scope) -> MediaTypeError | None:
    headers = Headers(scope=scope)
    for value in headers.getlist("content-type"):
        kind = value.partition(";")[0].strip().lower()
        if not _is_readable(kind, scope["path"]):
            return _wrong_type(kind, scope["path"])
    for value in headers.getlist("content-encoding"):
        if value.strip().lower() not in ("", "identity"):
            return MediaTypeError(
                f"The Content-Encoding is {value[:64]!r}",
                "The server reads only bodies that are not compressed.",
                "Turn off the compression of requests in your client or proxy.",
            )
    return None


def _is_readable(content_type: str, path: str) -> bool:
    if path == ANY_TYPE_PATH:
        return content_type not in FORM_TYPES
    if path == UPLOAD_PATH:
        return content_type == UPLOAD_TYPE
    return _JSON_TYPE.fullmatch(content_type) is not None


def _wrong_type(content_type: str, path: str) -> MediaTypeError:
    what = f"The Content-Type is {repr(content_type[:64]) if content_type else 'empty'}"
    if path == UPLOAD_PATH:
        return MediaTypeError(
            what,
            f"A file is uploaded as {UPLOAD_TYPE}.",
            "Use a form with the fields `file` and `purpose` (curl: -F purpose=batch -F "
            "file=@FILE).",
        )
    return MediaTypeError(
        what,
        "The server reads only JSON; `curl -d` sends a form's type by default.",
        "Add the header `Content-Type: application/json` (curl: -H 'Content-Type: "
        "application/json').",
    )


class KnownSites:
    """Answers 403 to pages of other sites, and to `Host` names that another site could own.

    Pages of any origin may load `public_paths`, which are the same for every user: the sandbox of
    our page is a frame of origin `null`, and loads its script from here.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, public_paths: Set[str]) -> None:
        self._app = app
        self._public_paths = public_paths
        self._origins = config.cors_origin
        self._hosts = HostNames(config.host, config.allowed_host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._objection(scope) if scope["type"] == "http" else None
        if error is not None:
            await answer_error(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> ForbiddenError | None:
        headers = Headers(scope=scope)
        hosts = [host for host in headers.getlist("host") if host]  # a browser always sends one
        for host in hosts:
            if not self._hosts.include(host):
                return ForbiddenError(
                    f"This server does not accept the name in Host: {host[:128]!r}",
                    "Another site could have made its own name point to this server.",
                    "Use the address that the server prints when it starts, start it with "
                    "--allowed-host NAME, or with --api-key.",
                )
        if scope["path"] in self._public_paths:
            return None
        for origin in headers.getlist("origin"):
            if not (
                ANY in self._origins or origin in self._origins or is_same_origin(origin, hosts)
            ):
                return ForbiddenError(
                    f"Pages of {origin[:128]!r} may not call this server",
                    "Any page that a user visits could send such a request.",
                    "To allow it, start the server with --cors-origin ORIGIN.",
                )
        return None


class HostNames:
    """The names and addresses that a server without keys accepts as `Host`.

    A server that listens only on this machine accepts loopback names and addresses. One that
    listens on a network accepts any address, this machine's name, and names that no registrar
    sells.
    """

    def __init__(self, bound: str, allowed: Sequence[str]) -> None:
        self._takes_any = ANY in allowed
        self._is_loopback = _is_loopback(bound.lower())
        own = {bound, *allowed, *WILDCARD_ADDRESSES, *CONTAINERS_HOSTS}
        if not self._is_loopback:
            machine = socket.gethostname()
            own |= {machine, machine.partition(".")[0]}
        self._own = {_name_of(host) for host in own}

    def include(self, host: str) -> bool:
        if self._takes_any:
            return True
        name = _name_of(host)
        if not name:
            return False
        if name in self._own or _is_loopback(name):
            return True
        if self._is_loopback:
            return False
        return _address(name) is not None or "." not in name or name.endswith(PRIVATE_SUFFIXES)


def is_same_origin(origin: str, hosts: Sequence[str]) -> bool:
    """Whether a page was loaded from this server, under the name that the request used."""
    try:
        site = urlsplit(origin.lower())
        port = site.port
    except ValueError:
        return False
    default = {"http": 80, "https": 443}.get(site.scheme)
    if default is None or not site.hostname:
        return False
    for host in hosts:
        match = _HOST.fullmatch(host.lower())
        if match is None or match["name"].strip("[]") != site.hostname:
            return False
        if int(match["port"] or default) != (port or default):
            return False
    return bool(hosts)


def _name_of(host: str) -> str:
    """The host without port and brackets; empty if it is malformed."""
    if _address(host) is not None:  # settings contain IPv6 addresses without brackets
        return host.lower()
    match = _HOST.fullmatch(host.lower())
    return "" if match is None else match["name"].strip("[]").rstrip(".")


def _is_loopback(name: str) -> bool:
    address = _address(name)
    if address is None:
        return name == "localhost" or name.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
