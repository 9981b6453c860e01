"""Estimates the time of a step: the fewest bytes and operations it needs, at the fraction of peak
that similar steps were measured to reach.

A measured table has the times of steps of some shapes. Divided by their floor, that gives the
fraction of the machine's limits that a step of this many tokens reaches; other contexts, ranks and
models are assumed to reach the same fraction. At the shapes of its own table a model is as fast as
measured. Collectives of ranks are added at an assumed cost. Knows no torch.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.commands.layouts import GPUS, collectives_s
from penstock.commands.roofline import Parameters, Roofline
from penstock.errors import PenstockError

RESULTS = Path(__file__).resolve().parents[2] / "results"
MEASURED_ON = "H200"  # the GPU of results/h200: others are scaled by their limits
# Speeds of that GPU for a plain copy and a large GEMM, measured with the tables.
COPY_BYTES_PER_S = 4.1e12
OPERATIONS_PER_S = 850e12
# Relative bfloat16 speed of other GPUs, as their makers state.
_RELATIVE_OPERATIONS = {"B200": 2.27, "H100": 1.0, "A100": 0.315, "L40S": 0.366, "RTX4090": 0.167}
SMALL_STEP = 256  # tokens: a step with a short prefill is like decodes of as many rows


@dataclass(frozen=True, slots=True)
class Curve:
    """Values by size, interpolated linearly over the logarithm of the size."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Curve:
        ordered = sorted(dict(points).items())
        return cls(tuple(size for size, _ in ordered), tuple(value for _, value in ordered))

    def at(self, size: float) -> float:
        place = bisect.bisect_left(self.sizes, size)
        if place == 0:
            return self.values[0]
        if place == len(self.sizes):
            return self.values[-1]
        low, high = self.sizes[place - 1], self.sizes[place]
        part = math.log(size / low) / math.log(high / low)
        return self.values[place - 1] + part * (self.values[place] - self.values[place - 1])


