"""The process in which candidate engines run. Imports nothing of Penstock but the file beside it.

One process imports torch and then forks for every candidate, so that a trial does not wait for
imports. The child drops its privileges (`confine`) before the candidate's first line runs, and then
obeys the judge in the other process: build, play calls, return logits, profile. The judge has the
clock and the right answers. Messages are lines of JSON, followed by logits as raw float32: the
judge never unpickles anything from here.
"""

from __future__ import annotations

import array
import contextlib
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_MESSAGE = 1 << 26
Confine = Callable[[list[str], dict[str, Any]], dict[str, str]]


class NoLogits(Exception):
    """A call returned no logits. Ends the candidate, since it could be taken for a refusal."""


class PenstockRefused(importlib.abc.MetaPathFinder):
    """Keeps engines from importing penstock: they must be self-contained."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == "penstock":
            raise ImportError("an engine may not import penstock")


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for ending in (signal.SIGINT, signal.SIGTERM):  # the judge handles them, and ends this process
        signal.signal(ending, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    confine = load_file("confine", str(Path(__file__).with_name("confine.py"))).confine
    import_for_all(sys.argv[2] == "cuda")
    sys.meta_path.insert(0, PenstockRefused())
    while True:
        message, ancillary, _, _ = control.recvmsg(
            1 << 16, socket.CMSG_SPACE(array.array("i").itemsize)
        )
        if not message:
            return
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2][: descriptors.itemsize])
        pid = os.fork()
        if pid == 0:
            control.close()
            _live(socket.socket(fileno=descriptors[0]), json.loads(message), confine)
            os._exit(0)
        os.close(descriptors[0])
        control.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def load_file(name: str, path: str) -> ModuleType:
    """Does not register it in sys.modules: an engine must load without that, as in a course."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_for_all(with_kernels: bool) -> None:
    """Imports what every candidate needs. Must not open a GPU: such a process cannot fork."""
    import torch
    import torch.autograd.profiler
    import torch.nn.functional  # noqa: F401

    if with_kernels and importlib.util.find_spec("triton"):
        import triton.language.extra.cuda  # noqa: F401

        know_kernels_that_moved()


def know_kernels_that_moved() -> None:
    """Stops Triton from recompiling kernels that moved to another line, as most do."""
    from triton.runtime import jit

    JITCallable: Any = getattr(jit, "JITCallable", jit.JITFunction)
    build: Any = JITCallable.__init__

    def build_without_line(self: Any, *words: Any) -> None:
        build(self, *words)
        self.starting_line_number = 1

    JITCallable.__init__ = build_without_line


def fault_of_answer(answer: Any, device: str) -> str:
    """Why this answer is not valid logits, or empty. Only a plain tensor is accepted: a lazy one
    would compute after the clock has stopped.
    """
    import torch

    if type(answer) is not torch.Tensor:
        return f"answered with a {type(answer).__name__}; a torch.Tensor is expected"
    if answer.device.type != device.partition(":")[0] or not answer.is_floating_point():
        return f"answered with {answer.dtype} on {answer.device}; logits on {device} are expected"
    return ""


def _live(connection: socket.socket, limits: dict[str, Any], confine: Confine) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # compilers are children that are waited for
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.setsid()
    for descriptor in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    session = Session(connection)
    session.send({"enforced": confine(limits["restrictions"], limits)})
    while (command := session.receive()) is not None:
        try:
            session.obey(command)
        except BaseException as error:
            session.send({"error": f"{type(error).__name__}: {error}"[:2000]})


class EnginePlayer:
    """Plays calls with an engine; the same in a candidate's process and in an evaluator's own."""

    def __init__(self, engine: Any, device: str) -> None:
        self.engine = engine
        self.device = device

    def play(
        self,
        calls: Sequence[Any],  # kind, ids, tokens, and whether these are on the device
        keep: Container[int],
        timed: Sequence[int],  # first timed call, and end (exclusive)
        start: Callable[[], Any],
        stop: Callable[[], Any],
        is_enough: Callable[[], bool] = lambda: False,
    ) -> tuple[list[Any], dict[int, Any]]:
        """Returns, for each call, what it raised, the shape of its answer, or None; and the kept
        logits. Ends early, after a timed call, once `is_enough`.
        """
        outcomes: list[Any] = []
        kept: dict[int, Any] = {}
        for number, call in enumerate([self.prepare(*call) for call in calls]):
            if number == timed[0]:
                self.wait()
                start()
            try:
                logits = self.call(*call)
            except NoLogits:
                raise
            except Exception as error:  # a refusal or a fault: the gate knows which is expected
                outcomes.append(f"{type(error).__name__}: {error}"[:300])
            else:
                outcomes.append(None if logits is None else list(logits.shape))
                if logits is not None and number in keep:
                    kept[number] = logits
            is_cut = timed[0] <= number < timed[1] and is_enough()
            if is_cut or number == timed[1] - 1:
                self.wait()
                # Results that a thread computes after this are too late.
                kept = {one: logits.clone() for one, logits in kept.items()}
                self.wait()
                stop()
            if is_cut:
                break
        return outcomes, kept

    def prepare(
        self, kind: str, ids: Sequence[str], tokens: Any, on_device: bool
    ) -> tuple[str, list[str], Any]:
        import torch

        place = self.device if on_device else "cpu"
        if kind == "prefill":
            prompts = [torch.tensor(prompt, dtype=torch.int64, device=place) for prompt in tokens]
            return kind, list(ids), prompts
        flat = [one for (one,) in tokens]
        return kind, list(ids), torch.tensor(flat, dtype=torch.int64, device=place)

    def call(self, kind: str, ids: list[str], tokens: Any) -> Any:
        if kind == "remove":
            self.engine.remove(ids)
            return None
        run = self.engine.prefill if kind == "prefill" else self.engine.decode
        logits = run(ids, tokens)
        if fault := fault_of_answer(logits, self.device):
            raise NoLogits(fault)
        return logits

    def wait(self) -> None:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()


