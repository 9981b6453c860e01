"""The tokens whose embedding and head rows this rank holds, and how the ranks' parts are
combined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.layers.parameter import new_weight
from penstock.ops import Weight, likeliest
from penstock.parallel.ranks import Ranks
from penstock.parallel.share import Share


class Vocabulary:
    def __init__(self, size: int, ranks: Ranks) -> None:
        self.size = size
        self.ranks = ranks
        self.own = ranks.uneven_part(size)

    def new_weight(
        self, hidden_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> Weight:
        share = Share((self.size, hidden_size), ((self.own,), None))
        return new_weight(
            *share.own_shape,
            dtype=dtype,
            device=device,
            share=None if self.ranks.is_alone else share,
        )

    def embed(self, embedding: Weight, token_ids: Tensor) -> Tensor:  # [T] -> [T, H]
        """A token's row comes from the rank that has it; the others add zeros."""
        if self.ranks.is_alone:
            return embedding.rows(token_ids)
        places = token_ids - self.own.start
        is_own = (places >= 0) & (places < len(self.own))
        if not len(self.own):  # a tiny vocabulary on many ranks
            shape = (*token_ids.shape, embedding.shape[-1])
            rows = torch.zeros(shape, dtype=embedding.values.dtype, device=token_ids.device)
        else:
            rows = embedding.rows(places.clamp(0, len(self.own) - 1))
            rows = torch.where(is_own.unsqueeze(-1), rows, 0.0)
        return self.ranks.add(rows)

    def join(self, own_logits: Tensor) -> Tensor:  # [L, own] -> [L, vocab]
        return self.ranks.join_columns(own_logits, self.size)

    def likeliest(self, own_logits: Tensor) -> Tensor:  # [L, own] -> [L] int64
        if self.ranks.is_alone:
            return likeliest(own_logits)
        return self.ranks.likeliest(own_logits, self.own.start)
