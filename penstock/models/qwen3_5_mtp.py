"""The drafting head of Qwen3.5: one attention layer that predicts the token after the next.

It has its own layer and KV; embedding, head and rope are the main model's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.layers.attention import Attention
from penstock.layers.inputs import ChosenTokens, KVCache, StepInputs
from penstock.layers.linear import Linear
from penstock.layers.mlp import DenseMLP, SparseMLP
from penstock.layers.parameter import norm_parameter
from penstock.ops import Weight, rms_norm, rms_norm_pair
from penstock.types import KVSpec


class MTP(nn.Module):
    def __init__(
        self,
        *,
        hidden_size: int,
        attention: Attention,
        mlp: DenseMLP | SparseMLP,
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.embedding_norm = norm_parameter(hidden_size, device)
        self.hidden_norm = norm_parameter(hidden_size, device)
        self.fc = Linear(2 * hidden_size, hidden_size, dtype=dtype, device=device)
        self.attention = attention
        self.mlp = mlp
        self.norm = norm_parameter(hidden_size, device)
        self.vocabulary: Weight | None = None  # what chooses drafts; None: the model's head

    @property
    def cache_spec(self) -> KVSpec:
        return self.attention.cache_spec

    def forward(
        self,
        inputs: StepInputs,  # positions of the tokens whose hidden states are given
        embedded: Tensor,  # [T, H]  the token after each of them
        hidden: Tensor,  # [T, H]  after the main model's final norm, or this head's last result
        cache: KVCache,
        rope: Tensor,  # [max_len, 2, rot/2]
        chosen: ChosenTokens | None = None,  # the others only need keys and values
    ) -> Tensor:  # [T, H], or [R, H]  already normed
        norms = (embedded, self.embedding_norm, hidden, self.hidden_norm)
        joined = self.fc(rms_norm_pair(*norms, self.eps), deterministic=inputs.deterministic)
        attended = self.attention(joined, inputs, cache, rope, chosen)
        return rms_norm(self.mlp(attended, inputs), self.norm, self.eps)
