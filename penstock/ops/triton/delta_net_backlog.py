# mypy: disable-error-code="no-untyped-def"
"""The backlog of a slot (`reference/backlog.py`), for the kernels that read and write states.

A program reads the entries of its own value head only, and no other program of the launch writes
them, so it may read them before the preceding kernel is complete, like the state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.reference.backlog import Backlog


def most_late(backlog: Backlog | None) -> int:
    """The MOST_LATE constant of a kernel: tokens that a state may lack."""
    return 0 if backlog is None else backlog.keys.shape[1]


def backlog_of(backlog: Backlog | None, unused: Tensor) -> tuple[Tensor, ...]:
    """The four arguments of a kernel."""
    return (unused,) * 4 if backlog is None else tuple(backlog)


@triton.jit
def entry_of(slot, i_entry, i_head, NUM_HEADS: tl.constexpr, MOST_LATE: tl.constexpr):
    return (slot * MOST_LATE + i_entry) * NUM_HEADS + i_head


@triton.jit
def late_tokens(late_counts, slot, i_head, start, NUM_HEADS: tl.constexpr):
    """How many tokens a slot's state lacks: none at position 0, whatever is there."""
    count = tl.load(late_counts + slot * NUM_HEADS + i_head)
    return tl.where(start > 0, count, 0)


@triton.jit
def add_backlog(
    b_state,  # [LANES_K, V / WARP_V, K / LANES_K, WARP_V], as `delta_net` has it
    late_keys,
    late_corrections,
    late_decays,
    slot,
    num_late,
    i_head,
    s_k,
    s_v,
    NUM_HEADS: tl.constexpr,
    MOST_LATE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """The state of a slot with the tokens that it lacks."""
    for i_late in range(num_late):
        late = entry_of(slot, i_late, i_head, NUM_HEADS, MOST_LATE)
        s_key = tl.load(late_keys + late * KEY_DIM + s_k, mask=s_k < KEY_DIM, other=0.0)
        p_correction = late_corrections + late * VALUE_DIM + s_v
        s_correction = tl.load(p_correction, mask=s_v < VALUE_DIM, other=0.0)
        s_added = s_key[:, None, :, None] * s_correction[None, :, None, :]
        b_state = tl.load(late_decays + late) * b_state + s_added
    return b_state


@triton.jit
def end_backlog(late_counts, slot, i_head, NUM_HEADS: tl.constexpr, MOST_LATE: tl.constexpr):
    if MOST_LATE > 0:
        tl.store(late_counts + slot * NUM_HEADS + i_head, 0)
