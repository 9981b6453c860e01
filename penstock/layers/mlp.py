"""Feed-forward layers on the residual stream: dense (SwiGLU), and sparse, with or without a shared
expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.layers.inputs import StepInputs
from penstock.layers.linear import Linear
from penstock.layers.parameter import new_weight, norm_parameter
from penstock.ops import Weight, new_counters, norm_route, sparse_mlp


class DenseMLP(nn.Module):
    """Rows of `gate_up`: gate, then up."""

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.gate_up = Linear(
            hidden_size, 2 * intermediate_size, eps=eps, dtype=dtype, device=device
        )
        self.down = Linear(intermediate_size, hidden_size, swiglu=True, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, inputs: StepInputs) -> Tensor:  # [T, H] -> [T, H]
        deterministic = inputs.deterministic
        gate_up = self.gate_up(hidden, deterministic=deterministic)
        return self.down(gate_up, hidden, deterministic=deterministic)


class Offloaded(Protocol):
    """Experts that are not all on the device, see `penstock/offload/`."""

    @property
    def run(self) -> Callable[..., Tensor]:
        """`sparse_mlp`, with experts in slots."""


class SparseMLP(nn.Module):
    """A token uses `experts_per_token` of `num_experts` experts, and the shared expert if there is
    one.
    """

    counters: Tensor  # [n] int32

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        experts_per_token: int,
        expert_size: int,
        shared_expert_size: int,  # 0: no shared expert
        normalize: bool,  # make the weights of a token's experts sum to one
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.normalize = normalize
        self.eps = eps
        self.norm = norm_parameter(hidden_size, device)
        self.router = new_weight(
            num_experts, hidden_size, dtype=dtype, device=device, can_quantize=False
        )
        self.gate_up = new_weight(
            num_experts, 2 * expert_size, hidden_size, dtype=dtype, device=device
        )
        self.down = new_weight(num_experts, hidden_size, expert_size, dtype=dtype, device=device)
        self.register_buffer("counters", new_counters(num_experts, device), persistent=False)
        self.slots: Tensor | None = (
            None  # [E] int32  where each expert is in the stacks; None: in order
        )
        self.offloaded: Offloaded | None = None
        self.shared_gate: Weight | None = None
        self.shared_gate_up: Weight | None = None
        self.shared_down: Weight | None = None
        if shared_expert_size:
            self.shared_gate = new_weight(
                1, hidden_size, dtype=dtype, device=device, can_quantize=False
            )
            self.shared_gate_up = new_weight(
                2 * shared_expert_size, hidden_size, dtype=dtype, device=device
            )
            self.shared_down = new_weight(
                hidden_size, shared_expert_size, dtype=dtype, device=device
            )

    def forward(self, hidden: Tensor, inputs: StepInputs) -> Tensor:  # [T, H] -> [T, H]
        deterministic = inputs.deterministic
        x, weights, ids, shared_weight = norm_route(
            hidden,
            self.norm,
            self.eps,
            self.router,
            self.experts_per_token,
            self.normalize,
            self.shared_gate,
            self.counters,
            self.slots,
            deterministic=deterministic,
        )
        run = sparse_mlp if self.offloaded is None else self.offloaded.run
        return run(
            x,
            weights,
            ids,
            self.gate_up,
            self.down,
            hidden,
            shared_weight,
            self.shared_gate_up,
            self.shared_down,
            self.counters,
            deterministic=deterministic,
        )
