"""The DeltaNet mixer for a few rows with drafts, by `delta_net_drafts.cu`: decides which steps it
supports, and launches it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cuda.program import SHARED, address, current_stream, is_available, program
from penstock.ops.reference.backlog import Backlog
from penstock.ops.reference.journal import Journal, Replay

SOURCE = Path(__file__).with_name("delta_net_drafts.cu")
DTYPES = (torch.bfloat16, torch.float16)
MAX_ROWS = 4  # with more, the Triton kernel is faster
MAX_WIDTH = 8  # tokens of a row: all have shared memory of their own
MIN_WIDTH, MIN_WIDTH_ALONE = 2, 3  # with fewer, the Triton kernel is faster; without clusters
MAX_THREADS = 1024
MOST_ELEMENTS = 2**31
ALIGNMENT = 16  # bytes
# A cluster of two blocks per head; four wait for each other longer than their work takes.
CLUSTER, CLUSTER_CAPABILITY = 2, (9, 0)
BLOCK_PARTS = 4  # threads per pair of columns of a head, for each block


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
        and (MIN_WIDTH if choose_cluster(mixed.device) > 1 else MIN_WIDTH_ALONE) <= width
        and width <= MAX_WIDTH
        and mixed.dtype in DTYPES
        and mixed.dtype == conv.dtype == conv_weight.dtype
        and recurrent.dtype == torch.float32
        and key_dim % 32 == 0
        and value_dim % 16 == 0
        and num_threads(value_dim) <= MAX_THREADS
        and mixed.stride(0) % 2 == conv.stride(0) % 2 == mixed.data_ptr() % 4 == 0
        and len(mixed) * mixed.stride(0) < MOST_ELEMENTS
        and _shared_bytes(width, key_dim, value_dim, num_entries) <= SHARED
        and is_available(mixed.device)
    )


def _shared_bytes(width: int, key_dim: int, value_dim: int, num_entries: int) -> int:
    """Of the tokens of a row, and of what may have to be replayed before them, without clusters."""
    token = 2 * key_dim + value_dim + 2 * width + 5
    squares = MAX_WIDTH * MAX_THREADS // 32  # of each token, by warp
    entry = key_dim + value_dim + 3
    return 4 * (width * token + squares + num_entries * entry) + 3 * ALIGNMENT


@functools.cache
def choose_cluster(device: torch.device) -> int:
    """Blocks per head."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CLUSTER_CAPABILITY:
        return 1
    return CLUSTER


def num_threads(value_dim: int) -> int:
    """Of a block, however many share a head."""
    return value_dim // 2 * BLOCK_PARTS


def kernel_constants(
    width: int,
    mixed_stride: int,  # of a token
    num_key_heads: int,
    conv_weight: Tensor,  # [Kc, C]
    conv: Tensor,  # [slots, W, C]
    recurrent: Tensor,  # [slots, Hv, K, V]
    num_entries: int,
    most_late: int,
    cluster: int,
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
        "CLUSTER": cluster,
        "PARTS": BLOCK_PARTS * cluster,
        "IS_BFLOAT": int(conv.dtype == torch.bfloat16),
        "MIXED_STRIDE": mixed_stride,
        "CONV_STRIDE": conv.stride(0),
        "RECURRENT_STRIDE": recurrent.stride(0),
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
    num_heads, value_dim = recurrent.shape[1], recurrent.shape[3]
    cluster = choose_cluster(mixed.device)
    most_late = 0 if backlog is None else backlog.keys.shape[1]
    given = (num_key_heads, conv_weight, conv, recurrent, journal.keys.shape[1], most_late, cluster)
    constants = kernel_constants(width, mixed.stride(0), *given)
    slots = (query_start, context_lens, state_slots, initial_slots)
    numbers = [tensor.contiguous() for tensor in (*slots, *replay)]
    device = mixed.device
    program(SOURCE, "delta_net_drafts", tuple(constants.items()), device).launch(
        (num_heads * cluster, len(state_slots)),
        num_threads(value_dim),
        current_stream(device),
        *map(address, (mixed, conv_weight, a_log, dt_bias, norm_weight, conv, recurrent)),
        _pack(*numbers[:4]),
        _pack(*journal, *numbers[4:]),
        _pack(*((None,) * 4 if backlog is None else backlog)),
        address(out),
        c_float(eps),
    )


def _pack(*tensors: Tensor | None) -> ctypes.Array[c_void_p]:
    """A struct of pointers, passed by value."""
    return (c_void_p * len(tensors))(*map(address, tensors))
