"""Chooses the device of an engine and makes it current.

Triton launches on the current device of the thread, and events and streams are created there,
wherever the tensors are. A process with one engine selects its device once; a library must not
change its caller's current device, so engines also enter theirs for every step.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from penstock.errors import ConfigError

PROCESS_MEMORY = Path("/proc/self/statm")  # in pages; the second number is the resident size


def pick_device(name: str) -> str:
    """The name of an available device."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"The device {name!r} does not exist", "", "Use auto, cpu, cuda or cuda:N."
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"The device {name!r} is not available",
            f"torch {torch.__version__} sees no CUDA device.",
            "Use --device cpu, or install a CUDA build of torch and a driver.",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        num_devices = torch.cuda.device_count()
        raise ConfigError(
            f"The device {name!r} is not available",
            f"torch sees {num_devices} CUDA devices, cuda:0 to cuda:{num_devices - 1}.",
            "Use one of those; CUDA_VISIBLE_DEVICES selects the GPUs.",
        )
    return name


def select_device(name: str) -> None:
    """Makes the device current for this thread from now on: for processes with one engine."""
    device = torch.device(pick_device(name))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device current inside a `with`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def used_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """On a GPU for all processes, on a CPU for this process and the machine. Zeros if the system
    does not say.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free, total
    try:
        used_pages = int(PROCESS_MEMORY.read_text().split()[1])
        page_bytes, num_pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return 0, 0
    return used_pages * page_bytes, num_pages * page_bytes


def leave_a_core(num_ranks: int = 1) -> None:
    """Uses all cores but one, or this rank's share of them, unless OMP_NUM_THREADS is set. Only for
    our own processes.

    torch's threads spin while they wait for each other. When one of them has no core to itself,
    every operation waits for the operating system's next time slice: tokens came twenty times
    slower.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, ((os.cpu_count() or 1) - 1) // num_ranks))
