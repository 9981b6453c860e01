"""The time of one rank's part of a step, with collectives added at a stated cost.

One GPU runs what rank 0 of several would: its slices of the weights, the same kernels and graphs.
It skips the collectives, and their cost is added: the number of all-reduces at a published latency,
and the bytes that they send over the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.commands.layouts import GPUS, collectives_s, num_collectives
from penstock.commands.measure import Measurement

# For 8 linked H100s, bfloat16, a few kB, captured in a CUDA graph. NCCL takes 6 us between two GPUs
# (NVIDIA/nccl issue 1259) and about twice that between eight; torch's symmetric memory and other
# one-shot kernels take 5 to 7 us (vllm-project/vllm pull request 24111).
ALL_REDUCE_US = 1e6 * GPUS["H200"].all_reduce_s
COLUMNS = ["tp", "batch", "context", "own ms", "links ms", "projected ms", "tok/s", "of floor"]


@dataclass(frozen=True, slots=True)
class Links:
    """The cost of one step's collectives."""

    tp: int
    num_layers: int
    hidden_size: int
    element_bytes: int
    all_reduce_us: float
    bytes_per_s: float = GPUS["H200"].link_bytes_per_s

    def seconds(self, num_tokens: int) -> float:
        num_bytes = num_tokens * self.hidden_size * self.element_bytes
        all_reduce_s = 1e-6 * self.all_reduce_us
        return collectives_s(self.tp, self.num_layers, num_bytes, all_reduce_s, self.bytes_per_s)

    def row_of(self, measurement: Measurement) -> list[str]:
        links_s = self.seconds(measurement.num_tokens)
        own_s = measurement.median_s
        return [
            str(self.tp),
            str(measurement.batch),
            f"{measurement.context:,}",
            f"{1e3 * own_s:.3f}",
            f"{1e3 * links_s:.3f}",
            f"{1e3 * (own_s + links_s):.3f}",
            f"{measurement.num_tokens / (own_s + links_s):,.1f}",
            f"{measurement.floor_s / own_s:.1%}",
        ]

    def dict_of(
        self, measurement: Measurement, model: str, scheme: str, ep: bool
    ) -> dict[str, Any]:
        """A row of results/h200/parallel.json, which `penstock plan` reads."""
        links_s = self.seconds(measurement.num_tokens)
        total_s = measurement.median_s + links_s
        row = measurement.as_dict()
        own = {f"own_{name}": row.pop(name) for name in ("ms", "ms_min")}
        return {
            "model": model,
            "scheme": scheme,
            "tp": self.tp,
            "ep": ep,
            **row,
            **own,
            "links_ms": round(1e3 * links_s, 4),
            "projected_ms": round(1e3 * total_s, 4),
            "tok_s": round(measurement.num_tokens / total_s, 2),
            "collectives": num_collectives(self.num_layers),
            "all_reduce_us": self.all_reduce_us,
        }
