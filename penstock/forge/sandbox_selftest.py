"""Tries what a confined process can still do. Runs inside the sandbox; imports no Penstock.

An answer is empty if the attempt succeeded, and otherwise tells what prevented it; `probe` reads
them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

Load = Callable[[str, str], ModuleType]  # a file as a module of this name


def reach(load: Load, *, device: str, compiled: str, weights: str, outside: str) -> dict[str, str]:
    """Whether the device computes and the weights open, and whether network and other files are in
    reach.
    """
    os.environ["TRITON_CACHE_DIR"] = compiled
    return {
        "device": _obstacle(lambda: _compute(device, load)),
        "weights": _obstacle(lambda: os.close(os.open(weights, os.O_RDONLY))),
        # A UDP socket can send: if only TCP is blocked, the network can still be reached.
        "network": _obstacle(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()),
        "outside": _obstacle(lambda: Path(outside).write_text("reached")),
    }


def _obstacle(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _compute(device: str, load: Load) -> None:
    """On a GPU also runs a kernel, for which Triton needs a C compiler and an assembler."""
    import torch

    numbers = torch.zeros(16, device=device)
    if device == "cpu":
        numbers += 1.0
    else:
        module = load("reach_kernel", str(Path(__file__).with_name("reach_kernel.py")))
        module.add_one_kernel[(1,)](numbers, SIZE=16)
    if float(numbers.sum()) != 16.0:
        raise RuntimeError(f"sixteen ones summed up to {float(numbers.sum())}")
