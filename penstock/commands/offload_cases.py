"""The cases of `penstock bench offload --case`: models that a card has no room for, on one that is
limited to stand in for it. Random weights and random tokens choose experts at random, the worst
case for any cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GPU_SHARE = {"memory_gb": 3.0, "max_step_tokens": 4096}  # what a small card would have left
BOTH = {**GPU_SHARE, "expert_misses": "auto"}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: str
    expert_cache: str
    batch: int = 1
    context: int = 4096
    new_tokens: int = 64
    runs: int = 3
    layers: int | None = None  # so many of the model's, and the time projected to all
    against_resident: bool = False
    is_cached: bool = False  # there is room for all experts
    settings: dict[str, Any] = field(default_factory=lambda: dict(GPU_SHARE))

    @property
    def engine(self) -> object:
        """Cases that have it alike can be measured with one engine."""
        given = tuple(sorted(self.settings.items()))
        return self.model, self.expert_cache, self.layers, self.against_resident, given


CASES = {
    case.name: case
    for case in (
        *(
            Case(
                f"35B-A3B int4 6GB batch {batch}{name}",
                "Qwen3.5-35B-A3B",
                "6GB",
                batch=batch,
                context=4096 if batch == 1 else 256,
                against_resident=True,
                settings=settings,
            )
            for settings, name in ((BOTH, ""), (GPU_SHARE, ", all fetched"))
            for batch in (1, 8)
        ),
        Case(
            "35B-A3B int4 all cached batch 1",
            "Qwen3.5-35B-A3B",
            "30GB",
            against_resident=True,
            is_cached=True,
        ),
        Case("122B-A10B int4 24GB batch 1", "Qwen3.5-122B-A10B", "13.5GB", runs=2, settings=BOTH),
        Case(
            "122B-A10B int4 24GB batch 8",
            "Qwen3.5-122B-A10B",
            "13.5GB",
            batch=8,
            context=256,
            new_tokens=32,
            runs=2,
            settings=BOTH,
        ),
        Case(
            "397B-A17B int4 RAM projected",
            "Qwen3.5-397B-A17B",
            "10.1GB",
            context=1024,
            new_tokens=32,
            runs=2,
            layers=24,
            settings=BOTH,
        ),
        # A share of RAM as 64 GB are of all 60 layers' experts.
        Case(
            "397B-A17B int4 64GB RAM + disk projected",
            "Qwen3.5-397B-A17B",
            "3.5GB",
            context=16,
            new_tokens=16,
            runs=1,
            layers=8,
            settings={"memory_gb": 1.0, "max_step_tokens": 512, "expert_ram": "8.5GB"},
        ),
    )
}
