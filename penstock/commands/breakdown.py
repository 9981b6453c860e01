"""Where a decode step's time goes: by kernel, and the share in which the GPU was busy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COLUMNS = ["kernel", "launches a step", "us a step", "share"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel in a step. Overlapping kernels count twice in the sum."""

    name: str
    launches: float
    us: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    kernels: tuple[Kernel, ...]  # the longest first
    step_us: float  # wall clock of the device, first launch to last end
    busy: float  # share of it in which at least one kernel ran

    def as_rows(self) -> list[list[str]]:
        total = sum(kernel.us for kernel in self.kernels)
        return [
            [kernel.name, f"{kernel.launches:g}", f"{kernel.us:.1f}", f"{kernel.us / total:.1%}"]
            for kernel in self.kernels
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "step_us": round(self.step_us, 2),
            "busy": round(self.busy, 4),
            "launches": round(sum(kernel.launches for kernel in self.kernels), 1),
            "kernels": [
                {"name": kernel.name, "launches": kernel.launches, "us": round(kernel.us, 2)}
                for kernel in self.kernels
            ],
        }


def break_down(step: Callable[[], object], num_steps: int) -> Breakdown:
    """Runs the steps under the GPU's profiler, which slows the host: `busy` is a lower bound."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    events = [
        event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    if not spans:
        return Breakdown((), 0.0, 0.0)
    whole = max(end for _, end in spans) - spans[0][0]
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(_short(event.name), []).append(event.time_range.elapsed_us())
    kernels = [Kernel(name, len(us) / num_steps, sum(us) / num_steps) for name, us in times.items()]
    kernels.sort(key=lambda kernel: -kernel.us)
    return Breakdown(tuple(kernels), whole / num_steps, _covered(spans) / whole)


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals that are sorted by their start."""
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _short(name: str) -> str:
    """A C++ kernel's name without its long template arguments."""
    return name.split("<")[0].removeprefix("void ")[:60]
