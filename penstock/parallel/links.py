"""Collectives of torch.distributed: gloo between CPUs, NCCL between GPUs of one machine; and small
all-reduces through memory that GPUs share, where `one_shot.py` has connected them.

The groups are separate objects: no default group is set, so that two engines in one process do not
interfere. NCCL calls run on the current stream, where a CUDA graph captures them.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from penstock.ops.cuda.all_reduce import OneShot

JOIN_TIMEOUT_S = 300.0  # for all ranks to join
# Pings detect a silent rank long before; a step may take minutes on a CPU.
STEP_TIMEOUT_S = 3600.0


class GroupLinks:
    """`store` is the rendezvous of the ranks: a `FileStore`, or a `HashStore` between threads."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        store.set_timeout(timedelta(seconds=JOIN_TIMEOUT_S))
        self.store = store
        self.one_shot: OneShot | None = None
        self._group: Any = _new_group(store, rank, size, device)

    @classmethod
    def of_file(cls, path: Path, rank: int, size: int, device: torch.device) -> GroupLinks:
        return cls(dist.FileStore(str(path), size), rank, size, device)

    def add(self, values: Tensor) -> None:
        self._reduce(values, dist.ReduceOp.SUM)

    def maximize(self, values: Tensor) -> None:  # [n] int64
        if self.one_shot is None or len(values) % 2 == 0:
            self._reduce(values, dist.ReduceOp.MAX)
        else:  # the kernel takes two at a time
            padded = torch.nn.functional.pad(values, (0, 1))
            self._reduce(padded, dist.ReduceOp.MAX)
            values.copy_(padded[:-1])

    def _reduce(self, values: Tensor, operation: Any) -> None:
        if self.one_shot is not None and self.one_shot.can_reduce(values):
            self.one_shot.reduce(values)
        else:
            _finish(self._group.allreduce([values], _options(AllreduceOptions(), operation)))

    def gather(self, values: Tensor, out: Tensor) -> None:
        options = _options(AllgatherOptions())
        _finish(self._group._allgather_base(out.flatten(), values.flatten(), options))

    def send_all(self, values: Tensor) -> None:
        options = _options(BroadcastOptions())
        options.rootRank, options.rootTensor = 0, 0
        _finish(self._group.broadcast([values], options))

    def abort(self) -> None:
        """Ends collectives that wait for a lost rank; gloo detects that by itself."""
        if self.one_shot is not None:
            self.one_shot.stop()
        if hasattr(self._group, "abort"):
            self._group.abort()


class NoLinks:
    """For a single rank of several: it continues with its own part, at no cost."""

    def add(self, values: Tensor) -> None:
        pass

    def maximize(self, values: Tensor) -> None:
        pass

    def gather(self, values: Tensor, out: Tensor) -> None:
        out.copy_(values.expand_as(out))

    def send_all(self, values: Tensor) -> None:
        pass


def _new_group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    timeout = timedelta(seconds=STEP_TIMEOUT_S)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # All CPU ranks are on this machine, whatever its host name resolves to.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _options(options: Any, operation: Any = None) -> Any:
    if operation is not None:
        options.reduceOp = operation
    if hasattr(options, "asyncOp"):
        options.asyncOp = False  # on the current stream, not on the group's own
    return options


def _finish(work: Any) -> None:
    """NCCL returns nothing to wait for when it launches on the current stream."""
    if work is not None:
        work.wait()
