"""Reports how the files of a checkpoint store its weights: by part of the model and scheme, with
bits per weight.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.weights.stored import StoredTensor

# The first pattern found in a tensor's name determines its part.
PARTS = {
    "drafting head": r"^mtp\.",
    "norms": r"norm|A_log|dt_bias|conv1d|\.bias$",
    "embedding": r"embed_tokens",
    "head": r"lm_head|^score\.",
    "router": r"mlp\.gate\.|shared_expert_gate",
    "experts": r"mlp\.experts\.",
    "shared expert": r"shared_expert\.",
    "MLP": r"mlp\.",
    "DeltaNet": r"linear_attn\.",
    "attention": r"self_attn\.",
}


@dataclass(frozen=True, slots=True)
class StorageGroup:
    """The tensors of one part of the model with the same storage scheme."""

    part: str
    scheme: str
    num_tensors: int
    num_weights: int
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / max(self.num_weights, 1)


@dataclass(frozen=True, slots=True)
class Storage:
    groups: tuple[StorageGroup, ...]  # the largest first

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / max(sum(group.num_weights for group in self.groups), 1)

    @property
    def schemes(self) -> list[str]:
        """The group with the most weights first."""
        counts: Counter[str] = Counter()
        for group in self.groups:
            counts[group.scheme] += group.num_weights
        return [scheme for scheme, _ in counts.most_common()]


def describe_storage(stored: Iterable[StoredTensor]) -> Storage:
    totals: dict[tuple[str, str], list[int]] = {}
    for tensor in stored:
        scheme = tensor.scheme or str(tensor.dtype).removeprefix("torch.")
        total = totals.setdefault((_part_of(tensor.name), scheme), [0, 0, 0])
        for place, number in enumerate((1, math.prod(tensor.shape), tensor.num_bytes)):
            total[place] += number
    groups = [StorageGroup(part, scheme, *numbers) for (part, scheme), numbers in totals.items()]
    return Storage(tuple(sorted(groups, key=lambda group: -group.num_bytes)))


def _part_of(name: str) -> str:
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), "other")
