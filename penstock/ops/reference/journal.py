"""The journal of unverified tokens: how a DeltaNet layer's state follows drafts without a copy.

A slot holds a row's state after its last certain token, the first one of the previous step. What
the drafts after it would add is stored beside it, one entry per draft. The next step knows how many
of them were accepted: it replays that many entries before it computes its own tokens. Rejected
entries are overwritten.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Journal(NamedTuple):
    """For one layer, by row of the row table; n is the most drafts per step."""

    # [rows, n, Hv, K] float32. Value heads that share a key head have copies: a kernel writes new
    # entries while other programs of its row may still read the old ones.
    keys: Tensor
    values: Tensor  # [rows, n, Hv, V] float32
    # [rows, n, 3, Hv] float32 log decay, beta, and the factor that normalizes the key
    gates: Tensor


class Replay(NamedTuple):
    """What the rows of a step do with their journals before their own tokens."""

    rows: Tensor  # [R] int64  of the journal
    num_accepted: Tensor  # [R] int64  entries to replay; 0 for a prompt
    keep_at: Tensor  # [R] int64  save the state after this many tokens, if the replay crosses it
    keep_slots: Tensor  # [R] int64  slot to save it in; 0: none

    def part(self, rows: slice) -> Replay:
        return Replay(*(tensor[rows] for tensor in self))
