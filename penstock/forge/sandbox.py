"""Runs candidates in processes of their own with limits, over a socket. Trusts no message from
them.

The restrictions depend on the machine (`confine` applies them; before the first trial, `settle`
finds out by a probe which of them work), and the report lists them. Time is always limited: a
candidate that does not answer in time is killed with everything it started.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.forge.confine import CPU_RESTRICTIONS, RESTRICTIONS
from penstock.forge.fork_server import ForkServer
from penstock.forge.run_log import Phases
from penstock.forge.target import Target
from penstock.forge.traces import Call

MAX_LINE = 1 << 20
MAX_PAYLOAD = 1 << 31
WATCH_S = 0.05
PROBE_S = 30.0
MEMORY_SHARE = 0.95  # of a GPU
FILE_BYTES = 1 << 28  # compiled kernels; on a CPU nothing is written
# Paths that a CUDA driver writes to: its devices, shared memory, the names of its threads.
DRIVER_PLACES = ("/dev/null", "/dev/zero", "/dev/shm", "/proc/self")
SELFTEST = Path(__file__).with_name("sandbox_selftest.py")


class CandidateError(Exception):
    """The candidate raised, died, hung or used too much; the text is for the ledger."""


class OutOfTime(CandidateError):
    """It was stopped, and may be correct."""


@dataclass(frozen=True, slots=True)
class Limits:
    seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a trace: seconds of its timed calls, and each call's error or answer."""

    seconds: float
    errors: list[str | None]
    logits: dict[int, Tensor]  # of the kept calls, [R, V] float32
    peak_bytes: int


class Sandbox:
    """Used for a whole run. `host` runs one candidate in it."""

    def __init__(self, target: Target, limits: Limits, server: ForkServer) -> None:
        self.target = target
        self.limits = limits
        self.server = server
        self.scratch = server.scratch
        self.wanted = RESTRICTIONS if target.is_cuda else CPU_RESTRICTIONS
        self.restrictions = list(self.wanted)  # those that work, after `settle`
        self.enforced: dict[str, str] = {}  # descriptions, by restriction
        self.given_up: dict[str, str] = {}  # what did not work, by dropped restriction

    @contextlib.contextmanager
    def host(
        self, source: str, seconds: float = math.inf, phases: Phases | None = None
    ) -> Iterator[Hosted]:
        """A fresh process with the engine of this source built in it."""
        phases = phases or Phases()
        path = self.scratch / f"engine_{time.monotonic_ns()}.py"
        path.write_text(source)
        try:
            with self.life(seconds) as hosted:
                hosted.start(self.target.device)
                phases.end("start")
                hosted.build(path, self.target)
                phases.end("build")
                yield hosted
        finally:
            path.unlink()

    @contextlib.contextmanager
    def life(self, seconds: float) -> Iterator[Hosted]:
        """A fresh process under the present restrictions, killed at the end."""
        limits = Limits(min(seconds, self.limits.seconds), self.limits.memory_bytes)
        connection, pid = self.server.fork(self._confinement(limits))
        hosted = Hosted(connection, pid, limits)
        try:
            time_limit = {"time": f"{self.limits.seconds:.0f} s at most, then killed"}
            self.enforced = time_limit | hosted.read()["enforced"] | hosted.watched
            yield hosted
        finally:
            hosted.end()

    def _confinement(self, limits: Limits) -> dict[str, Any]:
        is_cuda = self.target.is_cuda
        return {
            "restrictions": self.restrictions,
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": FILE_BYTES if is_cuda else 0,
            "readable": ["/"] if is_cuda else self._readable(),
            "writable": self._writable() if is_cuda else ["/dev/null"],
        }

    def _writable(self) -> list[str]:
        """On a GPU: the folder for compiled kernels, and paths that the driver needs."""
        devices = sorted(str(path) for path in Path("/dev").glob("nvidia*"))
        return [str(self.scratch), *DRIVER_PLACES, *devices]

    def _readable(self) -> list[str]:
        """The files of Python and torch, the weights, and the candidate itself."""
        system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom", "/proc/cpuinfo"]
        system.append("/sys/devices")
        python = {sys.prefix, sys.base_prefix, str(Path(torch.__file__).parents[1])}
        ours = (SELFTEST, self.target.weight_dir, self.scratch)
        return [*system, *sorted(python), *map(str, ours)]


