"""The DeltaNet mixer for a few rows with drafts, by `delta_net_drafts.cu`: decides which steps it
supports, and launches it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_longlong, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cuda.program import SHARED, address, current_stream, is_available, program
from penstock.ops.reference.backlog import MOST_LATE, Backlog
from penstock.ops.reference.journal import Journal, Replay

SOURCE = Path(__file__).with_name("delta_net_drafts.cu")
DTYPES = (torch.bfloat16, torch.float16)
MAX_ROWS = 4  # with more, the Triton kernel is faster, and with fewer than two drafts
MIN_WIDTH, MAX_WIDTH = 3, 8  # tokens of a row: all have shared memory of their own
MAX_THREADS = 1024
ALIGNMENT = 16  # bytes


def can_decode(
    num_rows: int,
    width: int,
    mixed: Tensor,
    conv_weight: Tensor,
    conv: Tensor,
    recurrent: Tensor,
    num_entries: int,
) -> bool:
    """Whether shapes and dtypes suit the kernel, and rows are few."""
    key_dim, value_dim = recurrent.shape[2:]
    return (
        num_rows <= MAX_ROWS
        and MIN_WIDTH <= width <= MAX_WIDTH
        and mixed.dtype in DTYPES
        and mixed.dtype == conv.dtype == conv_weight.dtype
        and recurrent.dtype == torch.float32
        and key_dim % 32 == 0
        and value_dim % 8 == 0
        and 4 * value_dim <= MAX_THREADS
        and _shared_bytes(width, key_dim, value_dim, num_entries) <= SHARED
        and is_available(mixed.device)
    )


def _shared_bytes(width: int, key_dim: int, value_dim: int, num_entries: int) -> int:
    """Of the tokens of a row, and of what may have to be replayed before them."""
    num_warps = -(-value_dim // 32)  # with a thread per column
    token = 2 * key_dim + 4 * value_dim + 2 * width + num_warps + 4
    entry = key_dim + value_dim + 3
    return 4 * (width * token + (MOST_LATE + num_entries) * entry + value_dim) + 2 * ALIGNMENT


def kernel_constants(
    width: int,
    num_key_heads: int,
    conv_weight: Tensor,  # [Kc, C]
    conv: Tensor,  # [slots, W, C]
    recurrent: Tensor,  # [slots, Hv, K, V]
    num_entries: int,
    most_late: int,
) -> dict[str, int]:
    _, num_heads, key_dim, value_dim = recurrent.shape
    return {
        "WIDTH": width,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_HEADS": num_key_heads,
        "HEADS": num_heads,
        "TAPS": conv_weight.shape[0],
        "RING": conv.shape[1],
        "ENTRIES": num_entries,
        "MOST_LATE": most_late,
        "IS_BFLOAT": int(conv.dtype == torch.bfloat16),
    }


def decode_with_drafts(
    out: Tensor,  # [T, Hv * V]
    mixed: Tensor,  # [T, C + Hv * V + 2 * Hv]
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv: Tensor,
    recurrent: Tensor,
    query_start: Tensor,  # [R + 1]  of these rows, in the step's tokens
    context_lens: Tensor,  # [R]
    state_slots: Tensor,
    initial_slots: Tensor,
    num_key_heads: int,
    journal: Journal,
    replay: Replay,
    backlog: Backlog | None,
    width: int,  # most tokens of a row
) -> None:
    """All tokens of every row, in one launch."""
    _, num_heads, _, value_dim = recurrent.shape
    most_late = 0 if backlog is None else backlog.keys.shape[1]
    given = (num_key_heads, conv_weight, conv, recurrent, journal.keys.shape[1], most_late)
    constants = kernel_constants(width, *given)
    slots = (query_start, context_lens, state_slots, initial_slots)
    numbers = [tensor.contiguous() for tensor in (*slots, *replay)]
    device = mixed.device
    program(SOURCE, "delta_net_drafts", tuple(constants.items()), device).launch(
        (num_heads, len(state_slots)),
        4 * value_dim,
        current_stream(device),
        *map(address, (mixed, conv_weight, a_log, dt_bias, norm_weight, conv, recurrent)),
        _pack(*numbers[:4]),
        _pack(*journal, *numbers[4:]),
        _pack(*((None,) * 4 if backlog is None else backlog)),
        address(out),
        c_float(eps),
        c_longlong(mixed.stride(0)),
        c_longlong(conv.stride(0)),
        c_longlong(recurrent.stride(0)),
    )


def _pack(*tensors: Tensor | None) -> ctypes.Array[c_void_p]:
    """A struct of pointers, passed by value."""
    return (c_void_p * len(tensors))(*map(address, tensors))
