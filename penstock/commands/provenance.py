"""The provenance of a measurement: the code and the machine, for every report."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock import __version__


def provenance() -> dict[str, Any]:
    """The first fields of all reports; finds torch's version without importing it."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": _commit(),
        "host": platform.node(),
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "torch": importlib.metadata.version("torch"),
        "python": sys.version.split()[0],
    }


def _commit() -> str | None:
    """The commit of this checkout, with a + if files differ from it; None outside of a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )


def gpu_name() -> str | None:
    """The machine's first GPU, from the driver: a benchmark's client must not open the device."""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=30
        ).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return None
    return names[0].strip() or None
