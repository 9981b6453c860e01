"""What eight GPUs would score, from one that was measured: arithmetic, not a measurement.

Data parallel means a model on every GPU and no traffic between them. c requests at a time over N replicas
put c/N on each; fewer requests than replicas leave some idle. So N x the speed of one GPU at c/N is what
they give together, if whatever stands in front of them costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.eval.score import WEIGHTS

NUM_GPUS = 8


@dataclass(frozen=True, slots=True)
class ProjectedLevel:
    """`num_busy` replicas with `each` requests at a time, at the speed one GPU had with as many."""

    concurrency: int
    weight: int
    num_busy: int
    each: int
    one_gpu_tok_s: float

    @property
    def tok_s(self) -> float:
        return self.num_busy * self.one_gpu_tok_s

    @property
    def weighted(self) -> float:
        return self.weight * self.tok_s


def needed_levels() -> list[int]:
    """What one GPU must have been measured at."""
    return sorted({max(1, concurrency // NUM_GPUS) for concurrency in WEIGHTS})


def project(one_gpu: Mapping[int, float]) -> list[ProjectedLevel]:
    """The contest's levels; empty where one GPU was not measured at all that they need."""
    if any(level not in one_gpu for level in needed_levels()):
        return []
    projected = []
    for concurrency, weight in WEIGHTS.items():
        each = max(1, concurrency // NUM_GPUS)
        projected.append(ProjectedLevel(concurrency, weight, min(concurrency, NUM_GPUS), each, one_gpu[each]))
    return projected
