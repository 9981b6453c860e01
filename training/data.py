"""Turns drawn conversations into batches of fixed shape, in worker processes.

Every conversation is one row, right-padded to the next row length; targets start at `first_target`.
Each process draws from its own seed. No torch here: the processes must start before CUDA is
initialized, and stay small.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from training.config import TrainConfig

MAX_DROPPED_PART = 0.02
SPARE_BATCHES = 64  # kept for reuse while the generators are too slow


class Example(NamedTuple):
    token_ids: Sequence[int]
    first_target: int
    kind: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt for the model, and the check of its answer."""

    kind: str
    prompt: Sequence[int]
    accepts: Callable[
        [Sequence[int]], bool
    ]  # the generated tokens, with the end-of-turn token if it was generated


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    end_of_turn: int
    end_of_text: int  # also the padding

    @property
    def ends(self) -> list[int]:
        return [self.end_of_turn, self.end_of_text]


class Corpus(Protocol):
    """The source of training rows and held-out problems."""

    kinds: tuple[str, ...]
    vocab_size: int
    special: SpecialTokens
    text_files: tuple[Path, ...]  # copied to the model folder

    def draw(self, rng: Random) -> Example: ...

    def held_out(self, num_problems: int) -> list[Problem]: ...


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: NDArray[np.int16]  # [R, T]; int16 is enough for the tiny vocabulary
    first_targets: NDArray[np.int32]  # [R]
    lengths: NDArray[np.int32]  # [R]
    kinds: NDArray[np.int32]  # [R]

    @property
    def row_len(self) -> int:
        return int(self.token_ids.shape[1])

    @classmethod
    def pack(cls, examples: Sequence[Example], row_len: int, pad_id: int) -> Batch:
        token_ids = np.full((len(examples), row_len), pad_id, np.int16)
        for row, example in enumerate(examples):
            token_ids[row, : len(example.token_ids)] = example.token_ids
        return cls(
            token_ids,
            np.array([example.first_target for example in examples], np.int32),
            np.array([len(example.token_ids) for example in examples], np.int32),
            np.array([example.kind for example in examples], np.int32),
        )


class BatchMaker:
    """Draws until one row length has enough rows for a batch. So lengths occur in proportion to
    their rows.
    """

    def __init__(self, corpus: Corpus, config: TrainConfig, seed: str) -> None:
        self._corpus = corpus
        self._config = config
        self._rng = Random(seed)
        self._pending: dict[int, list[Example]] = {
            row_len: [] for row_len in sorted(config.row_lens)
        }
        self._num_drawn = self._num_too_long = 0

    def next_batch(self) -> Batch:
        while True:
            example = self._corpus.draw(self._rng)
            row_len = next((n for n in self._pending if n >= len(example.token_ids)), None)
            self._num_drawn += 1
            if row_len is None:
                self._drop_too_long()
                continue
            pending = self._pending[row_len]
            pending.append(example)
            if len(pending) == self._config.rows_of(row_len):
                self._pending[row_len] = []
                return Batch.pack(pending, row_len, self._corpus.special.end_of_text)

    def _drop_too_long(self) -> None:
        self._num_too_long += 1
        if self._num_too_long > max(20, MAX_DROPPED_PART * self._num_drawn):
            raise PenstockError(
                f"{self._num_too_long} of {self._num_drawn} conversations fit no row",
                f"The longest rows have {max(self._pending)} tokens; {MAX_DROPPED_PART:.0%} may be "
                "longer.",
                "Add a longer row length with --row-lens.",
            )

    def state(self) -> dict[str, Any]:
        pending = {
            row_len: [tuple(e) for e in examples] for row_len, examples in self._pending.items()
        }
        return {"rng": self._rng.getstate(), "pending": pending}

    def restore(self, state: dict[str, Any]) -> None:
        self._rng.setstate(state["rng"])
        self._pending = {
            n: [Example(*e) for e in examples] for n, examples in state["pending"].items()
        }


class Feed(Protocol):
    """The source of batches for the training loop."""

    def next_batch(self) -> Batch: ...

    def state(self) -> dict[str, Any]: ...

    def report(self) -> str: ...

    def close(self) -> None: ...


class LocalFeed:
    """Makes batches in this process, in order: a resumed run sees the same data as an
    uninterrupted one.
    """

    def __init__(self, maker: BatchMaker, state: dict[str, Any] | None = None) -> None:
        self._maker = maker
        if state:
            maker.restore(state)

    def next_batch(self) -> Batch:
        return self._maker.next_batch()

    def state(self) -> dict[str, Any]:
        return self._maker.state()

    def report(self) -> str:
        return "data made in this process"

    def close(self) -> None:
        pass


class WorkerFeed:
    """Makes batches in worker processes. While they are too slow, recent batches are used again,
    up to `max_reuse` times.

    The processes are forked, so start them before CUDA is initialized. The order of their batches
    depends on timing, so it cannot be resumed: a resumed run uses new seeds (`run`) and sees new
    data.
    """

    def __init__(self, corpus: Corpus, num_workers: int, config: TrainConfig, run: int) -> None:
        context = multiprocessing.get_context("fork")
        self._queue: multiprocessing.Queue[Batch] = context.Queue(maxsize=2 * num_workers)
        self._workers: list[BaseProcess] = [
            context.Process(
                target=_fill,
                args=(
                    BatchMaker(corpus, config, f"train-{config.seed}-{run}-{number}"),
                    self._queue,
                ),
                daemon=True,
            )
            for number in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()
        self._spare: deque[tuple[Batch, int]] = deque(maxlen=SPARE_BATCHES)
        self._max_reuse = config.max_reuse
        self._num_fresh = self._num_reused = 0
        self._waited_s = 0.0

    def next_batch(self) -> Batch:
        uses_left = self._max_reuse
        try:
            batch = self._queue.get_nowait()
            self._num_fresh += 1
        except queue.Empty:
            if self._spare:
                batch, uses_left = self._spare.popleft()
                self._num_reused += 1
            else:
                batch = self._wait()
                self._num_fresh += 1
        if uses_left > 1:
            self._spare.append((batch, uses_left - 1))
        return batch

    def state(self) -> dict[str, Any]:
        return {}

    def report(self) -> str:
        return f"fresh {self._num_fresh} reused {self._num_reused} waited {self._waited_s:.1f}s"

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()

    def _wait(self) -> Batch:
        start = time.monotonic()
        while True:
            try:
                batch = self._queue.get(timeout=5.0)
            except queue.Empty:
                self._check_alive()
                continue
            self._waited_s += time.monotonic() - start
            return batch

    def _check_alive(self) -> None:
        ended = [worker for worker in self._workers if not worker.is_alive()]
        if ended:
            raise PenstockError(
                f"{len(ended)} of {len(self._workers)} processes that make training data ended",
                f"{ended[0].name} ended with exit code {ended[0].exitcode} and no batch is left.",
                "Its traceback is further up in this output.",
            )


def _fill(maker: BatchMaker, batches: multiprocessing.Queue[Batch]) -> None:
    # Ctrl-C reaches the whole process group, but the training process decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive():
        batch, is_delivered = maker.next_batch(), False
        while not is_delivered and parent.is_alive():
            try:
                batches.put(batch, timeout=2.0)
                is_delivered = True
            except queue.Full:
                continue  # the trainer is busy or was killed: check whether it is alive
