"""A log of the experts that each layer needed in each step: written while an engine serves, read by
`penstock inspect experts`.

    {"layers": 40, "experts": 256}     the first line
    0 3 17 201                         a layer, and the experts that its tokens chose in one step

Text, so that any tool can read it. Imports no torch.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from penstock.errors import CheckpointError, ConfigError
from penstock.offload.residency import MEMORY, Residency

log = logging.getLogger("penstock.engine")

Turn = tuple[int, list[int]]


class ExpertLog:
    def __init__(self, path: Path, num_layers: int, num_experts: int) -> None:
        try:
            # Stays open as long as the engine runs.
            self._file: TextIO | None = path.open("w", encoding="ascii", buffering=1 << 16)
        except OSError as error:
            raise ConfigError(
                f"expert_log is {path}, which cannot be written", f"{error.strerror or error}."
            ) from error
        self._path = path
        self._write(json.dumps({"layers": num_layers, "experts": num_experts}))

    def add(self, layer: int, experts: Sequence[int]) -> None:
        self._write(f"{layer} {' '.join(map(str, experts))}")

    def _write(self, line: str) -> None:
        """After an error, such as a full disk, the engine goes on without a log."""
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
        except OSError as error:
            log.warning("%s ends here: %s", self._path, error.strerror or error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None


@dataclass(frozen=True, slots=True)
class Log:
    num_layers: int
    num_experts: int  # per layer
    turns: list[Turn]

    @property
    def steps(self) -> list[set[tuple[int, int]]]:
        """The experts of each step; a new step starts when the layer number does not increase."""
        steps: list[set[tuple[int, int]]] = []
        last = self.num_layers
        for layer, experts in self.turns:
            if layer <= last:
                steps.append(set())
            steps[-1].update((layer, expert) for expert in experts)
            last = layer
        return steps


def read_log(path: Path) -> Log:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read", f"{error}.") from error
    try:
        header = json.loads(lines[0])
        found = Log(int(header["layers"]), int(header["experts"]), [])
        if min(found.num_layers, found.num_experts) < 1:
            raise ValueError("there are no layers or no experts")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _not_a_log(path, 1, error) from error
    for number, line in enumerate(lines[1:], 2):
        try:
            found.turns.append(_read_turn(line, found))
        except ValueError as error:
            if number == len(lines):  # the engine was killed while it wrote
                break
            raise _not_a_log(path, number, error) from error
    return found


def _read_turn(line: str, log: Log) -> Turn:
    layer, *experts = map(int, line.split())
    if not 0 <= layer < log.num_layers:
        raise ValueError(f"there is no layer {layer}")
    if not 0 <= min(experts) <= max(experts) < log.num_experts:
        raise ValueError(f"there are {log.num_experts} experts in a layer")
    if len(set(experts)) < len(experts):
        raise ValueError("an expert is listed twice")
    return layer, experts


def _not_a_log(path: Path, number: int, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is not an expert log",
        f"Line {number}: {error or type(error).__name__}.",
        "Write one with `penstock serve MODEL --expert-cache SIZE --expert-log FILE`.",
    )


def hit_rate(log: Log, num_places: int) -> float:
    """With the store's own eviction policy and this many experts on the device."""
    tier = Residency(num_places, log.num_layers, log.num_experts)
    hits = count = 0
    for layer, experts in log.turns:
        for first in range(0, len(experts), num_places):
            taken = tier.take(layer, experts[first : first + num_places])
            hits += sum(not one.is_new for one in taken)
            count += len(taken)
            tier.release()
    return hits / max(count, 1)


def layered_hit_rate(log: Log, num_places: int) -> float:
    """On a GPU, where each layer has its own slots (`ops/reference/expert_cache.py`). Steps that
    need more experts than a layer has slots use lanes, and do not count.
    """
    slots = max(num_places // log.num_layers, 1)
    held = [set(range(slots)) for _ in range(log.num_layers)]
    scores = np.zeros((log.num_layers, log.num_experts))
    hits = count = 0
    for layer, experts in log.turns:
        if len(experts) > slots:
            continue
        moved = MEMORY * (1 - len(experts) / (log.num_experts + 1))
        own, here, needed = scores[layer], held[layer], set(experts)
        own *= 1 - moved
        own[experts] += moved
        hits, count = hits + len(needed & here), count + len(needed)
        missing = sorted(needed - here, key=lambda expert: (-own[expert], expert))
        others = sorted(here - needed, key=lambda expert: (own[expert], expert))
        for new, old in zip(missing, others):
            here.remove(old)
            here.add(new)
    return hits / max(count, 1)


def lru_hit_rate(log: Log, num_places: int) -> float:
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = count = 0
    for key in ((layer, expert) for layer, experts in log.turns for expert in experts):
        hits, count = hits + (key in held), count + 1
        held[key] = None
        held.move_to_end(key)
        if len(held) > num_places:
            held.popitem(last=False)
    return hits / max(count, 1)


def working_set(log: Log, num_steps: int) -> float:
    """The mean number of different experts in this many consecutive steps."""
    steps = log.steps
    if len(steps) < num_steps:
        return float("nan")
    counts: Counter[tuple[int, int]] = Counter()
    total = 0
    for place, step in enumerate(steps):
        counts.update(step)
        if place >= num_steps:
            counts.subtract(steps[place - num_steps])
            for key in steps[place - num_steps]:
                if not counts[key]:
                    del counts[key]
        if place >= num_steps - 1:
            total += len(counts)
    return total / (len(steps) - num_steps + 1)


def repeated_share(log: Log) -> float:
    """The share of a step's experts that the previous step used too."""
    pairs = list(zip(log.steps, log.steps[1:]))
    repeated = sum(len(before & after) for before, after in pairs)
    return repeated / max(sum(len(after) for _, after in pairs), 1)


def top_share(log: Log, share: float) -> float:
    """The share of all uses that falls on the most used experts."""
    uses = Counter((layer, expert) for layer, experts in log.turns for expert in experts)
    most = round(share * log.num_layers * log.num_experts)
    return sum(count for _, count in uses.most_common(most)) / max(uses.total(), 1)
