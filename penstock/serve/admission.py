"""Queue places shared by tenants, and the priorities that requests may have.

A tenant is identified by its API key. This only counts: callers decide what a place is and how long
it is held.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from penstock.errors import OverloadedError, RequestError


class QueueShares:
    """A fixed number of places in a queue, for all tenants. A single tenant may take all of them.

    When all are taken, a tenant below its fair share (an equal part for each active tenant) still
    gets one. So the limit may be exceeded, but never by a single tenant.
    """

    def __init__(self, max_places: int, what: str) -> None:
        self.max_places = max_places
        self.taken: Counter[str] = Counter()  # by tenant; has no zeros
        self._what = what  # what the queue holds, for error messages

    @property
    def num_taken(self) -> int:
        return self.taken.total()

    def has_room(self, num_places: int = 1) -> bool:
        """Whether this many places are free."""
        return self.num_taken + num_places <= self.max_places

    def require(self, tenant: str, num_places: int = 1) -> None:
        """Raises an error if this tenant may not take this many more."""
        num_own, num_tenants = self.taken[tenant], len(self.taken.keys() | {tenant})
        share = max(1, self.max_places // num_tenants)
        if self.has_room(num_places) or num_own + num_places <= share:
            return
        why = f"{self.num_taken} {self._what}; the limit is {self.max_places}."
        if num_tenants > 1:
            why += (
                f" {num_own} of them use this API key, one of {num_tenants} that share the server."
            )
        raise OverloadedError("The server is full", why, "Try again later.")

    def reserve(self, tenant: str, num_places: int = 1) -> None:
        """Takes places, or raises an error; the caller must release each of them."""
        self.require(tenant, num_places)
        self.take(tenant, num_places)

    def take(self, tenant: str, num_places: int = 1) -> None:
        """Takes places without a check, for a request that was already admitted."""
        self.taken[tenant] += num_places

    def release(self, tenant: str, num_places: int = 1) -> None:
        self.taken[tenant] -= num_places
        assert self.taken[tenant] >= 0, "a place was released twice"
        if not self.taken[tenant]:
            del self.taken[tenant]


def priority_in(scope: Mapping[str, Any], priority: int) -> int:
    """The request's own priority; lines of a batch go behind all other requests."""
    return max(priority, scope.get("least_priority", priority))


def require_priority(priority: int, min_priority: int) -> None:
    """Raises an error for a priority that is more urgent than the operator allows."""
    if priority < min_priority:
        raise RequestError(
            f"priority is {priority}",
            f"Lower values run earlier; the lowest that this server accepts is {min_priority}.",
            "Omit it, or start the server with a lower --min-priority.",
            param="priority",
        )


def tenant_of_key(key: str) -> str:
    """A name that does not reveal the key: each key has its own cache, sessions and stored
    responses."""
    return hashlib.sha256(b"tenant " + key.encode()).hexdigest()[:32]


def tenant_of(scope: Scope) -> str:
    """The tenant of a request; an empty string on a server without keys."""
    tenant: str = scope.get("tenant", "")
    return tenant
