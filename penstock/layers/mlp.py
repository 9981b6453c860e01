"""Feed-forward layers on the residual stream: dense (SwiGLU), and sparse with or without a shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.layers.inputs import StepInputs
from penstock.layers.parameter import norm_parameter, parameter
from penstock.ops import new_counters, norm_linear, norm_route, sparse_mlp, swiglu_linear


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
        self.eps = eps
        self.norm = norm_parameter(hidden_size, device)
        self.gate_up = parameter(2 * intermediate_size, hidden_size, dtype=dtype, device=device)
        self.down = parameter(hidden_size, intermediate_size, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, inputs: StepInputs) -> Tensor:  # [T, H] -> [T, H]
        deterministic = inputs.deterministic
        gate_up = norm_linear(hidden, self.norm, self.eps, self.gate_up, deterministic=deterministic)
        return swiglu_linear(gate_up, self.down, residual=hidden, deterministic=deterministic)


class SparseMLP(nn.Module):
    """A token uses `experts_per_token` of `num_experts` experts, and the shared expert if there is one."""

    counters: Tensor  # [n] int32

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        experts_per_token: int,
        expert_size: int,
        shared_expert_size: int,  # 0: no shared expert
        normalize: bool,  # the weights of a token's experts sum to one
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.normalize = normalize
        self.eps = eps
        self.norm = norm_parameter(hidden_size, device)
        self.router = parameter(num_experts, hidden_size, dtype=dtype, device=device)
        self.gate_up = parameter(num_experts, 2 * expert_size, hidden_size, dtype=dtype, device=device)
        self.down = parameter(num_experts, hidden_size, expert_size, dtype=dtype, device=device)
        self.register_buffer("counters", new_counters(num_experts, device), persistent=False)
        self.shared_gate: nn.Parameter | None = None
        self.shared_gate_up: nn.Parameter | None = None
        self.shared_down: nn.Parameter | None = None
        if shared_expert_size:
            self.shared_gate = parameter(1, hidden_size, dtype=dtype, device=device)
            self.shared_gate_up = parameter(2 * shared_expert_size, hidden_size, dtype=dtype, device=device)
            self.shared_down = parameter(hidden_size, shared_expert_size, dtype=dtype, device=device)

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
            deterministic=deterministic,
        )
        return sparse_mlp(
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
