"""An attention layer: norm, projections, rope, attention over the cache, output added to the
residual.

All families share it, with their own sizes. It does not know where its weights come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.layers.inputs import ChosenTokens, KVCache, StepInputs
from penstock.layers.linear import Linear
from penstock.layers.parameter import norm_parameter
from penstock.ops import paged_attention, rope_and_store, take_rows_of_each
from penstock.parallel.ranks import ALONE, Ranks
from penstock.parallel.share import scaled
from penstock.types import KVSpec


class Attention(nn.Module):
    """Rows of `qkv`: query heads, gate heads when gated, key heads, value heads."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: bool,
        gated: bool,  # multiply the output by the sigmoid of a projection as wide as q
        interleaved_rope: bool,  # rotate (2j, 2j + 1) instead of (j, j + rot/2)
        window: int,  # tokens a query sees, including itself; 0: all
        ranks: Ranks = ALONE,  # each has some heads; scarce KV heads are replicated
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        heads = ranks.part(num_heads, "attention heads")
        kv_heads = ranks.shared_part(num_kv_heads, "KV heads")
        whole_query, whole_kv = num_heads * head_dim, num_kv_heads * head_dim
        whole_gate = whole_query if gated else 0
        self.num_heads = num_heads = len(heads)
        self.num_kv_heads = num_kv_heads = len(kv_heads)
        self.head_dim = head_dim
        self.eps = eps
        self.gated = gated
        self.interleaved_rope = interleaved_rope
        self.window = window
        self.query_size = num_heads * head_dim
        self.gate_size = self.query_size if gated else 0
        self.kv_size = num_kv_heads * head_dim
        before_kv = whole_query + whole_gate
        queries = scaled(heads, head_dim)
        self.qkv = Linear(
            hidden_size,
            before_kv + 2 * whole_kv,
            bias=qkv_bias,
            eps=eps,
            outputs=(
                queries,
                *([scaled(heads, head_dim, whole_query)] if gated else []),
                scaled(kv_heads, head_dim, before_kv),
                scaled(kv_heads, head_dim, before_kv + whole_kv),
            ),
            ranks=ranks,
            dtype=dtype,
            device=device,
        )
        self.q_norm = norm_parameter(head_dim, device) if qk_norm else None
        self.k_norm = norm_parameter(head_dim, device) if qk_norm else None
        self.out = Linear(
            whole_query,
            hidden_size,
            bias=out_bias,
            inputs=(queries,),
            ranks=ranks,
            dtype=dtype,
            device=device,
        )

    @property
    def cache_spec(self) -> KVSpec:
        return KVSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def forward(
        self,
        hidden: Tensor,  # [T, H]
        inputs: StepInputs,
        cache: KVCache,
        rope: Tensor,  # [max_len, 2, rot/2]
        chosen: ChosenTokens | None = None,  # store all keys and values, compute only these
    ) -> Tensor:  # [T, H], or [R, H]
        deterministic = inputs.deterministic
        projected = self.qkv(hidden, deterministic=deterministic)
        sizes = (self.query_size, self.gate_size, self.kv_size, self.kv_size)
        q, gate, k, v = projected.split_with_sizes(sizes, dim=-1)
        q = rope_and_store(
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_kv_heads, self.head_dim)),
            v.unflatten(-1, (self.num_kv_heads, self.head_dim)),
            self.q_norm,
            self.k_norm,
            self.eps,
            rope,
            inputs.positions,
            inputs.kv_index,
            cache.keys,
            cache.values,
            self.interleaved_rope,
            cache.scales,
        )
        rows, gates = inputs.attention_rows, [gate] if self.gated else []
        if chosen is not None:
            # This launch lets the next one start only after its own wait: single-token attention
            # prefetches keys, assuming that earlier steps wrote them.
            rows, heads = chosen.rows, q.shape[1:]
            q, hidden, *gates = take_rows_of_each(chosen.tokens, (q.flatten(1), hidden, *gates))
            q = q.unflatten(1, heads)
        attended = paged_attention(
            q,
            cache.keys,
            cache.values,
            rows.page_table,
            rows.query_start,
            rows.context_lens,
            rows.spans,
            rows.blocks,
            self.head_dim**-0.5,
            self.window,
            gates[0] if gates else None,
            cache.scales,
            self.out.weight,
            deterministic=deterministic,
        )
        return self.out(attended, hidden, deterministic=deterministic)
