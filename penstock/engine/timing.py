"""Where the time of steps goes, by phase and by layer, with `--timing`: one line per second.

Every op is timed on its device, so steps are launched op by op and not as graphs: they are slower,
but the proportions hold. A phase includes everything its fused kernels compute: `projection`
includes the norm before it and the residual after it, `route` its norm, `expert` the shared expert
and the weighted sum. On a CPU `io` is the time the store waited.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch

from penstock.ops.dispatch import watched

PHASE_OF = {
    "rms_norm": "norm",
    "linear": "projection",
    "norm_linear": "projection",
    "swiglu_linear": "projection",
    "rope_and_store": "attention",
    "paged_attention": "attention",
    "gated_delta_net": "attention",
    "norm_route": "route",
    "take_slots": "io",
    "fetch_experts": "io",
    "sparse_mlp": "expert",
}
PHASES = ("norm", "projection", "attention", "route", "io", "expert", "other")
LAST_OPS = ("sparse_mlp", "swiglu_linear")  # the last op of a layer
LINE_S = 1.0

Interval = tuple[str, int, Callable[[], float]]  # phase, layer, seconds when available


@dataclass(slots=True)
class StepTimer:
    device: torch.device
    to: TextIO = field(default_factory=lambda: sys.stderr)
    waited_s: Callable[[], float] = lambda: 0.0  # for a store that copies without an op
    # Since the last line.
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by phase
    by_layer: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    num_steps: int = 0
    _intervals: list[Interval] = field(default_factory=list)
    _layer: int = 0
    _started: float = field(default_factory=time.perf_counter)
    _waited: float = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times the ops of one step."""
        self._layer = 0
        with watched(self._watch):
            yield
        self.num_steps += 1
        if time.perf_counter() - self._started >= LINE_S:
            self._print()

    def _watch(
        self,
        reference: Callable[..., Any],
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        name = reference.__name__
        ended = self._start()
        result = run(*args, **kwargs)
        self._intervals.append((PHASE_OF.get(name, "other"), self._layer, ended()))
        self._layer += name in LAST_OPS
        return result

    def _start(self) -> Callable[[], Callable[[], float]]:
        if self.device.type != "cuda":
            started = time.perf_counter()

            def stop() -> Callable[[], float]:
                seconds = time.perf_counter() - started
                return lambda: seconds

            return stop
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()

        def record() -> Callable[[], float]:
            end.record()
            return lambda: begin.elapsed_time(end) / 1e3

        return record

    def collect(self) -> None:
        """Adds up the new intervals; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for phase, layer, seconds in self._intervals:
            spent = seconds()
            self.seconds[phase] += spent
            self.by_layer[layer] += spent
        self._intervals.clear()
        waited = self.waited_s()
        self.seconds["io"] += waited - self._waited
        self._waited = waited

    def _print(self) -> None:
        self.collect()
        now = time.perf_counter()
        print(self.line(now - self._started), file=self.to, flush=True)
        self.seconds.clear()
        self.by_layer.clear()
        self.num_steps, self._started = 0, now

    def line(self, elapsed: float) -> str:
        """Milliseconds per step by phase, and the slowest layer."""
        count = max(self.num_steps, 1)
        parts = [f"{1e3 * self.seconds[one] / count:.2f} {one}" for one in PHASES]
        slowest, spent = max(self.by_layer.items(), key=lambda one: one[1], default=(0, 0.0))
        return (
            f"timing: {self.num_steps / elapsed:.1f} steps/s, ms per step: {', '.join(parts)}; "
            f"slowest layer {slowest}: {1e3 * spent / count:.2f}"
        )
