"""Ranks as threads of one process: the same collectives as between processes, without their
start.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

from penstock.parallel.links import GroupLinks
from penstock.parallel.ranks import Ranks

Result = TypeVar("Result")


def on_ranks(
    size: int, run: Callable[[Ranks], Result], *, whole_experts: bool = False
) -> list[Result]:
    """What `run` returns on each rank."""
    store = dist.HashStore()

    def one(rank: int) -> Result:
        links = GroupLinks(store, rank, size, torch.device("cpu"))
        return run(Ranks(rank, size, whole_experts, links))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))
