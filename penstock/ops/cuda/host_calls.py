"""Calls from a stream to the CPU and back, without the driver (`host_calls.cu`).

The driver can call a function of the host from a stream too, but it takes 50 us for a call, and
starts nothing else of a graph meanwhile.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cuda.program import Program, current_stream, program

SOURCE = Path(__file__).with_name("host_calls.cu")
NUM_CALLS = 1024  # that may be open at the same time: a stream has one
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
    """What the device and the CPU tell each other. `calls` and `answered` are pinned."""

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
    targets: tuple[Tensor, Tensor, Tensor],  # the same, pinned
) -> None:
    """The CPU starts with a job as soon as its inputs have arrived; the stream goes on."""
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
    """Waits for the job's last call that this stream made."""
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
