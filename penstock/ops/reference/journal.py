"""The journal of unverified tokens: how a DeltaNet layer's state follows drafts without a copy.

A slot holds a row's state after its last certain token, the first one of the step before. What the
drafts behind it would add lies beside it, one entry a draft. The next step knows how many of them
were right: it replays so many entries, and only then computes its own tokens. Rejected entries are
overwritten.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Journal(NamedTuple):
    """Of one layer, by row of the row table; n is the most drafts of a step."""

    # [rows, n, Hv, K] float32. Value heads that share a key have copies: a kernel writes new
    # entries while others of its row may still read the old ones.
    keys: Tensor
    values: Tensor  # [rows, n, Hv, V] float32
    # [rows, n, 3, Hv] float32  the logarithm of the decay, beta, what makes a key of length one
    gates: Tensor


class Replay(NamedTuple):
    """What the rows of a step do with their journals before their own tokens."""

    rows: Tensor  # [R] int64  of the journal
    num_accepted: Tensor  # [R] int64  entries to replay; 0 for a prompt
    keep_at: Tensor  # [R] int64  save the state after so many tokens, if the replay passes it
    keep_slots: Tensor  # [R] int64  where; 0: nowhere

    def part(self, rows: slice) -> Replay:
        return Replay(*(tensor[rows] for tensor in self))
