"""Runs tests in a process where reading or writing past the end of a tensor is fatal.

    python tests/guarded_memory.py tests/test_kernel_*.py

`guarded_memory.cpp` says how. Kernels get plain pointers: the interpreter and `cuda_emulator.py`
read whatever is behind an array, and a value that no result uses changes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.ops.cpu import library

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = library._compiler() if sys.platform == "linux" else None


def run_guarded(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments."""
    assert COMPILER is not None
    guard = library._compiled(SOURCE, COMPILER, ("-O2",))
    environment = {**os.environ, "LD_PRELOAD": str(guard), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )


def run_tests(paths: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return run_guarded(["-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *paths])


if __name__ == "__main__":
    done = run_tests(sys.argv[1:])
    print(done.stdout, done.stderr)
    sys.exit(abs(done.returncode))
