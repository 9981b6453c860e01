"""The embedding of tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def embed(
    token_ids: Tensor,  # [T] int64
    table: Tensor,  # [vocab, H]
) -> Tensor:  # [T, H]
    return F.embedding(token_ids, table)
