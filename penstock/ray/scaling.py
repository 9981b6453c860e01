"""How many engines to run: enough that each has at most its share of the waiting prompt tokens."""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext


class QueuedTokens:
    """A Ray autoscaling policy: called every few seconds with what the engines last reported."""

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
