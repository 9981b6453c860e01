"""Tenants: each API key has its own cache, sessions and stored responses."""

from __future__ import annotations

import hashlib

from starlette.types import Scope


def tenant_of_key(key: str) -> str:
    """A name that does not reveal the key."""
    return hashlib.sha256(b"tenant " + key.encode()).hexdigest()[:32]


def tenant_of(scope: Scope) -> str:
    """The tenant of a request; the empty one on a server without keys."""
    tenant: str = scope.get("tenant", "")
    return tenant