@dataclass(frozen=True, slots=True)
class StepTimes:
    """For one engine: a model on `tp` GPUs."""

    roofline: Roofline  # of one rank
    tp: int
    num_layers: int
    bytes_per_s: float
    operations_per_s: float
    all_reduce_s: float
    link_bytes_per_s: float
    decode_share: Curve  # of the floor, by rows
    prompt_share: Curve  # of the floor, by tokens of a step with prefills
    source: str  # where the fractions come from, for messages
    # Sums over layers, which every step needs.
    token_bytes: int = field(init=False)
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_bytes", self.roofline.kv_bytes_per_token)
        object.__setattr__(self, "row_bytes", self.roofline.row_bytes(0))

    def decodes_s(self, num_rows: int, num_context: int) -> float:
        """A step of decodes whose contexts have this many tokens in total."""
        num_bytes = self.roofline.weight_bytes_read(num_rows)
        floor_s = (num_bytes + self._rows_bytes(num_rows, num_context)) / self.bytes_per_s
        return floor_s / self.decode_share.at(num_rows) + self.links_s(num_rows)

    def prompts_s(
        self,
        chunks: Sequence[tuple[int, int]],  # first position and tokens of each chunk
        num_rows: int = 0,
        num_context: int = 0,
    ) -> float:
        """A step that prefills, possibly together with decodes."""
        num_prompt = sum(length for _, length in chunks)
        num_tokens = num_prompt + num_rows
        operations = sum(self._operations(start, length) for start, length in chunks)
        operations += num_rows * 2 * self.roofline.parameters.active
        num_bytes = self.roofline.weight_bytes_read(num_tokens, len(chunks) + num_rows)
        num_bytes += self.token_bytes * num_prompt
        # Weights are read while others are multiplied; decode rows do not change that.
        floor_s = max(num_bytes / self.bytes_per_s, operations / self.operations_per_s)
        floor_s += self._rows_bytes(num_rows, num_context) / self.bytes_per_s
        return floor_s / self.prompt_share.at(num_tokens) + self.links_s(num_tokens)

    def _rows_bytes(self, num_rows: int, num_context: int) -> int:
        return num_rows * self.row_bytes + self.token_bytes * num_context

    def links_s(self, num_tokens: int) -> float:
        if self.tp == 1:
            return 0.0
        num_bytes = num_tokens * self.roofline.hidden_size * self.roofline.element_bytes
        links = (self.all_reduce_s, self.link_bytes_per_s)
        return collectives_s(self.tp, self.num_layers, num_bytes, *links)

    def _operations(self, start: int, length: int) -> int:
        """The floor counts a prompt from its first token; this adds attention to the tokens before
        it.
        """
        before = 4 * self.roofline.query_width * len(self.roofline.attention) * start
        return self.roofline.prefill_operations(1, length) + length * before


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of a table."""

    model: str
    scheme: str  # of the weights: bf16, fp8, int4
    tp: int  # ranks: the time is that of one rank, without collectives
    batch: int
    length: int  # of a context, or of a prompt
    seconds: float


@dataclass(frozen=True, slots=True)
class Tables:
    """What `penstock bench` measured on one H200."""

    decodes: tuple[Measured, ...]
    prefills: tuple[Measured, ...]

    @classmethod
    def read(cls, folder: Path = RESULTS) -> Tables:
        decodes: list[Measured] = []
        for name in ("decode", "decode_long", "models"):
            decodes += _rows(_read(folder / f"h200/{name}.json"))
        quantized = _read(folder / "h200/quantized.json")
        decodes += _rows(quantized)
        if (folder / "h200/parallel.json").exists():
            decodes += _rows(_read(folder / "h200/parallel.json"))
        prefills = _rows(_read(folder / "h200/prefill.json")) + _rows(quantized["prefill"])
        return cls(tuple(decodes), tuple(prefills))

    def of(self, rows: str, model: str, scheme: str, tp: int = 1) -> list[Measured]:
        found: tuple[Measured, ...] = getattr(self, rows)
        return [row for row in found if (row.model, row.scheme, row.tp) == (model, scheme, tp)]


def _read(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PenstockError(
            f"Cannot read the measured times in {path}",
            f"{error}.",
            "Run in a checkout of Penstock, or name its results folder with --results.",
        ) from error
    return table


def _rows(table: dict[str, Any]) -> list[Measured]:
    """The first row of each measured shape: older ones come after it."""
    found: dict[tuple[Any, ...], Measured] = {}
    for row in table["rows"]:
        if row.get("ep"):  # ranks with whole experts are not planned with
            continue
        shape = (
            row.get("model") or table["model"],
            row.get("scheme", "bf16"),
            row.get("tp", 1),
            row["batch"],
            row["context"],
        )
        seconds = row.get("own_ms", row.get("ms")) / 1e3
        found.setdefault(shape, Measured(*shape, seconds))
    return list(found.values())


def decode_share(rows: Sequence[Measured], roofline: Roofline) -> Curve:
    """The fraction of the floor that steps with this many rows reach. The shortest context counts:
    it says most about weights.
    """
    plain = _floors(roofline)
    shortest = {row.batch: row for row in sorted(rows, key=lambda one: -one.length)}
    return Curve.of(
        (row.batch, plain.decodes_s(row.batch, row.batch * row.length) / row.seconds)
        for row in shortest.values()
    )


def prompt_share(rows: Sequence[Measured], roofline: Roofline, decodes: Curve) -> Curve:
    plain = _floors(roofline)
    points = [
        (row.batch * row.length, plain.prompts_s([(0, row.length)] * row.batch) / row.seconds)
        for row in rows
    ]
    return Curve.of([*points, (SMALL_STEP, decodes.at(SMALL_STEP))])


def _floors(roofline: Roofline) -> StepTimes:
    return StepTimes(
        roofline, 1, 0, COPY_BYTES_PER_S, OPERATIONS_PER_S, 0.0, math.inf, _ONE, _ONE, ""
    )


def step_times(
    roofline: Roofline,
    num_layers: int,
    tp: int,
    gpu_name: str,
    shares: tuple[Curve, Curve],
    source: str,
) -> StepTimes:
    gpu = GPUS[gpu_name]
    relative = gpu.bytes_per_s / GPUS[MEASURED_ON].bytes_per_s
    return StepTimes(
        roofline,
        tp,
        num_layers,
        COPY_BYTES_PER_S * relative,
        OPERATIONS_PER_S * _RELATIVE_OPERATIONS.get(gpu_name, 1.0),
        gpu.all_reduce_s,
        gpu.link_bytes_per_s,
        *shares,
        source if gpu_name == MEASURED_ON else f"{source}, scaled to {gpu_name}",
    )


_ONE = Curve((1.0,), (1.0,))


def quantized(roofline: Roofline, bits: float) -> Roofline:
    """As if all weights but the embedding had this many bits, including scales."""
    share, stored = bits / (8 * roofline.element_bytes), roofline.stored
    kept = 0 if stored.is_tied else stored.embedding
    total = round(share * (stored.total - kept)) + kept
    changed = Parameters(
        total=total,
        embedding=stored.embedding,
        head=round(share * stored.head),
        is_tied=stored.is_tied,
        experts=round(share * stored.experts),
        num_experts=stored.num_experts,
        num_experts_per_token=stored.num_experts_per_token,
        mtp=round(share * stored.mtp),
        last_experts=round(share * stored.last_experts),
        last_dense=round(share * stored.last_dense),
    )
    return dataclasses.replace(roofline, stored=changed)
