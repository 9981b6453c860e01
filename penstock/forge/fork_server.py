"""Starts the process that every candidate is forked from. Does not import torch, so that it can run
before this process does: both then import torch in parallel.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START_S = 120.0
KEPT_VARIABLES = ("PATH", "LANG", "CC", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
KEPT_CUDA_VARIABLES = (
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_LIBCUDA_PATH",
    "TRITON_PTXAS_PATH",
)


class ForkServer:
    def __init__(self, device: str) -> None:
        """Prepares for candidates on this device; "auto" may turn out to be a GPU."""
        self.started = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="forge-")
        self.scratch = Path(self._folder.name)
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_S)
        kept = KEPT_VARIABLES + KEPT_CUDA_VARIABLES
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {"HOME": str(self.scratch), "TMPDIR": str(self.scratch)}
        environment |= {"TRITON_CACHE_DIR": str(self.scratch / "compiled")}
        host = Path(__file__).with_name("candidate_process.py")
        kind = "cpu" if device == "cpu" else "cuda"
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(host), str(theirs.fileno()), kind],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=self.scratch,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def fork(self, confinement: Mapping[str, Any]) -> tuple[socket.socket, int]:
        """Forks a process with these restrictions; returns the socket to it, and its id."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [json.dumps(confinement).encode()], [theirs.fileno()])
        theirs.close()
        return ours, json.loads(self._control.recv(1 << 10))["pid"]

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
