"""The backlog of a slot: tokens that its recurrent state lacks, stored beside it.

A decode reads a state of 64 KB per head to add one key times one correction to it. Writing that
back takes as long as reading it, so kernels write it only after every few tokens. In between, what
each token adds is stored as it is, 1 KB per head: the state of a slot is

    decay (... decay (decay S + key x correction) + key x correction ...) + key x correction

with S as stored and one term per token of the backlog. A kernel that reads a slot adds its backlog;
one that writes its state empties it. The reference adds backlogs, and leaves none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_LATE = 3  # tokens in a backlog: a state is written at every fourth position


class Backlog(NamedTuple):
    """For one layer, by slot; n is the most tokens."""

    counts: Tensor  # [slots, Hv] int32
    keys: Tensor  # [slots, n, Hv, K] float32  normalized
    corrections: Tensor  # [slots, n, Hv, V] float32
    decays: Tensor  # [slots, n, Hv] float32

    @staticmethod
    def empty(
        num_slots: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        num_late: int,
        device: torch.device | str,
    ) -> Backlog:
        places = (num_slots, num_late, num_heads)
        return Backlog(
            torch.zeros(num_slots, num_heads, dtype=torch.int32, device=device),
            torch.zeros(*places, key_dim, device=device),
            torch.zeros(*places, value_dim, device=device),
            torch.zeros(*places, device=device),
        )


def whole_states(recurrent: Tensor, backlog: Backlog | None, slots: Tensor) -> Tensor:
    """[R, Hv, K, V] float32: the states of these slots, with what they lack."""
    states = recurrent[slots].float()
    if backlog is None:
        return states
    counts, keys, corrections, decays = (part[slots] for part in backlog)
    for i in range(keys.shape[1]):
        is_there = (i < counts)[..., None, None]
        added = keys[:, i, :, :, None] * corrections[:, i, :, None, :]
        states = states.where(~is_there, decays[:, i, :, None, None] * states + added)
    return states
