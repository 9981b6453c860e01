"""An engine in this process, behind the same `play` as one in the sandbox: for people who trust theirs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.forge.candidate_process import fault_of_answer, load_file
from penstock.forge.resident import ResidentPeak
from penstock.forge.sandbox import CandidateError, Played
from penstock.forge.target import Target
from penstock.forge.traces import Call

FOUND_THREADS = torch.get_num_threads()


def load_module(path: Path) -> ModuleType:
    if not path.exists():
        raise PenstockError(f"There is no {path}", "", "`bash run.sh` writes workspace/engine.py.")
    try:
        return load_file(f"engine_{path.stem}_{time.monotonic_ns()}", str(path))
    except Exception as error:  # whatever its first lines raise
        raise PenstockError(
            f"{path} cannot be loaded",
            f"{type(error).__name__}: {error}",
            "It is loaded without an entry in sys.modules, so @dataclass fails in it where annotations are"
            " postponed.",
        ) from error


class LocalPlayer:
    """A fresh engine of a module's."""

    def __init__(self, module: ModuleType, target: Target) -> None:
        self.device = target.device
        self.is_cuda = target.is_cuda
        torch.set_num_threads(FOUND_THREADS)  # an engine before this one may have changed it
        self.resident = ResidentPeak()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        self.engine: Any = module.create_engine(dict(target.config), str(target.weight_dir), target.device)
        self._wait()
        self.build_s = time.perf_counter() - started

    def play(
        self,
        calls: Sequence[Call],
        *,
        keep: Sequence[int],
        timed: tuple[int, int] = (-1, -1),
        on_device: bool = True,
        enough_s: float = math.inf,
    ) -> Played:
        """Timed calls end early once they have taken `enough_s`: the engine is then emptied, and there are
        outcomes of the calls that were played."""
        prepared = [self._prepare(call, on_device) for call in calls]
        errors: list[str | None] = []
        kept: dict[int, Tensor] = {}
        started = seconds = 0.0
        for number, (call, tokens) in enumerate(zip(calls, prepared)):
            if number == timed[0]:
                self._wait()
                started = time.perf_counter()
            try:
                logits = self._call(call, tokens)
            except CandidateError:
                raise
            except Exception as error:  # a refusal, or a fault: the gate knows which was due
                errors.append(f"{type(error).__name__}: {error}")
            else:
                errors.append(None)
                if logits is not None and number in keep:
                    kept[number] = logits
            is_timed = timed[0] <= number < timed[1]
            is_enough = is_timed and enough_s < math.inf and self._seconds_since(started) >= enough_s
            if number == timed[1] - 1 or is_enough:
                self._wait()
                kept = {one: logits.clone() for one, logits in kept.items()}  # before the clock stops
                seconds = self._seconds_since(started)
            if is_enough:
                self._empty(calls[: number + 1])
                break
        logits_here = {number: logits.float().cpu() for number, logits in kept.items()}
        return Played(seconds, errors, logits_here, self._peak_bytes())

    def _prepare(self, call: Call, on_device: bool) -> Any:
        place = self.device if on_device else "cpu"
        if call.kind == "prefill":
            return [torch.tensor(prompt, dtype=torch.int64, device=place) for prompt in call.tokens]
        return torch.tensor([one for (one,) in call.tokens], dtype=torch.int64, device=place)

    def _call(self, call: Call, tokens: Any) -> Tensor | None:
        ids = list(call.ids)
        if call.kind == "remove":
            self.engine.remove(ids)
            return None
        run = self.engine.prefill if call.kind == "prefill" else self.engine.decode
        logits: Tensor = run(ids, tokens)
        if fault := fault_of_answer(logits, self.device):
            raise CandidateError(fault)
        return logits

    def _empty(self, played: Sequence[Call]) -> None:
        """Removes the requests that these calls have left."""
        alive: dict[str, None] = {}
        for call in played:
            if call.kind == "prefill":
                alive |= dict.fromkeys(call.ids)
            elif call.kind == "remove":
                alive = {id: None for id in alive if id not in call.ids}
        if alive:
            self.engine.remove(list(alive))

    def _seconds_since(self, started: float) -> float:
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self.is_cuda else self.resident.read_bytes()
