"""Many machines under one load. A machine's server routes among its own engines; between machines,
requests are spread at random, as a Kubernetes Service does. So machines do not wait for each other,
and are simulated one after the other, in as many processes as there are cores.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

from penstock.commands.layouts import NODE_GPUS
from penstock.config import EngineConfig
from penstock.eval.traces import Arrival
from penstock.planning.engine import EngineShape
from penstock.planning.node import Node, Slo
from penstock.planning.outcome import Outcome
from penstock.planning.step_times import StepTimes

# A trial of `fewest_engines` simulates this many requests, and of one machine at most this many,
# in its busiest period.
TRIAL_REQUESTS = 2000
FEW_REQUESTS = 20_000  # processes would take longer to start than to simulate these
ATTAINMENT = 0.99  # of all requests must meet the SLO


@dataclass(frozen=True, slots=True)
class Layout:
    """An engine of `tp` GPUs, as many as fit on a machine."""

    config: EngineConfig
    shape: EngineShape
    times: StepTimes
    tp: int

    @property
    def engines_per_node(self) -> int:
        return NODE_GPUS // self.tp


def simulate_fleet(
    layout: Layout, num_engines: int, arrivals: Sequence[Arrival], slo: Slo, seed: int = 0
) -> Outcome:
    """`arrivals` are in order of time."""
    sizes = _node_sizes(layout, num_engines)
    loads = split(arrivals, sizes, seed)
    jobs = [(layout, size, load, slo) for size, load in zip(sizes, loads)]
    total = Outcome.of((), slo)
    num_processes = min(os.cpu_count() or 1, len(jobs))
    if num_processes == 1 or len(arrivals) < FEW_REQUESTS:
        for outcome in itertools.starmap(_simulate_node, jobs):
            total.add(outcome)
        return total
    with ProcessPoolExecutor(num_processes) as processes:
        for outcome in processes.map(_simulate_job, jobs):
            total.add(outcome)
    return total


def _simulate_job(job: tuple[Layout, int, list[Arrival], Slo]) -> Outcome:
    return _simulate_node(*job)


def _simulate_node(layout: Layout, num_engines: int, load: list[Arrival], slo: Slo) -> Outcome:
    node = Node(layout.config, layout.shape, layout.times, num_engines)
    return Outcome.of([node.play(load)], slo)


def _node_sizes(layout: Layout, num_engines: int) -> list[int]:
    whole, rest = divmod(num_engines, layout.engines_per_node)
    return [layout.engines_per_node] * whole + ([rest] if rest else [])


def split(arrivals: Iterable[Arrival], sizes: Sequence[int], seed: int) -> list[list[Arrival]]:
    """Splits the load by machine, at random, in proportion to their engines."""
    loads: list[list[Arrival]] = [[] for _ in sizes]
    owners = [node for node, size in enumerate(sizes) for _ in range(size)]
    pick = Random(f"machines-{seed}").choice
    for arrival in arrivals:
        loads[pick(owners)].append(arrival)
    return loads


def fewest_engines(
    layout: Layout, arrivals: Sequence[Arrival], slo: Slo, most: int, seed: int = 0
) -> int | None:
    """How many meet the SLO for nearly all requests. None: more than `most`.

    Of a fleet of many machines, as many are simulated as get the requests of a trial: fewer
    requests would be too few to find one in a hundred that misses the SLO.
    """

    def is_enough(num_engines: int) -> bool:
        sizes = _node_sizes(layout, num_engines)
        num_tried = -(-TRIAL_REQUESTS * len(sizes) // len(arrivals))
        loads: list[list[Arrival]] = [[] for _ in sizes[:num_tried]]
        rng = Random(f"trial-{seed}")
        for one in arrivals:
            place = int(rng.random() * num_engines) // layout.engines_per_node
            if place < len(loads):
                loads[place].append(one)
        loads = [busiest(load, TRIAL_REQUESTS) for load in loads]
        num_left = int((1 - ATTAINMENT) * sum(map(len, loads)))
        for size, load in zip(sizes, loads):
            if load and num_left >= 0:
                node = Node(layout.config, layout.shape, layout.times, size)
                num_left -= node.count_missed(load, slo, num_left)
        return num_left >= 0

    low, high = 0, 1
    while not is_enough(high):
        low, high = high, 2 * high
        if low >= most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def busiest(arrivals: Sequence[Arrival], count: int) -> list[Arrival]:
    """The shortest period with this many requests."""
    if len(arrivals) <= count:
        return list(arrivals)
    starts = range(0, len(arrivals) - count + 1, max(1, count // 8))
    first = min(starts, key=lambda i: arrivals[i + count - 1].at_s - arrivals[i].at_s)
    return list(arrivals[first : first + count])


def repeated(arrivals: Sequence[Arrival], times: int) -> list[Arrival]:
    """Repeats a trace, with its mean pause between two passes."""
    if times == 1:
        return list(arrivals)
    length_s = arrivals[-1].at_s * len(arrivals) / max(1, len(arrivals) - 1)
    return [
        Arrival(
            one.at_s + i * length_s, one.input_len, one.output_len, one.block_ids, one.block_tokens
        )
        for i in range(times)
        for one in arrivals
    ]
