"""Chooses an engine for a request: `penstock.serve.routing.Router`, the same that a server uses for
its own engines, behind Ray's interface. It counts characters in pages, where a server counts
tokens.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from penstock.digests import PageDigests
from penstock.serve.routing import Router
from penstock.types import Request

PAGE_CHARS = 256
PAGE_TOKENS = 64  # about as many
MOST_ENGINES = 4096  # over the lifetime of this router


class PrefixRouter(RequestRouter):
    def initialize_state(self, **_: Any) -> None:
        self._router = Router(MOST_ENGINES)
        self._numbers: dict[Any, int] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best one first, then all others: Ray tries those if it accepts no more requests."""
        if pending_request is None or len(candidate_replicas) < 2:
            return [candidate_replicas]
        by_number = {self._number(one): one for one in candidate_replicas}
        for number, replica in by_number.items():
            length = self.replica_queue_len_cache.get(replica.replica_id)
            self._router.loads[number].num_requests = length or 0
        request = request_of(pending_request)
        best, _ = self._router.pick(request, list(by_number))
        others = [one for number, one in by_number.items() if number != best]
        return [[by_number[best]], others]

    def _number(self, replica: RunningReplica) -> int:
        return self._numbers.setdefault(replica.replica_id, len(self._numbers) % MOST_ENGINES)


def request_of(pending: PendingRequest) -> Request:
    """Its prompt in the router's form: digests of pages of text."""
    text = pending.args[4] if len(pending.args) > 4 else ""
    characters = [ord(character) for character in text]
    digests = PageDigests.of(characters, PAGE_CHARS)
    return Request(
        id=str(pending.metadata.request_id),
        token_ids=(0,) * max(1, len(text) * PAGE_TOKENS // PAGE_CHARS),
        page_digests=PageDigests(PAGE_TOKENS, digests.data),
    )


class QueuedTokens:
    """How many engines to run: enough that each has at most its share of the waiting prompt tokens.

    A Ray autoscaling policy: called every few seconds with what the engines last reported.
    """

    def __init__(self, queued_tokens: int = 8192) -> None:
        self._queued_tokens = queued_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reported = (context.aggregated_metrics or {}).get("queued_tokens", {})
        return self.wanted(sum(reported.values()), context.current_num_replicas), {}

    def wanted(self, num_tokens: float, num_engines: int) -> int:
        """Above their share: as many as give each its share. Below half: one fewer."""
        share = num_tokens / (self._queued_tokens * max(1, num_engines))
        if share > 1:
            return math.ceil(share * num_engines)
        return max(1, num_engines - 1) if share < 0.5 else num_engines
