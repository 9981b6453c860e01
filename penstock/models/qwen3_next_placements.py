"""Tensors of Qwen3-Next checkpoints: those of Qwen3.5, except the input projections of DeltaNet.

These are two fused tensors whose rows are grouped by key head: (q, k, v, z) and (b, a) of the first
key head and its value heads, then of the second. Ours are all q, all k, all v, all z, all b, all a.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import Tensor

from penstock.models import qwen3_5_placements
from penstock.models.placement import Placement
from penstock.models.qwen3_5_config import Qwen3_5Config

PROJECTION = "linear_attn.in_proj_"


def find_placements(
    config: Qwen3_5Config, with_mtp: bool, names: Collection[str] | None
) -> dict[str, Placement]:
    table = qwen3_5_placements.find_placements(config, with_mtp, names)
    return dict(_fused_projections(config, table))


def _fused_projections(
    config: Qwen3_5Config, table: dict[str, Placement]
) -> Iterator[tuple[str, Placement]]:
    """Two tensors for four: q, k, v and z are adjacent in our parameter, and so are b and a."""
    groups, hidden = config.num_key_heads, config.hidden_size
    num_qkvz, num_ba = config.conv_channels + config.value_size, 2 * config.num_value_heads
    values, heads = config.value_size // groups, config.num_value_heads // groups
    qkvz = partial(_ungrouped, groups, (config.key_dim, config.key_dim, values, values))
    ba = partial(_ungrouped, groups, (heads, heads))
    rows_of_qkvz, rows_of_ba = (slice(0, num_qkvz),), (slice(num_qkvz, num_qkvz + num_ba),)
    for name, place in table.items():
        layer, _, projection = name.rpartition(PROJECTION)
        if projection == "qkv.weight":
            fused = Placement(place.parameter, (num_qkvz, hidden), index=rows_of_qkvz, convert=qkvz)
            yield f"{layer}{PROJECTION}qkvz.weight", fused
        elif projection == "b.weight":
            fused = Placement(place.parameter, (num_ba, hidden), index=rows_of_ba, convert=ba)
            yield f"{layer}{PROJECTION}ba.weight", fused
        elif projection not in ("z.weight", "a.weight"):
            yield name, place


def _ungrouped(num_groups: int, sizes: tuple[int, ...], weight: Tensor) -> Tensor:
    """Rows (first part, second, ...) by group -> all first parts, then all second."""
    parts = weight.unflatten(0, (num_groups, -1)).split(sizes, dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])
