"""An engine in this process, behind the same `play` as one in the sandbox: for trusted code."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.forge.candidate_process import EnginePlayer, NoLogits, load_file
from penstock.forge.sandbox import CandidateError, Played, encode_calls
from penstock.forge.target import Target
from penstock.forge.traces import Call

FOUND_THREADS = torch.get_num_threads()
STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # the kernel's code to reset the peak


def load_module(path: Path) -> ModuleType:
    if not path.exists():
        raise PenstockError(f"There is no {path}", "", "`bash run.sh` writes workspace/engine.py.")
    try:
        return load_file(f"engine_{path.stem}_{time.monotonic_ns()}", str(path))
    except Exception as error:  # its top-level code may raise anything
        raise PenstockError(
            f"{path} cannot be loaded",
            f"{type(error).__name__}: {error}",
            "It is loaded without an entry in sys.modules, so @dataclass fails in it where "
            "annotations are postponed.",
        ) from error


class LocalPlayer:
    """A new engine from a module."""

    def __init__(self, module: ModuleType, target: Target) -> None:
        self.is_cuda = target.is_cuda
        torch.set_num_threads(FOUND_THREADS)  # an engine before this one may have changed it
        self.resident = ResidentPeak()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        self.engine: Any = module.create_engine(
            dict(target.config), str(target.weight_dir), target.device
        )
        self.player = EnginePlayer(self.engine, target.device)
        self.player.wait()
        self.build_s = time.perf_counter() - started

    def play(
        self,
        calls: Sequence[Call],
        *,
        keep: Collection[int],
        timed: tuple[int, int] = (-1, -1),
        on_device: bool = True,
        enough_s: float = math.inf,
    ) -> Played:
        """Timed calls end early once they have taken `enough_s`: the engine is then emptied, and
        only the calls that were played have outcomes.
        """
        clock: list[float] = []

        def is_enough() -> bool:
            if enough_s == math.inf:
                return False
            self.player.wait()
            return time.perf_counter() - clock[0] >= enough_s

        def tick() -> None:
            clock.append(time.perf_counter())

        try:
            outcomes, kept = self.player.play(
                encode_calls(calls, on_device),
                keep,
                timed,
                start=tick,
                stop=tick,
                is_enough=is_enough,
            )
        except NoLogits as error:
            raise CandidateError(str(error)) from None
        if len(outcomes) < len(calls):
            self._empty(calls[: len(outcomes)])
        errors = [outcome if isinstance(outcome, str) else None for outcome in outcomes]
        logits = {number: answer.float().cpu() for number, answer in kept.items()}
        peak_bytes = (
            torch.cuda.max_memory_allocated() if self.is_cuda else self.resident.read_bytes()
        )
        return Played(clock[1] - clock[0] if clock else 0.0, errors, logits, peak_bytes)

    def _empty(self, played: Sequence[Call]) -> None:
        """Removes the requests that these calls left in the engine."""
        alive: dict[str, None] = {}
        for call in played:
            if call.kind == "prefill":
                alive |= dict.fromkeys(call.ids)
            elif call.kind == "remove":
                alive = {id: None for id in alive if id not in call.ids}
        if alive:
            self.engine.remove(list(alive))


class ResidentPeak:
    """The growth of this process's peak memory since this object was created. 0 if the kernel does
    not report it.
    """

    def __init__(self) -> None:
        gc.collect()
        # Freed memory that malloc keeps would hide new allocations.
        with contextlib.suppress(OSError, AttributeError):
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
