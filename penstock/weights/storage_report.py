"""How a checkpoint stores its weights: scheme, bits and bytes, for people and for programs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from penstock.weights.stored import StoredTensor

# The first that a tensor's name matches is its group.
GROUPS = {
    "drafting head": r"(^|\.)mtp\.",
    "vision": r"(^|\.)visual\.",
    "embedding": r"embed_tokens\.",
    "head": r"(^|\.)(lm_head|score)\.",
    "experts": r"\.experts\.",
    "shared experts": r"\.shared_expert\.",
    "attention": r"\.self_attn\..*(proj|qkv)",
    "DeltaNet": r"\.linear_attn\..*(proj|ba|qkvz)",
    "MLP": r"\.mlp\..*_proj",
}
OTHER = "norms, gates and the rest"


def describe_storage(stored: Iterable[StoredTensor]) -> dict[str, Any]:
    """The scheme of most weights, bits a weight of all, and both for each group and scheme in it."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for tensor in stored:
        group = next((name for name, pattern in GROUPS.items() if re.search(pattern, tensor.name)), OTHER)
        scheme = tensor.scheme or str(tensor.dtype).removeprefix("torch.")
        counts = sizes.setdefault((group, scheme), [0, 0])
        counts[0] += math.prod(tensor.shape)
        counts[1] += tensor.num_bytes
    order = [*GROUPS, OTHER]
    rows = [
        {"group": group, "scheme": scheme, **_size(*sizes[group, scheme])}
        for group, scheme in sorted(sizes, key=lambda key: (order.index(key[0]), -sizes[key][0]))
    ]
    by_scheme: dict[str, int] = {}
    for row in rows:
        by_scheme[row["scheme"]] = by_scheme.get(row["scheme"], 0) + row["weights"]
    total = _size(sum(row["weights"] for row in rows), sum(row["bytes"] for row in rows))
    return {"scheme": max(by_scheme, key=lambda key: by_scheme[key], default=""), **total, "groups": rows}


def _size(num_weights: int, num_bytes: int) -> dict[str, Any]:
    bits = round(8 * num_bytes / max(num_weights, 1), 2)
    return {"weights": num_weights, "bytes": num_bytes, "bits_per_weight": bits}
