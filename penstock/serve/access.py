"""Access control: API keys or, without keys, known hosts and origins; and bodies declared as JSON.

This is middleware in front of every route, so that no route can forget it. A key is compared with
all known keys by digest, so response times reveal nothing about them. Requests with the same key
are one tenant: tenants share no caches, sessions or stored responses.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config import ServeConfig
from penstock.errors import AuthenticationError
from penstock.serve.admission import tenant_of_key
from penstock.serve.browsers import JsonBodies, KnownSites
from penstock.serve.error_answers import answer_error
from penstock.serve.page.files import PAGE_PATHS

# Paths without a key: for load balancers, probes, and browsers that open the page to enter one.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/docs"}) | PAGE_PATHS
EXPOSED_HEADERS = ("x-request-id", "x-session-status", "x-penstock-warning", "retry-after")


def access_middleware(config: ServeConfig) -> list[Middleware]:
    """CORS comes before keys: a preflight request has no key, and pages must be able to read a
    401."""
    keys = config.load_api_keys()
    middleware = []
    if not keys:
        middleware.append(Middleware(KnownSites, config=config, public_paths=PAGE_PATHS))
    if config.cors_origin:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origin,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )
        )
    if keys:
        middleware.append(Middleware(ApiKeys, keys=keys))
    return [*middleware, Middleware(JsonBodies)]


class ApiKeys:
    """Answers 401 to requests without a known key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = _key_of(scope)
        scope["is_stranger"] = not self._is_known(key)
        if not scope["is_stranger"]:
            scope["tenant"] = tenant_of_key(key)
        if not scope["is_stranger"] or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        error = AuthenticationError(
            "The API key is missing or unknown",
            "This server answers only requests with one of its keys.",
            "Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
        )
        await answer_error(scope, error)(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _key_of(scope: Scope) -> str:
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def is_stranger(scope: Scope) -> bool:
    """Whether the request has no key although the server has keys."""
    return bool(scope.get("is_stranger", False))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
