"""The most memory this process has had since a moment, beyond what it had then: for engines on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what the kernel takes as "forget the peak"


class ResidentPeak:
    """Counts from when it is made. 0 where the kernel does not tell."""

    def __init__(self) -> None:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # freed memory that is kept would hide new memory
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            RESET.write_text(RESET_PEAK)
        self.before = read_status("VmRSS")

    def read_bytes(self) -> int:
        return max(0, read_status("VmHWM") - self.before)


def read_status(name: str) -> int:
    """Bytes of a line of /proc/self/status, e.g. `VmHWM:   123456 kB`."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
