"""Draws from a `random.Random`, and the rule that separates training from gates."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random
from typing import TypeVar

from penstock.eval.spot_checks import between, pick

Item = TypeVar("Item")
__all__ = ["between", "is_held_out", "pick", "pick_two"]

HELD_OUT_ONE_IN = 10


def pick_two(rng: Random, items: Sequence[Item]) -> tuple[Item, Item]:
    """Two elements of `items` at different positions."""
    first = int(rng.random() * len(items))
    second = int(rng.random() * (len(items) - 1))
    return items[first], items[second + (second >= first)]


def is_held_out(key: str) -> bool:
    """Whether this combination is excluded from training. The same in all processes, versions and
    machines.
    """
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0
