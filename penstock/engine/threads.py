"""How many threads torch may use in a process that is ours. Decided once, when such a process starts."""

from __future__ import annotations

import os

import torch


def leave_a_core() -> None:
    """Uses all cores but one, unless OMP_NUM_THREADS says otherwise.

    torch's threads spin while they wait for each other. When one of them has no core to itself, every
    operation waits for the operating system's next time slice: tokens came twenty times slower.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