class Hosted:
    """A running candidate. Every method raises `CandidateError` if the candidate fails."""

    def __init__(self, connection: socket.socket, pid: int, limits: Limits) -> None:
        self.pid = pid
        self.limits = limits
        self.watched = {"resident memory": f"{limits.memory_bytes >> 20} MiB, watched"}
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._deadline = time.monotonic() + limits.seconds
        self._killed_for: CandidateError | None = None
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def start(self, device: str) -> None:
        """Opens the device, so that this time does not count for the engine."""
        self._write(do="start", device=device, memory_share=MEMORY_SHARE)
        self.read()

    def build(self, path: Path, target: Target) -> None:
        self._write(
            do="build", path=str(path), config=target.config, weights=str(target.weight_dir)
        )
        self.read()

    def reach(self, words: Mapping[str, Any]) -> dict[str, str]:
        """What code in this process can do, see `sandbox_selftest.reach`."""
        self._write(do="reach", path=str(SELFTEST), words=words)
        return {str(what): str(obstacle) for what, obstacle in self.read()["reached"].items()}

    def play(
        self,
        calls: Sequence[Call],
        *,
        keep: Collection[int],
        timed: tuple[int, int] = (-1, -1),
        on_device: bool = True,
    ) -> Played:
        """Plays calls. This process times them, between its message and the candidate's."""
        self._write(do="play", calls=encode_calls(calls, on_device), keep=list(keep), timed=timed)
        seconds = 0.0
        if timed[0] >= 0:
            self.read()
            started = time.perf_counter()
            self._write(go=True)
            self.read()
            seconds = time.perf_counter() - started
        answer = self.read()
        outcomes = answer["outcomes"]
        if len(outcomes) != len(calls):
            raise CandidateError(f"{len(calls)} calls had {len(outcomes)} outcomes")
        errors = [outcome if isinstance(outcome, str) else None for outcome in outcomes]
        return Played(
            seconds, errors, _cut(answer["payload"], outcomes, keep), int(answer["peak_bytes"])
        )

    def profile(self, calls: Sequence[Call], part: tuple[int, int]) -> dict[str, float]:
        """Seconds by kind of work."""
        self._write(do="profile", calls=encode_calls(calls, True), slice=part)
        return {str(kind): float(seconds) for kind, seconds in self.read()["parts"].items()}

    def read(self) -> dict[str, Any]:
        """The next message, with the bytes after it as `payload`."""
        try:
            self._connection.settimeout(self._time_left())
            line = self._lines.readline(MAX_LINE)
            message = json.loads(line) if line else {}
            if isinstance(message, dict) and message:
                message["payload"] = self._lines.read(min(int(message["bytes"]), MAX_PAYLOAD))
        except TimeoutError:
            raise self._out_of_time() from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            invalid = CandidateError(f"sent an invalid message: {error}")
            raise self._killed_for or invalid from None
        if not message or self._killed_for:
            raise self._killed_for or CandidateError("died without a message")
        if not isinstance(message, dict) or "error" in message:
            raise CandidateError(
                str(message["error"] if isinstance(message, dict) else message)[:2000]
            )
        return message

    def end(self) -> None:
        """Kills the candidate and what it started, and only these: its group has its own id."""
        self._is_over.set()
        self._kill()
        self._connection.close()
        self._watcher.join()

    def _write(self, **message: Any) -> None:
        try:
            self._connection.settimeout(self._time_left())
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            raise self._out_of_time() from None
        except OSError as error:
            raise self._killed_for or CandidateError(f"cannot be reached: {error}") from None

    def _time_left(self) -> float:
        """Time left for all messages together, so that short answers cannot add up to more."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._out_of_time()
        return left

    def _out_of_time(self) -> OutOfTime:
        return OutOfTime(f"out of time: more than {self.limits.seconds:.3g} s")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._is_over.wait(WATCH_S):
            try:
                resident = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * page
            except (OSError, IndexError):
                return
            if resident > self.limits.memory_bytes:
                self._killed_for = CandidateError(f"out of memory: {resident >> 20} MiB resident")
            elif time.monotonic() > self._deadline:  # one that sends a byte now and then
                self._killed_for = self._out_of_time()
            if self._killed_for:
                self._kill()
                return


def encode_calls(calls: Sequence[Call], on_device: bool) -> list[Any]:
    return [(call.kind, call.ids, call.tokens, on_device) for call in calls]


def _cut(payload: bytes, outcomes: list[Any], keep: Collection[int]) -> dict[int, Tensor]:
    """Splits the payload into the logits of the kept calls."""
    logits: dict[int, Tensor] = {}
    numbers = (
        torch.frombuffer(bytearray(payload), dtype=torch.float32) if payload else torch.empty(0)
    )
    start = 0
    for number in sorted(keep):
        shape = outcomes[number]
        if not isinstance(shape, list) or len(shape) != 2:
            continue
        size = int(shape[0]) * int(shape[1])
        if start + size > len(numbers):
            raise CandidateError("sent fewer logits than it announced")
        logits[number] = numbers[start : start + size].view(int(shape[0]), int(shape[1]))
        start += size
    return logits


@dataclass(frozen=True, slots=True)
class Reach:
    """What a probe could do: empty if it could, otherwise what prevented it."""

    device: str
    weights: str = ""
    network: str = ""
    outside: str = ""  # reading a file outside of the allowed paths

    @property
    def obstacle(self) -> str:
        return self.device or self.weights


def settle(sandbox: Sandbox) -> Reach:
    """Selects the strongest restrictions under which the sandbox's device works."""
    reached = probe(sandbox)
    if not reached.obstacle:
        return reached
    sandbox.restrictions = []
    if obstacle := probe(sandbox).obstacle:
        raise PenstockError(
            f"{sandbox.target.device} does not work in a process of its own, even without "
            "restrictions",
            obstacle,
            "Run `penstock inspect` to see whether it works at all.",
        )
    for restriction in sandbox.wanted:
        kept = sandbox.restrictions
        sandbox.restrictions = [*kept, restriction]
        if obstacle := probe(sandbox).obstacle:
            sandbox.given_up[restriction] = obstacle
            sandbox.restrictions = kept
    return probe(sandbox)


def probe(sandbox: Sandbox) -> Reach:
    """What can be done under the sandbox's current restrictions."""
    with tempfile.TemporaryDirectory(prefix="forge-outside-") as folder:
        # The first probe fills the candidates' own cache for them. A later one gets a new cache: it
        # must compile its kernel under its own restrictions, not read it.
        own = sandbox.scratch / "compiled"
        words = {
            "device": sandbox.target.device,
            "compiled": tempfile.mkdtemp(dir=sandbox.scratch) if own.exists() else str(own),
            "weights": str(sandbox.target.weight_dir / "model.pt"),
            "outside": str(Path(folder) / "reached"),
        }
        try:
            with sandbox.life(PROBE_S) as hosted:
                return Reach(**hosted.reach(words))
        except CandidateError as error:
            return Reach(device=str(error))
