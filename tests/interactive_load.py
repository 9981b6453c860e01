"""Short requests next to bulk load, in simulated time: the real scheduler and cache, with the step
times of Qwen3.5-35B-A3B on an H200 (results/h200). One step is planned ahead, as the engine does on
a GPU.
"""

from __future__ import annotations

import bisect
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.cache import Cache, SessionLimits
from penstock.engine.scheduler import Scheduler
from penstock.types import Request, SamplingParams, StepOutput, StepPlan

H200 = Path(__file__).parent.parent / "results" / "h200"
SHORT = (64, 32)  # tokens of prompt and reply
BULK = (8192, 256)
NUM_BULK = 32  # bulk requests in flight at any time
SHORTS_PER_S = 5.0


class StepTime:
    """Seconds of a step: its tokens share the time of reading weights, and each decoding row adds a
    part.
    """

    def __init__(self) -> None:
        decode = {row["batch"]: row["ms"] for row in _rows("decode")}
        prefill = {row["tokens"]: row["ms"] for row in _rows("prefill") if row["context"] == 1024}
        most, before = sorted(decode)[-1], 128
        self._row_ms = (decode[most] - decode[before]) / (most - before)
        shared = {
            batch: ms - self._row_ms * batch for batch, ms in decode.items() if batch <= before
        }
        self._points = sorted({**shared, **prefill}.items())

    def __call__(self, plan: StepPlan) -> float:
        num_decodes = sum(row.is_decode for row in plan.rows)
        return (self._shared_ms(plan.num_tokens) + self._row_ms * num_decodes) / 1000

    def _shared_ms(self, num_tokens: int) -> float:
        right = bisect.bisect_left(self._points, (num_tokens, 0.0))
        right = min(max(right, 1), len(self._points) - 1)  # extrapolates from the last two points
        (x0, y0), (x1, y1) = self._points[right - 1 : right + 1]
        return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)


def _rows(name: str) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = json.loads((H200 / f"{name}.json").read_text())["rows"]
    return rows


@dataclass(slots=True)
class Times:
    """Latencies of one kind of requests in seconds, in the order in which they ended."""

    to_first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    short: Times
    bulk: Times
    bulk_tokens_per_s: float  # prompts and replies
    plans: list[tuple[float, StepPlan]]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


class Load:
    def __init__(
        self, num_bulk: int, num_short: int, seconds: float, seed: int, **sizes: float
    ) -> None:
        self.now_s = 0.0
        self._seconds = seconds
        limits = SessionLimits(
            max_bytes=0, max_idle_s=1.0, page_bytes=1, slot_bytes=1, max_checkpoints=0
        )
        cache = Cache(
            page_size=64,
            num_pages=20_000,
            num_slots=600,
            session_limits=limits,
            clock=lambda: self.now_s,
        )
        given = {"max_rows": 256, "max_step_tokens": 32768, "shared_step_tokens": 16384}
        given |= {"mixed_step_tokens": 1024, "max_model_len": 40960, **sizes}
        self.scheduler = Scheduler(cache, clock=lambda: self.now_s, **given)  # type: ignore[arg-type]
        self._rng = random.Random(seed)
        self._ids = iter(range(10**9))
        self._arrivals = self._draw_arrivals(num_short)
        self._begun: dict[str, float] = {}
        self._said: set[str] = set()
        self.times = {"short": Times(), "bulk": Times()}
        self._num_bulk_tokens = 0
        for _ in range(num_bulk):
            self._submit("bulk", 0.0)

    def run(self, step_time: Callable[[StepPlan], float]) -> Measured:
        """Works like `Engine.step` with overlap: plan, launch, wait for the step before."""
        in_flight: deque[tuple[StepPlan, float]] = deque()  # with their end times
        plans = []
        device_free_s = 0.0
        while self.now_s < self._seconds and (self._begun or self._arrivals):
            while self._arrivals and self._arrivals[0] <= self.now_s:
                self._submit("short", self._arrivals.popleft())
            if in_flight and self.scheduler.holds_planning:
                self._commit(*in_flight.popleft())
                continue
            plan = self.scheduler.plan()
            if plan is not None:
                device_free_s = max(device_free_s, self.now_s) + step_time(plan)
                in_flight.append((plan, device_free_s))
                plans.append((device_free_s, plan))
            if in_flight and (plan is None or len(in_flight) > 1):
                self._commit(*in_flight.popleft())
            elif plan is None:
                self.now_s = self._arrivals[0] if self._arrivals else self._seconds
        return Measured(
            self.times["short"], self.times["bulk"], self._num_bulk_tokens / self.now_s, plans
        )

    def _draw_arrivals(self, num_short: int) -> deque[float]:
        now_s, arrivals = 2.0, deque[float]()
        for _ in range(num_short):
            now_s += self._rng.expovariate(SHORTS_PER_S)
            arrivals.append(now_s)
        return arrivals

    def _submit(self, kind: str, now_s: float) -> None:
        num_prompt, num_reply = {"short": SHORT, "bulk": BULK}[kind]
        token_ids = tuple(self._rng.randrange(1, 1000) for _ in range(num_prompt))
        sampling = SamplingParams(max_tokens=num_reply)
        request = Request(
            id=f"{kind}-{next(self._ids)}",
            token_ids=token_ids,
            sampling=sampling,
            age_s=self.now_s - now_s,
        )
        self._begun[request.id] = now_s
        self.scheduler.submit(request)

    def _commit(self, plan: StepPlan, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)
        tokens = {row.row: (1,) for row in plan.rows if row.samples}
        for delta in self.scheduler.commit(StepOutput(plan.step, tokens)):
            kind = delta.request_id.split("-")[0]
            if delta.request_id not in self._said:
                self._said.add(delta.request_id)
                self.times[kind].to_first.append(self.now_s - self._begun[delta.request_id])
                self._num_bulk_tokens += BULK[0] if kind == "bulk" else 0
            self._num_bulk_tokens += kind == "bulk"
            if delta.finish is not None:
                self.times[kind].whole.append(self.now_s - self._begun.pop(delta.request_id))
                if kind == "bulk":
                    self._submit("bulk", self.now_s)
