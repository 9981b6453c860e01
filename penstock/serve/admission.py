"""Queue places shared by tenants, and the priorities that requests may have.

A tenant sends one API key. This only counts; callers decide what a place is for, and for how long.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from penstock.errors import OverloadedError, RequestError


class QueueShares:
    """A number of places for all tenants. A tenant that is alone may take all of them.

    When all are taken, a tenant below its share (an equal part for each tenant present) still gets
    one. So there may be more requests than places, but never because of one tenant.
    """

    def __init__(self, max_places: int, what: str) -> None:
        self.max_places = max_places
        self.taken: Counter[str] = Counter()  # by tenant, of those that have any
        self._what = what  # what the queue holds, for error messages

    @property
    def num_taken(self) -> int:
        return self.taken.total()

    def has_room(self, num_places: int = 1) -> bool:
        """Whether any tenant may have so many."""
        return self.num_taken + num_places <= self.max_places

    def require(self, tenant: str, num_places: int = 1) -> None:
        """Raises an error if this tenant cannot have so many."""
        num_own, num_tenants = self.taken[tenant], len(self.taken.keys() | {tenant})
        share = max(1, self.max_places // num_tenants)
        if self.has_room(num_places) or num_own + num_places <= share:
            return
        why = f"{self.num_taken} {self._what}; the limit is {self.max_places}."
        if num_tenants > 1:
            why += (
                f" {num_own} of them have this API key, one of {num_tenants} that share the server."
            )
        raise OverloadedError("The server is full", why, "Try again later.")

    def reserve(self, tenant: str, num_places: int = 1) -> None:
        """Takes the places or raises; every one must be released."""
        self.require(tenant, num_places)
        self.take(tenant, num_places)

    def take(self, tenant: str, num_places: int = 1) -> None:
        """For who has a place already and must not lose it."""
        self.taken[tenant] += num_places

    def release(self, tenant: str, num_places: int = 1) -> None:
        self.taken[tenant] -= num_places
        assert self.taken[tenant] >= 0, "a place was released twice"
        if not self.taken[tenant]:
            del self.taken[tenant]


def priority_in(scope: Mapping[str, Any], priority: int) -> int:
    """As the request says, but behind all others where it is a line of a batch."""
    return max(priority, scope.get("least_priority", priority))


def require_priority(priority: int, min_priority: int) -> None:
    """Raises for a request that is more urgent than the operator lets clients be."""
    if priority < min_priority:
        raise RequestError(
            f"priority is {priority}",
            f"Lower runs earlier, and the lowest that this server accepts is {min_priority}.",
            "Omit it, or start the server with a lower --min-priority.",
            param="priority",
        )


def tenant_of_key(key: str) -> str:
    """A name that does not reveal the key: each key has its own cache, sessions and stored
    responses."""
    return hashlib.sha256(b"tenant " + key.encode()).hexdigest()[:32]


def tenant_of(scope: Scope) -> str:
    """The tenant of a request; the empty one on a server without keys."""
    tenant: str = scope.get("tenant", "")
    return tenant
