"""The engines of one machine behind the real router: every request of a load, in order of time."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.config import EngineConfig
from penstock.digests import PageDigests
from penstock.errors import ConfigError, RequestError
from penstock.eval.traces import Arrival
from penstock.planning.engine import EngineShape, Reply, SimulatedEngine
from penstock.planning.step_times import StepTimes
from penstock.serve.routing import Router
from penstock.types import Request, SamplingParams

_LIMIT = re.compile(r"(ttft|itl)=(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a reply must meet to count: its TTFT, and the mean time between its tokens."""

    ttft_s: float = math.inf
    itl_s: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=500ms,itl=30ms`, or one of them."""
        found: dict[str, float] = {}
        for part in text.split(",") if text else ():
            match = _LIMIT.fullmatch(part.strip())
            if match is None or match[1] in found:
                raise ConfigError(
                    f"--slo is {text!r}",
                    f"{part.strip()!r} is not a limit, or a second one.",
                    "Write ttft=500ms,itl=30ms, or one of them.",
                )
            found[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
        return cls(found.get("ttft", math.inf), found.get("itl", math.inf))

    def is_kept(self, ttft_s: float, tpot_s: float) -> bool:
        return ttft_s <= self.ttft_s and tpot_s <= self.itl_s

    def in_words(self) -> str:
        parts = [("first token", self.ttft_s), ("between tokens", self.itl_s)]
        given = [f"{name} <= {1e3 * limit:g} ms" for name, limit in parts if limit < math.inf]
        return ", ".join(given) or "no limits"


# From a client's request to its prompt in the engine, and back: measured at 5 requests a second.
SERVER_S = 0.004
_MAX_SAMPLING = 4096


@dataclass(slots=True)
class NodeRun:
    """The result of a load."""

    replies: list[Reply] = field(default_factory=list)
    gaps: Counter[int] = field(default_factory=Counter)
    busy_s: float = 0.0  # of all engines together
    num_refused: int = 0  # requests that no engine has room for
    num_preemptions: int = 0
    num_steps: int = 0
    end_s: float = 0.0


class Node:
    def __init__(
        self, config: EngineConfig, shape: EngineShape, times: StepTimes, num_engines: int
    ) -> None:
        self._config = config
        self._engines = [SimulatedEngine(config, shape, times) for _ in range(num_engines)]
        self._router = Router(num_engines)
        self._everyone = range(num_engines)
        self._ends: list[tuple[float, int]] = []  # of steps: a heap that includes outdated entries
        self._num_requests = 0
        self._slo = Slo()
        self._num_missed = 0
        self.run = NodeRun()

    def play(self, arrivals: Iterable[Arrival]) -> NodeRun:
        """An open load: requests arrive at given times."""
        for arrival in arrivals:
            self._advance(arrival.at_s)
            self._send(arrival, arrival.at_s)
        self._advance(math.inf)
        return self._close()

    def count_missed(self, arrivals: Iterable[Arrival], slo: Slo, most: int) -> int:
        """How many requests miss the SLO; stops as soon as there are more than `most`."""
        self._slo = slo
        for arrival in arrivals:
            self._advance(arrival.at_s, most)
            if self._num_missed > most:
                break
            self._send(arrival, arrival.at_s)
        self._advance(math.inf, most)
        return self._num_missed + self.run.num_refused

    def play_levels(self, arrivals: Sequence[Arrival], concurrency: int) -> NodeRun:
        """A closed load: this many clients, each with one request at a time."""
        queue = iter(arrivals)
        for _, arrival in zip(range(concurrency - 1), queue):
            self._send(arrival, 0.0)
        self._send_next(queue, 0.0)
        while self._ends:
            for reply in self._advance_once():
                self._send_next(queue, reply.last_s)
        return self._close()

    def _send_next(self, queue: Iterator[Arrival], at_s: float) -> None:
        arrival = next(queue, None)
        if arrival is not None:
            self._send(arrival, at_s)

    def _send(self, arrival: Arrival, at_s: float) -> None:
        self._num_requests += 1
        request = request_of(arrival, str(self._num_requests), self._config)
        index, num_due = self._router.pick(request, self._everyone)
        engine, load = self._engines[index], self._router.loads[index]
        if request.num_prompt_tokens + arrival.output_len > engine.scheduler.max_model_len:
            self.run.num_refused += 1
            return
        reply = Reply(request, at_s, len(request.token_ids), arrival.output_len, index, num_due)
        load.num_requests += 1
        load.num_prompt_tokens += num_due
        before = engine.end_s
        try:
            engine.arrive(reply, at_s + SERVER_S)
        except RequestError:
            self.run.num_refused += 1
            load.num_requests -= 1
            load.num_prompt_tokens -= num_due
        if engine.end_s != before:
            heapq.heappush(self._ends, (engine.end_s, index))

    def _advance(self, until_s: float, max_missed: float = math.inf) -> None:
        while self._ends and self._ends[0][0] <= until_s and self._num_missed <= max_missed:
            self._advance_once()

    def _advance_once(self) -> list[Reply]:
        end_s, index = heapq.heappop(self._ends)
        engine, load = self._engines[index], self._router.loads[index]
        if end_s != engine.end_s:  # the leap became shorter
            return []
        begun, ended = engine.end_step()
        for reply in begun:
            load.num_prompt_tokens -= reply.num_due
            self._num_missed += reply.ttft_s > self._slo.ttft_s
        for reply in ended:
            self._num_missed += reply.ttft_s <= self._slo.ttft_s and reply.tpot_s > self._slo.itl_s
        load.num_requests -= len(ended)
        self.run.replies += ended
        self.run.end_s = max(self.run.end_s, end_s)
        if engine.end_s < math.inf:
            heapq.heappush(self._ends, (engine.end_s, index))
        return ended

    def _close(self) -> NodeRun:
        for engine in self._engines:
            self.run.gaps.update(engine.gaps)
            self.run.busy_s += engine.busy_s
            self.run.num_preemptions += engine.scheduler.num_preemptions
            self.run.num_steps += engine.num_steps
        return self.run


def request_of(arrival: Arrival, request_id: str, config: EngineConfig) -> Request:
    """With token ids that are equal where the trace says that prompts are."""
    token_ids: tuple[int, ...] = (0,) * arrival.input_len
    digests = None
    if config.prefix_cache:
        width = arrival.block_tokens
        own = len(arrival.block_ids) * width
        named = tuple(block for block in arrival.block_ids for _ in range(width))
        # After the named blocks, every prompt is unique.
        unnamed = (2**31 + int(request_id),) * max(arrival.input_len - own, 0)
        token_ids = (named + unnamed)[: arrival.input_len]
        digests = PageDigests.of(token_ids, config.page_size)
    return Request(
        id=request_id,
        token_ids=token_ids,
        sampling=_sampling(arrival.output_len),
        page_digests=digests,
    )


_samplings: dict[int, SamplingParams] = {}


def _sampling(num_tokens: int) -> SamplingParams:
    """Cached: thousands of requests differ only in this number."""
    if num_tokens not in _samplings and len(_samplings) < _MAX_SAMPLING:
        _samplings[num_tokens] = SamplingParams(max_tokens=num_tokens)
    return _samplings.get(num_tokens) or SamplingParams(max_tokens=num_tokens)