class Session:
    """One candidate: its engine, and the connection to the judge."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = connection.makefile("rb")
        self.player = EnginePlayer(None, "cpu")

    def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        line = json.dumps({**message, "bytes": len(payload)})
        self.connection.sendall(line.encode() + b"\n" + payload)

    def receive(self) -> dict[str, Any] | None:
        line = self.lines.readline(MAX_MESSAGE)
        return json.loads(line) if line else None

    def obey(self, command: dict[str, Any]) -> None:
        if command["do"] == "start":
            self._start(command)
        elif command["do"] == "build":
            self._build(command)
        elif command["do"] == "play":
            self._play(command)
        elif command["do"] == "profile":
            self.send({"parts": self._profile(command["calls"], command["slice"])})
        elif command["do"] == "reach":
            test = load_file("reach", command["path"])
            self.send({"reached": test.reach(load_file, **command["words"])})

    def _start(self, command: dict[str, Any]) -> None:
        import torch

        self.player.device = command["device"]
        if self.player.device != "cpu":
            torch.cuda.set_per_process_memory_fraction(command["memory_share"])
            torch.zeros(1, device=self.player.device)
            torch.cuda.reset_peak_memory_stats()
        self.send({"started": True})

    def _build(self, command: dict[str, Any]) -> None:
        build = load_file("engine", command["path"]).create_engine
        self.player.engine = build(command["config"], command["weights"], self.player.device)
        self.player.wait()
        self.send({"built": True})

    def _play(self, command: dict[str, Any]) -> None:
        """Exchanges a message with the judge, which has the clock, before and after timed calls."""

        def ask_to_start() -> None:
            self.send({"ready": True})
            self.receive()

        outcomes, kept = self.player.play(
            command["calls"],
            command["keep"],
            command["timed"],
            start=ask_to_start,
            stop=lambda: self.send({"done": True}),
        )
        payload = b"".join(
            logits.float().cpu().numpy().tobytes() for _, logits in sorted(kept.items())
        )
        self.send({"outcomes": outcomes, "peak_bytes": self._peak_bytes()}, payload)

    def _peak_bytes(self) -> int:
        import torch

        if self.player.device != "cpu":
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _profile(self, calls: list[Any], part: list[int]) -> dict[str, float]:
        """Seconds by kind of work: total time without a profiler, proportions with one. All time is
        "unseen" if profiling the device is not permitted.
        """
        from torch.autograd import DeviceType
        from torch.autograd.profiler import profile  # torch.profiler would import a compiler first

        player, (start, stop) = self.player, part
        prepared, on_gpu = [player.prepare(*call) for call in calls], player.device != "cpu"

        def play(profiler: Any) -> float:
            for call in prepared[:start]:
                player.call(*call)
            player.wait()
            with profiler or contextlib.nullcontext():
                began = time.perf_counter()
                for call in prepared[start:stop]:
                    player.call(*call)
                player.wait()
                return time.perf_counter() - began

        wall = play(None)  # later, the same requests replace themselves
        # Only Kineto sees kernels; its averages by name take longer than the work.
        profiler = profile(use_device="cuda" if on_gpu else None, use_kineto=True)
        play(profiler)
        results: Any = profiler.kineto_results
        spans = [
            (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
            for event in results.events()
            if (event.device_type() != DeviceType.CPU) == on_gpu
        ]
        totals: dict[str, float] = {}
        for name, seconds in (time_in_turn(spans) if on_gpu else time_of_innermost(spans)).items():
            kind = kind_of_work(name)
            totals[kind] = totals.get(kind, 0.0) + seconds
        busy = sum(totals.values())
        if on_gpu and not busy:
            return {"unseen": wall}
        # A profiler slows small operations down: busy time is limited to 95 % of the wall time.
        scale = min(1.0, 0.95 * wall / busy) if busy else 1.0
        parts = {kind: seconds * scale for kind, seconds in totals.items()}
        return {**parts, "launch": max(0.0, wall - sum(parts.values()))}


Span = tuple[int, int, str]  # start and end in nanoseconds, and a name


def time_of_innermost(spans: list[Span]) -> dict[str, float]:
    """Seconds by name; time in nested operations counts for the innermost."""
    totals: dict[str, float] = {}
    running: list[Span] = []
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while running and running[-1][1] <= start:
            running.pop()
        if running:
            totals[running[-1][2]] -= (end - start) / 1e9
        totals[name] = totals.get(name, 0.0) + (end - start) / 1e9
        running.append((start, end, name))
    return totals


def time_in_turn(spans: list[Span]) -> dict[str, float]:
    """Seconds by name; overlapping time counts for the kernel that started first."""
    totals: dict[str, float] = {}
    until = 0
    for start, end, name in sorted(spans):
        totals[name] = totals.get(name, 0.0) + max(0, end - max(start, until)) / 1e9
        until = max(until, end)
    return totals


_KINDS = {
    "attention": "attention flash fmha bmm softmax merge_splits sdpa",
    "projection": "mm gemm linear mv cutlass nvjet product sum_parts splitk",
}


def kind_of_work(name: str) -> str:
    """The kind of an operation or a kernel, from its name."""
    lowered = name.lower()
    kinds = (
        kind for kind, words in _KINDS.items() if any(map(lowered.__contains__, words.split()))
    )
    return next(kinds, "small")


if __name__ == "__main__":
    main()
