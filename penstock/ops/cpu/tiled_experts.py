"""The experts of a few tokens on a CPU, in the tile layout of the GPU kernels
(`tiled_experts.cpp`).

A call is a struct of addresses, so that a GPU's stream can request it: a `HostWorker` takes such
calls and answers them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_int, c_int64, c_long, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.ops.cpu import library
from penstock.ops.tiles import STEP, TYPES, TiledRows

DTYPES = (torch.bfloat16, torch.float16)
ZERO = 8


class _Job(ctypes.Structure):
    _fields_ = (
        *((name, c_long) for name in ("num_tokens", "k", "width", "inner_width")),
        *((name, c_void_p) for name in ("x", "ids", "weights", "out")),
        *((name, c_void_p) for name in ("gate_up", "gate_up_records", "down", "down_records")),
        ("spent", c_void_p),
    )


@dataclass(slots=True)
class Spent:
    """Totals of all calls so far."""

    numbers: Any  # (c_int64 * 3)

    @classmethod
    def nothing(cls) -> Spent:
        return cls((c_int64 * 3)())

    @property
    def seconds(self) -> float:
        return float(self.numbers[0] / 1e9)

    @property
    def num_bytes(self) -> int:
        return int(self.numbers[1])

    @property
    def num_calls(self) -> int:
        return int(self.numbers[2])


class Job:
    """Sums the chosen experts: reads x, ids and weights, and writes out, when it is called."""

    def __init__(
        self,
        gate_up: TiledRows,  # [E, 2I, H]
        down: TiledRows,  # [E, H, I]
        x: Tensor,  # [T, H]
        ids: Tensor,  # [T, k] int32
        weights: Tensor,  # [T, k] float32  0: skipped
        out: Tensor,  # [T, H] float32
        spent: Spent,
    ) -> None:
        assert can_run(gate_up, down, x.dtype)
        assert ids.dtype == torch.int32
        assert out.dtype == weights.dtype == torch.float32
        tensors = (x, ids, weights, out)
        rows = (gate_up.codes, gate_up.records, down.codes, down.records)
        assert all(tensor.is_contiguous() for tensor in (*tensors, *rows))
        self._kept = (*tensors, *rows, spent)
        sizes = (*ids.shape, down.num_rows, down.num_columns)
        addresses = [tensor.data_ptr() for tensor in (*tensors, *rows)]
        self._struct = _Job(*sizes, *addresses, ctypes.addressof(spent.numbers))
        loaded = _library(x.dtype, gate_up.fields.scale)
        assert loaded is not None
        self._library = loaded
        self.given = ctypes.addressof(self._struct)

    def run(self) -> None:
        self._library.run_experts(self.given)


class HostWorker:
    """A thread that runs jobs requested through `calls`: an entry of `calls` holds call << 16 |
    job, where calls count from 1 and use entries in turn. It then writes the call's number to the
    job's entry of `answered`. All jobs have one dtype.
    """

    def __init__(self, calls: Tensor, answered: Tensor) -> None:  # int64, pinned for a GPU
        self._calls, self._answered = calls, answered
        self._jobs: dict[Job, int] = {}  # job -> its number
        self._table = (c_void_p * len(answered))()
        self._close: Callable[[], None] | None = None

    def number_of(self, job: Job) -> int:
        """The number to request it by; the first job starts the worker."""
        if job not in self._jobs:
            number = self._jobs[job] = len(self._jobs)
            self._table[number] = job.given
        if self._close is None:
            self._start(job._library)
        return self._jobs[job]

    def _start(self, library: ctypes.CDLL) -> None:
        addresses = (self._calls.data_ptr(), self._answered.data_ptr())
        table = ctypes.addressof(self._table)
        handle = library.start_worker(*addresses, table, len(self._calls))
        self._close = weakref.finalize(self, _stop_worker, library, handle, self._calls.is_pinned())

    def close(self) -> None:
        """Waits for pending calls; no more may be made."""
        if self._close is not None:
            self._close()


def _stop_worker(library: ctypes.CDLL, handle: int, is_for_gpu: bool) -> None:
    if is_for_gpu:
        with suppress(RuntimeError):  # from a failed GPU, which makes no more calls
            torch.cuda.synchronize()
    library.stop_worker(handle)


def can_run(gate_up: object, down: object, dtype: torch.dtype) -> bool:
    """4-bit codes around 8 with one scale per 128 columns or more, on a machine that can compile
    the kernel.
    """
    if not isinstance(gate_up, TiledRows) or not isinstance(down, TiledRows):
        return False
    are_plain = all(
        rows.bits == 4
        and rows.zero == ZERO
        and rows.group >= STEP
        and rows.fields.coarse is None
        and rows.fields.offset is None
        and rows.records.shape[-1] == rows.fields.scale.itemsize
        and rows.columns is None
        and rows.num_columns % STEP == 0
        and rows.num_rows % 16 == 0
        for rows in (gate_up, down)
    )
    scale = gate_up.fields.scale
    is_one_kind = scale == down.fields.scale and scale in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )
    return are_plain and is_one_kind and dtype in DTYPES and _library(dtype, scale) is not None


def num_threads() -> int:
    """All cores but one, which launches and waits for the GPU: of 16 cores, 12 reached 64 GB/s and
    16 reached 81.
    """
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) - 1))


@functools.cache
def _library(dtype: torch.dtype, scale: torch.dtype) -> ctypes.CDLL | None:
    options = (f"-DIS_BFLOAT={int(dtype == torch.bfloat16)}", f"-DSCALE_TYPE={TYPES[scale]}")
    loaded = library.load(Path(__file__).with_suffix(".cpp"), *options)
    if loaded is None:
        return None
    loaded.run_experts.argtypes, loaded.run_experts.restype = [c_void_p], None
    loaded.start_worker.argtypes = [c_void_p, c_void_p, c_void_p, c_uint64]
    loaded.start_worker.restype = c_void_p
    loaded.stop_worker.argtypes, loaded.stop_worker.restype = [c_void_p], None
    loaded.hire_threads.argtypes, loaded.hire_threads.restype = [c_int], c_int
    loaded.hire_threads(num_threads())
    return loaded
