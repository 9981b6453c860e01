"""Connects the GPUs of one machine for small all-reduces (`ops/cuda/all_reduce.cu`): torch's
symmetric memory maps a buffer of every rank into all of them.

All ranks use it, or none: each step of the connection is agreed on, and at the end known sums are
computed. NCCL, which stays in use for larger tensors, replaces it otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.ops.cuda.all_reduce import EMPTY, OneShot, buffer_words
from penstock.ops.cuda.program import CudaError, is_available
from penstock.parallel.links import GroupLinks

c10d: Any = torch._C._distributed_c10d
MAX_RANKS = 8  # a rank sends its values to all others
CHECK_TIMEOUT_S = 20.0  # the kernel is compiled by then
FAILURES = (RuntimeError, AttributeError, ImportError, OSError, CudaError)


class Unusable(RuntimeError):
    """Why these ranks cannot, or should not, share memory."""


def connect(links: GroupLinks, name: str, rank: int, size: int, device: torch.device) -> str:
    """Sets `links.one_shot` on all ranks, and returns ""; or on none, and returns why. `name` is
    that of the group of ranks: the same on all of them, and of no other group of this process.
    """
    found: dict[str, Any] = {}

    def allocate() -> None:
        _check_access(device, size)
        store = dist.PrefixStore("memory", links.store)
        found["buffer"] = _new_buffer(store, name, rank, size, device)

    def share() -> None:
        addresses = _map_buffers(found["buffer"])
        found["one_shot"] = OneShot(rank, addresses, device, memory=found["buffer"])

    def check() -> None:
        _check_sums(found["one_shot"], rank, size, device)

    for stage in (allocate, share, check):
        reason = _reason_of(stage)
        if _is_true_anywhere(links, bool(reason), device):
            return reason or "Another rank cannot; its log says why."
    links.one_shot = found["one_shot"]
    return ""


def _reason_of(stage: Callable[[], None]) -> str:
    try:
        stage()
    except FAILURES as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def _is_true_anywhere(links: GroupLinks, own: bool, device: torch.device) -> bool:
    found = torch.tensor([int(own)], device=device)
    links.maximize(found)
    return bool(found.item())


def _check_access(device: torch.device, size: int) -> None:
    if device.type != "cuda":
        raise Unusable("the ranks are not on GPUs")
    if size > MAX_RANKS:
        raise Unusable(f"{size} ranks are more than {MAX_RANKS}")
    if not is_available(device):
        raise Unusable("the kernel needs NVRTC and a GPU of compute capability 8.0 or later")
    for other in range(size):  # rank r has the r-th GPU
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            raise Unusable(f"GPU {device.index} cannot access the memory of GPU {other}")


def _new_buffer(store: Any, name: str, rank: int, size: int, device: torch.device) -> Tensor:
    """Memory that other processes can map, without data."""
    # Releases of torch look the group up in one of two places.
    c10d._register_process_group(name, dist.ProcessGroup(store, rank, size))
    c10d._SymmetricMemory.set_group_info(name, rank, size, store)
    buffer: Tensor = c10d._SymmetricMemory.empty_strided_p2p(
        (buffer_words(size),), [1], torch.int32, device, name
    )
    return buffer.fill_(EMPTY)


def _map_buffers(buffer: Tensor) -> list[int]:
    """The address of every rank's buffer. All are EMPTY when it returns: mapping them is a
    rendezvous.
    """
    torch.cuda.synchronize(buffer.device)
    handle = c10d._SymmetricMemory.rendezvous(buffer)
    return [pointer + getattr(handle, "offset", 0) for pointer in handle.buffer_ptrs]


def _check_sums(one_shot: OneShot, rank: int, size: int, device: torch.device) -> None:
    """Known sums, in all turns of the buffer. A launch whose data never arrives is stopped."""
    column = torch.arange(1024, device=device) % 7
    expected = size * column + size * (size + 1) // 2
    sums = []
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16):
        sums.append((column + rank + 1).to(dtype))
        one_shot.reduce(sums[-1])
    done: Any = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + CHECK_TIMEOUT_S
    while not done.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    if not done.query():
        one_shot.stop()
        raise Unusable("data that one rank sent did not arrive at another")
    if not all(torch.equal(values.long(), expected) for values in sums):
        raise Unusable("sums over the ranks are wrong")
