"""A Gated DeltaNet layer: norm, projection, mixer and state, output added to the residual."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.layers.inputs import StateCache, StepInputs
from penstock.layers.linear import Linear
from penstock.layers.parameter import norm_parameter, parameter
from penstock.ops import gated_delta_net
from penstock.parallel.ranks import ALONE, Ranks
from penstock.parallel.share import Share, scaled
from penstock.types import StateSpec


class DeltaNet(nn.Module):
    """Rows of `in_proj`: q, k and v (the channels of the convolution), z, b, a."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int,
        eps: float,
        ranks: Ranks = ALONE,  # each has some value heads and their key heads
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        keys = ranks.shared_part(num_key_heads, "DeltaNet key heads")
        heads = ranks.part(num_value_heads, "DeltaNet value heads")
        whole_key, whole_value = num_key_heads * key_dim, num_value_heads * value_dim
        values = scaled(heads, value_dim)
        channels = (
            scaled(keys, key_dim),
            scaled(keys, key_dim, whole_key),
            scaled(heads, value_dim, 2 * whole_key),
        )
        whole_channels = 2 * whole_key + whole_value
        before_b = whole_channels + whole_value
        projected = (
            *channels,
            scaled(heads, value_dim, whole_channels),
            scaled(heads, 1, before_b),
            scaled(heads, 1, before_b + num_value_heads),
        )
        whole_heads = num_value_heads
        num_key_heads, num_value_heads = len(keys), len(heads)
        self.num_key_heads = num_key_heads
        self.eps = eps
        value_size = num_value_heads * value_dim
        conv_channels = 2 * num_key_heads * key_dim + value_size
        self.cache_spec = StateSpec(
            num_value_heads=num_value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_channels=conv_channels,
            conv_width=conv_kernel,
        )
        self.in_proj = Linear(
            hidden_size,
            before_b + 2 * whole_heads,
            eps=eps,
            outputs=projected,
            ranks=ranks,
            dtype=dtype,
            device=device,
        )
        self.in_proj.weight.num_plain_rows = 2 * num_value_heads  # b and a
        self.conv = parameter(conv_kernel, conv_channels, dtype=dtype, device=device)
        self.a_log = parameter(num_value_heads, dtype=torch.float32, device=device)
        self.dt_bias = parameter(num_value_heads, dtype=torch.float32, device=device)
        self.gated_norm = norm_parameter(value_dim, device)
        self.out = Linear(
            whole_value, hidden_size, inputs=(values,), ranks=ranks, dtype=dtype, device=device
        )
        self.shares: dict[str, Share] = {}  # shards of plain parameters
        if not ranks.is_alone:
            per_head = Share((whole_heads,), ((heads,),))
            conv = Share((conv_kernel, whole_channels), (None, channels))
            self.shares = {"conv": conv, "a_log": per_head, "dt_bias": per_head}

    def forward(
        self, hidden: Tensor, inputs: StepInputs, cache: StateCache
    ) -> Tensor:  # [T, H] -> [T, H]
        deterministic = inputs.deterministic
        mixed = self.in_proj(hidden, deterministic=deterministic)
        read_out = gated_delta_net(
            mixed,
            self.conv,
            self.a_log,
            self.dt_bias,
            self.gated_norm,
            self.eps,
            cache.conv,
            cache.recurrent,
            inputs.query_start,
            inputs.context_lens,
            inputs.state_slots,
            inputs.initial_slots,
            inputs.spans,
            inputs.blocks,
            self.num_key_heads,
            cache.journal,
            inputs.replay,
            cache.backlog,
            self.out.weight,
            deterministic=deterministic,
        )
        return self.out(read_out, hidden, deterministic=deterministic)
