"""Calls from a stream to the CPU and back, without the driver (`host_calls.cu`). Does not know
what the CPU computes.

The driver's host functions do the same, but a call takes 50 us, and no other node of the graph
starts meanwhile.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cuda.program import Program, current_stream, program

SOURCE = Path(__file__).with_name("host_calls.cu")
NUM_CALLS = 1024  # in flight at the same time; a stream has one
NUM_THREADS = 512


class _Asked(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "ids", "weights")),
        *((name, c_void_p) for name in ("host_x", "host_ids", "host_weights")),
        *((name, c_void_p) for name in ("calls", "num_calls", "number_of")),
        *((name, c_int) for name in ("num_x", "num_pairs", "job")),
    )


class _Answer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", "sums", "answered", "number_of")),
        *((name, c_int) for name in ("num_pairs", "job")),
    )


class Mailbox:
    """Counters shared by the device and the CPU. `calls` and `answered` are in pinned memory."""

    def __init__(self, device: torch.device, num_jobs: int) -> None:
        is_gpu = device.type == "cuda"
        self.calls = torch.zeros(NUM_CALLS, dtype=torch.int64, pin_memory=is_gpu)
        self.answered = torch.zeros(num_jobs, dtype=torch.int64, pin_memory=is_gpu)
        self.num_calls = torch.zeros(1, dtype=torch.int64, device=device)
        self.number_of = torch.zeros(num_jobs, dtype=torch.int64, device=device)


def ask_host(
    mailbox: Mailbox,
    job: int,
    given: tuple[Tensor, Tensor, Tensor],  # x [T, H], ids [T, k] int32, weights [T, k] float32
    targets: tuple[Tensor, Tensor, Tensor],  # their copies, pinned
) -> None:
    """Submits a job. The CPU starts when its inputs have arrived; the stream does not wait."""
    x, ids, _ = given
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(given, targets))
    assert all(tensor.is_contiguous() for tensor in (*given, *targets))
    assert ids.dtype == torch.int32
    assert x.nbytes % 16 == 0
    tensors = (*given, *targets, mailbox.calls, mailbox.num_calls, mailbox.number_of)
    addresses = [tensor.data_ptr() for tensor in tensors]
    _program("ask_host", x).launch(
        1,
        NUM_THREADS,
        current_stream(x.device),
        _Asked(*addresses, x.nbytes // 16, ids.numel(), job),
    )


def add_answer(
    mailbox: Mailbox,
    job: int,
    out: Tensor,  # [T, H]
    sums: Tensor,  # [T, H] float32, pinned
) -> None:
    """Waits for the last call of the job in this stream, and adds its result to `out`."""
    assert out.is_contiguous()
    num_pairs = out.numel() // 2
    tensors = (out, sums, mailbox.answered, mailbox.number_of)
    _program("add_answer", out).launch(
        -(-num_pairs // NUM_THREADS),
        NUM_THREADS,
        current_stream(out.device),
        _Answer(*(tensor.data_ptr() for tensor in tensors), num_pairs, job),
    )


def kernel_constants(dtype: torch.dtype) -> dict[str, int]:
    return {"NUM_CALLS": NUM_CALLS, "IS_BFLOAT": int(dtype == torch.bfloat16)}


def _program(name: str, like: Tensor) -> Program:
    return program(SOURCE, name, tuple(kernel_constants(like.dtype).items()), like.device)
