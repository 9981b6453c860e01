"""What `penstock top` says of experts, where the device does not hold all of them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from penstock.commands.console import human_bytes

Event = dict[str, Any]
HELD = 128  # in a byte of heat: the device holds the expert; see `EngineStats.expert_heat`
MAX_LINES, MAX_COLUMNS = 16, 64  # of a heat map
SHADES = " ░▒▓█"


def rows_of(before: Event, now: Event) -> list[tuple[str, str]]:
    experts = now["stats"]["experts"]
    if not experts:
        return []
    num_needed, num_missed = experts["hits"] + experts["misses"], experts["misses"]
    found = "none was needed"
    if num_needed:
        found = f"{experts['hits'] / num_needed:.1%} of {num_needed:,}"
    below = [
        f"{experts.get(key, 0) / num_missed:.1%} in {tier}"
        for key, tier in (("ram_hits", "RAM"), ("disk_reads", "files"))
        if num_missed
    ]
    elapsed = now["time"] - before["time"]
    fetched, waited = 0.0, 0.0
    if before["stats"] is not None and elapsed > 0:
        old = before["stats"]["experts"]
        fetched = max(0, experts["fetched_bytes"] - old.get("fetched_bytes", 0)) / elapsed
        waited = max(0, experts["wait_us"] - old.get("wait_us", 0)) / 1e6 / elapsed
    return [
        ("experts on the device", found),
        ("the others were", ", ".join(below) or "none"),
        ("experts fetched", f"{human_bytes(int(fetched))}/s, {waited:.1%} of the time waiting"),
    ]


def heat_map(engine: Event) -> list[str]:
    """A line for each layer, or for several; a shade for each expert, or for several: how much of
    the layer's last turns needed them.
    """
    rows = [[byte & (HELD - 1) for byte in base64.b64decode(row)] for row in engine["expert_heat"]]
    if not rows:
        return []
    layers = _split(list(range(len(rows))), MAX_LINES)
    width = len(str(len(rows) - 1))
    cells = [
        [
            max(heat for layer in some for heat in rows[layer][columns[0] : columns[-1] + 1])
            for columns in _split(list(range(len(rows[some[0]]))), MAX_COLUMNS)
        ]
        for some in layers
    ]
    most = max(map(max, cells)) or 1
    head = f"\nexperts of engine {engine['replica']} by layer, the deeper the more they are needed"
    return [
        head,
        *(
            f"{some[0]:>{width}} "
            + "".join(SHADES[round(heat / most * (len(SHADES) - 1))] for heat in line)
            for some, line in zip(layers, cells)
        ),
    ]


def _split(places: Sequence[int], most: int) -> list[Sequence[int]]:
    """Into at most so many neighbours, as long as possible alike."""
    count = min(most, len(places))
    edges = [len(places) * part // count for part in range(count + 1)]
    return [places[first:last] for first, last in pairwise(edges)]
