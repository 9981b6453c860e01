"""Which tile a kernel runs with: a measured table for the shapes of the presets, a rule for all
others.

A kernel calls `choose(kernel, shape, num_tokens, default, device)`. The tables are JSON files, one
per GPU: {"tiles": {"<kernel>/<N>x<K>/<tokens>": {"block_n": 8, ...}}}. Some ship with the package,
in `tables/`; those measured here by `penstock tune` are in the user's cache folder and take
precedence, as long as the kernels have not changed since. Token counts are rounded up to a power of
two, so that a table stays short. Nothing is measured here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.ops.cache_folder import cache_folder, write_whole
from penstock.ops.product import Tile

logger = logging.getLogger(__name__)

TABLES = Path(__file__).parent / "tables"
KERNELS = (Path(__file__).parent / "triton", Path(__file__).parent / "cuda")


@dataclass(frozen=True, slots=True)
class Question:
    """A call of `choose`, recorded so that `penstock tune` knows what to try."""

    kernel: str
    shape: tuple[int, ...]
    num_tokens: int
    default: Tile

    @property
    def key(self) -> str:
        return f"{self.kernel}/{'x'.join(map(str, self.shape))}/{bucket(self.num_tokens)}"


class Trials:
    """Tiles that override the table, and a record of the calls, while `penstock tune` measures."""

    def __init__(self, answers: Mapping[str, Tile] | None = None) -> None:
        self.answers: dict[str, Tile] = dict(answers or {})
        self.questions: dict[str, Question] = {}


_trials: ContextVar[Trials | None] = ContextVar(
    "trials", default=None
)  # each thread tries its own tiles


def choose(
    kernel: str, shape: tuple[int, ...], num_tokens: int, default: Tile, device: torch.device
) -> Tile:
    """Called before every launch: it may take a microsecond."""
    tile = _table(device).get((kernel, shape, bucket(num_tokens)), default)
    if (trials := _trials.get()) is None:
        return tile
    question = Question(kernel, shape, num_tokens, default)
    trials.questions.setdefault(question.key, question)
    return trials.answers.get(question.key, tile)


def bucket(num_tokens: int) -> int:
    """Represents a number of tokens wherever it selects code."""
    return 1 << max(num_tokens - 1, 0).bit_length()


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
    """The file name of a GPU, without its suffix."""
    if device.type != "cuda":
        return "none"
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


def own_table_path(device: torch.device) -> Path:
    """The table of tiles measured on this machine."""
    return cache_folder("tiles") / f"{table_name(device)}.json"


def read_tiles(path: Path) -> dict[str, Tile]:
    """By key; empty if there is no such file."""
    tiles: dict[str, Tile] = json.loads(path.read_text())["tiles"] if path.exists() else {}
    return tiles


def read_own_tiles(path: Path) -> dict[str, Tile]:
    """Those measured with these kernels: an unusable table costs speed, but does not fail the
    start.
    """
    try:
        tiles = read_tiles(path)
        is_current = not tiles or json.loads(path.read_text())["kernels"] == kernels_digest()
        for key in tiles:
            _read_key(key)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is not a table of tiles and is ignored: %r", path, error)
        return {}
    if not is_current:
        logger.warning("%s is ignored: the kernels have changed. Run `penstock tune` again.", path)
    return tiles if is_current else {}


def write_tiles(path: Path, tiles: Mapping[str, Tile]) -> None:
    table: dict[str, Any] = {"kernels": kernels_digest(), "tiles": dict(sorted(tiles.items()))}
    write_whole(path, (json.dumps(table, indent=1) + "\n").encode())


@functools.cache
def kernels_digest() -> str:
    """Digest of the sources: a tile names constants of a kernel, and may not fit another version of
    it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for folder in KERNELS for path in folder.glob("*.[pc][yu]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _table(device: torch.device) -> dict[tuple[str, tuple[int, ...], int], Tile]:
    tiles = read_tiles(TABLES / f"{table_name(device)}.json")
    if device.type == "cuda":
        tiles = {**tiles, **read_own_tiles(own_table_path(device))}
    return {_read_key(key): tile for key, tile in tiles.items()}


def _read_key(key: str) -> tuple[str, tuple[int, ...], int]:
    kernel, shape, num_tokens = key.split("/")
    return kernel, tuple(int(size) for size in shape.split("x")), int(num_tokens)
