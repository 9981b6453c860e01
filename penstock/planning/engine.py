"""One engine of a simulated fleet: the real scheduler and cache, whose steps only take time.

Decode-only steps are alike, so many of them are simulated as one (a leap): a decode that adds
several tokens to each row, as the scheduler plans it for drafts. An arriving request ends a leap
where the engine would see it: with the device one step ahead of the host, the step in flight and
the next one are already planned.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, cast

from penstock.config import EngineConfig
from penstock.engine.policy import MIXED_GPU_TOKENS, new_cache
from penstock.engine.pools import PoolSizes
from penstock.engine.scheduler import Scheduler
from penstock.planning.step_times import StepTimes
from penstock.types import Request, Sequence, StepOutput, StepPlan, TokenDelta

MAX_LEAP = 128  # steps
GAP_STEP = 1.01  # histogram bins of times between tokens are 1 % wide


@dataclass(slots=True)
class Reply:
    """One request, and when its tokens arrived. Seconds of the simulated clock."""

    request: Request
    arrived_s: float
    num_tokens: int  # prompt and reply so far
    num_left: int
    engine: int = 0
    num_due: int = 0  # tokens of its prompt that the router expects to be computed
    first_s: float = math.nan
    last_s: float = math.nan
    num_cached: int = 0

    @property
    def num_generated(self) -> int:
        return self.num_tokens - len(self.request.token_ids)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Mean time between its tokens."""
        return (self.last_s - self.first_s) / max(1, self.num_generated - 1)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The sizes that a scheduler works with."""

    pools: PoolSizes
    max_step_tokens: int
    shared_step_tokens: int


class _Leap:
    """Replaces a drafter: how many tokens the next decodes add."""

    def __init__(self) -> None:
        self.num_tokens = 1

    def drafts(self, sequence: Sequence, most: int) -> tuple[int, tuple[int, ...]]:
        return min(self.num_tokens - 1, most), ()

    def note_tokens(self, sequence: Sequence, num_drafts: int, num_new: int) -> None:
        pass

    def note_end(self, sequence: Sequence) -> None:
        pass


class SimulatedEngine:
    def __init__(self, config: EngineConfig, shape: EngineShape, times: StepTimes) -> None:
        self.now_s = 0.0
        self.end_s = math.inf  # of the running step
        self.busy_s = 0.0
        self.gaps: Counter[int] = Counter()  # between tokens of a reply, by logarithmic bin
        self.num_steps = 0
        self._times = times
        self._leap = _Leap()
        self.scheduler = Scheduler(
            new_cache(config, shape.pools),
            max_rows=shape.pools.max_rows,
            max_step_tokens=shape.max_step_tokens,
            max_model_len=shape.pools.max_model_len,
            shared_step_tokens=shape.shared_step_tokens,
            mixed_step_tokens=config.mixed_step_tokens or MIXED_GPU_TOKENS,
            bulk_share=config.bulk_share,
            decode_tokens=MAX_LEAP,
            speculator=cast(Any, self._leap),
            clock=lambda: self.now_s,
        )
        self._replies: dict[str, Reply] = {}
        self._rows: dict[int, Reply] = {}
        self._inbox: deque[tuple[float, Reply]] = deque()
        self._plan: StepPlan | None = None
        self._step_s = 0.0  # per step of the leap
        self._num_leapt = 1
        self._admitted = False  # by the last plan

    def arrive(self, reply: Reply, at_s: float) -> None:
        """`end_s` may be earlier afterwards."""
        self._inbox.append((at_s, reply))
        if self._plan is None:
            self._begin(at_s)
        elif self._num_leapt > 1:
            begun_s = self.end_s - self._num_leapt * self._step_s
            # The step in flight, and the one planned after it.
            needed = math.ceil((at_s - begun_s) / self._step_s - 1e-9) + 1
            if needed < self._num_leapt:
                self._num_leapt = max(needed, 1)
                self.end_s = begun_s + self._num_leapt * self._step_s

    def end_step(self) -> tuple[list[Reply], list[Reply]]:
        """Replies that have received their first token, and those that have ended."""
        assert self._plan is not None
        plan, self.now_s = self._plan, self.end_s
        # Decodes add as many tokens as steps have passed; others add one.
        leapt = (0,) * self._num_leapt
        token_ids = {row.row: leapt if row.is_decode else (0,) for row in plan.rows if row.samples}
        is_held = self.scheduler.holds_planning
        deltas = self.scheduler.commit(StepOutput(plan.step, token_ids))
        self.busy_s += self._num_leapt * self._step_s
        self.num_steps += self._num_leapt
        begun, ended = self._note(deltas)
        self._plan, self.end_s = None, math.inf
        # The next plan was made when this step began, unless planning waits for its end.
        self._begin(self.now_s if is_held else self.now_s - self._step_s)
        return begun, ended

    def _note(self, deltas: list[TokenDelta]) -> tuple[list[Reply], list[Reply]]:
        begun, ended = [], []
        for delta in deltas:
            reply = self._replies[delta.request_id]
            num_new = len(delta.token_ids)
            first_s = self.now_s - (num_new - 1) * self._step_s
            if math.isnan(reply.first_s):
                reply.first_s = first_s
                reply.num_cached = delta.num_cached_tokens
                begun.append(reply)
            else:
                self.gaps[_bin(first_s - reply.last_s)] += 1
            if num_new > 1:
                self.gaps[_bin(self._step_s)] += num_new - 1
            reply.last_s = self.now_s
            reply.num_tokens += num_new
            reply.num_left -= num_new
            if delta.finish is not None:
                del self._replies[delta.request_id]
                ended.append(reply)
        return begun, ended

    def _begin(self, seen_s: float) -> None:
        """Plans a step with the requests that had arrived by `seen_s`."""
        scheduler, inbox = self.scheduler, self._inbox
        while inbox and (inbox[0][0] <= seen_s or not scheduler.has_work):
            at_s, reply = inbox.popleft()
            self.now_s = max(self.now_s, at_s)
            self._replies[reply.request.id] = reply
            scheduler.submit(reply.request)
        if not scheduler.has_work:
            return
        self._leap.num_tokens = self._longest_leap()
        plan = self._plan = scheduler.plan()
        assert plan is not None, "nothing is in flight, so something can run"
        for admission, request_id in zip(plan.admissions, scheduler.admitted_ids):
            self._rows[admission.row] = self._replies[request_id]
        self._admitted = bool(plan.admissions)
        self._num_leapt = 1
        chunks = [(row.start, len(row.token_ids)) for row in plan.rows if row.token_ids]
        num_rows = len(plan.rows) - len(chunks)
        num_context = sum(self._rows[row.row].num_tokens for row in plan.rows if row.is_decode)
        if chunks:
            self._step_s = self._times.prompts_s(chunks, num_rows, num_context)
        else:
            self._num_leapt = min(row.max_tokens for row in plan.rows)
            num_context += num_rows * self._num_leapt // 2
            self._step_s = self._times.decodes_s(num_rows, num_context)
        self.end_s = self.now_s + self._num_leapt * self._step_s

    def _longest_leap(self) -> int:
        """Steps that will be alike: no request can be admitted, and none ends before the last."""
        scheduler = self.scheduler
        is_only_decodes = scheduler.num_running == scheduler.num_decoding > 0
        is_only_decodes = is_only_decodes and not scheduler.is_contended  # then steps take turns
        if self._inbox or not is_only_decodes or (scheduler.num_waiting and self._admitted):
            return 1
        if scheduler.num_waiting and self._num_leapt == 1 and self._leap.num_tokens == 1:
            # Whether waiting requests could run is known only after a plan that looked.
            self._leap.num_tokens = 2
            return 1
        running = [reply.num_left for reply in self._replies.values() if reply.num_generated]
        return max(1, min(MAX_LEAP, *running)) if running else 1


def _bin(gap_s: float) -> int:
    return round(math.log(max(gap_s, 1e-6)) / math.log(GAP_STEP))


def gap_of(number: int) -> float:
    return float(GAP_STEP**number)
