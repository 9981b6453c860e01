"""Which tile a kernel runs with: a measured table for the shapes of the presets, a rule for all others.

A kernel asks `choose(kernel, shape, num_tokens, default, device)`. The tables are JSON files in `tables/`,
one a GPU, written by `penstock tune`: {"<kernel>/<N>x<K>/<tokens>": {"block_n": 8, ...}}. Token counts are
rounded up to a power of two, so that a table stays short. Nothing is measured here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.ops.triton.launch import next_power_of_2

Tile = Mapping[str, int]  # the constexprs of a kernel, and its num_warps and num_stages

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Question:
    """What a kernel asked: whoever tunes knows from it what there is to try."""

    kernel: str
    shape: tuple[int, ...]
    num_tokens: int
    default: Tile

    @property
    def key(self) -> str:
        return f"{self.kernel}/{'x'.join(map(str, self.shape))}/{bucket(self.num_tokens)}"


class Trials:
    """Answers that beat the table, and a record of the questions, while `penstock tune` measures."""

    def __init__(self, answers: Mapping[str, Tile] | None = None) -> None:
        self.answers: dict[str, Tile] = dict(answers or {})
        self.questions: dict[str, Question] = {}


_trials: ContextVar[Trials | None] = ContextVar("trials", default=None)  # threads try tiles of their own


def choose(kernel: str, shape: tuple[int, ...], num_tokens: int, default: Tile, device: torch.device) -> Tile:
    """Asked before every launch: it may take a microsecond."""
    tile = _table(device).get((kernel, shape, bucket(num_tokens)), default)
    if (trials := _trials.get()) is None:
        return tile
    question = Question(kernel, shape, num_tokens, default)
    trials.questions.setdefault(question.key, question)
    return trials.answers.get(question.key, tile)


def bucket(num_tokens: int) -> int:
    """What stands for a number of tokens wherever it decides on code."""
    return next_power_of_2(num_tokens)


@contextmanager
def trials(answers: Mapping[str, Tile] | None = None) -> Iterator[Trials]:
    current = Trials(answers)
    token = _trials.set(current)
    try:
        yield current
    finally:
        _trials.reset(token)


@functools.cache
def table_name(device: torch.device) -> str:
    """The file of a GPU, without its ending."""
    if device.type != "cuda":
        return "none"
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


@functools.cache
def _table(device: torch.device) -> dict[tuple[str, tuple[int, ...], int], Tile]:
    path = TABLES / f"{table_name(device)}.json"
    tiles: dict[str, Tile] = json.loads(path.read_text())["tiles"] if path.exists() else {}
    return {_read_key(key): tile for key, tile in tiles.items()}


def _read_key(key: str) -> tuple[str, tuple[int, ...], int]:
    kernel, shape, num_tokens = key.split("/")
    return kernel, tuple(int(size) for size in shape.split("x")), int(num_tokens)
