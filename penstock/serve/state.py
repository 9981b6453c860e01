"""What every route may use: the engines, the text engine, metrics and settings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from penstock.config import ServeConfig
from penstock.serve.batches.folder import BatchFolder
from penstock.serve.conversations import Conversations
from penstock.serve.fleet import Fleet
from penstock.serve.intake import Intake
from penstock.serve.metrics import Metrics
from penstock.serve.text_engine import TextEngine


@dataclass(frozen=True, slots=True)
class ServerState:
    client: Fleet
    text: TextEngine
    metrics: Metrics
    model_name: str  # in answers
    config: ServeConfig
    started_at: int  # seconds since 1970
    conversations: Conversations = field(default_factory=Conversations)
    batches: BatchFolder | None = None  # None: batches are off
    # Set when the server shuts down: running requests may end, new ones are refused.
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def intake(self) -> Intake:
        """The places and bytes that requests hold; replies in the fleet hold places too."""
        return self.client.intake

    @property
    def weights(self) -> dict[str, Any] | None:
        """The format of the weights, in memory and in their files; None: not known yet."""
        info = self.client.info
        if info is None:
            return None
        at_load = {} if info.quantization == "none" else {"quantized_at_load": info.quantization}
        return {
            "dtype": info.dtype,
            "stored_as": info.stored_as,
            "bits_per_weight": info.bits_per_weight,
            **at_load,
        }

    @property
    def experts(self) -> dict[str, Any] | None:
        """How experts run; None: all are on the device, and as many run as in training."""
        info = self.client.info
        if info is None or not (info.expert_slots or info.experts_per_token):
            return None
        found: dict[str, Any] = {}
        if info.expert_slots:
            found |= {
                "slots": info.expert_slots,
                "slot_bytes": info.expert_slot_bytes,
                "of_experts": info.num_experts,
            }
        if info.experts_per_token:
            found["per_token"] = info.experts_per_token
        return found

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of answers if another number of experts runs than in training."""
        info = self.client.info
        count = 0 if info is None else info.experts_per_token
        return f"experts-per-token-{count}" if count else ""

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served now."""
        return self.client.is_ready and not self.draining.is_set()
