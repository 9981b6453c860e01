"""Forbids tokens by one bitmap per row: grammar masks, computed in parallel with the logits."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def mask_logits(
    logits: Tensor,  # [L, vocab] float32, changed in place
    rows: Tensor,  # [N] int64  rows of the logits, each at most once; others are unchanged
    # [N, words] int32 token t of row i is allowed if bit t % 32 of allowed[i, t // 32] is 1
    allowed: Tensor,
) -> Tensor:
    bit = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = ((allowed[:, :, None] >> bit) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)
    return logits
