"""Feed-forward layers on the residual stream: dense (SwiGLU), and MoE, with or without a shared
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
from penstock.ops import Weight, fuses_swiglu, new_counters, norm_route, own_experts, sparse_mlp
from penstock.parallel.ranks import ALONE, Ranks
from penstock.parallel.share import Share, SplitError, scaled


class DenseMLP(nn.Module):
    """Rows of `gate_up`: gate, then up."""

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        eps: float,
        ranks: Ranks = ALONE,  # each has a slice of the intermediate size
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        own = ranks.part(intermediate_size, "inner columns in an MLP")
        on = {"ranks": ranks, "dtype": dtype, "device": device}
        self.gate_up = Linear(
            hidden_size,
            2 * intermediate_size,
            eps=eps,
            outputs=(own, scaled(own, 1, intermediate_size)),
            **on,  # type: ignore[arg-type]
        )
        self.down = Linear(
            intermediate_size,
            hidden_size,
            swiglu=True,
            inputs=(own,),
            **on,  # type: ignore[arg-type]
        )

    def forward(self, hidden: Tensor, inputs: StepInputs) -> Tensor:  # [T, H] -> [T, H]
        deterministic = inputs.deterministic
        is_fused = fuses_swiglu(hidden, self.gate_up.weight, deterministic=deterministic)
        gate_up = self.gate_up(hidden, ends_in_swiglu=is_fused, deterministic=deterministic)
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
        ranks: Ranks = ALONE,  # each has a slice of every expert, or whole experts
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.experts_per_token = experts_per_token
        self.normalize = normalize
        self.eps = eps
        self.norm = norm_parameter(hidden_size, device)
        self.router = new_weight(
            num_experts, hidden_size, dtype=dtype, device=device, can_quantize=False
        )
        up_shape = (num_experts, 2 * expert_size, hidden_size)
        down_shape = (num_experts, hidden_size, expert_size)
        self.own: range | None = None  # this rank's experts, if others have the rest
        if ranks.whole_experts and not ranks.is_alone:
            self.own = _whole_experts(ranks, num_experts, experts_per_token)
            shares = [Share(shape, ((self.own,), None, None)) for shape in (up_shape, down_shape)]
        else:
            own = ranks.part(expert_size, "inner columns in an expert")
            both = (own, scaled(own, 1, expert_size))
            shares = [
                Share(up_shape, (None, both, None)),
                Share(down_shape, (None, None, (own,))),
            ]
        self.gate_up, self.down = (_new_share(share, dtype, device) for share in shares)
        self.register_buffer("counters", new_counters(num_experts, device), persistent=False)
        self.slots: Tensor | None = (
            None  # [E] int32  index of each expert in the stacks; None: in order
        )
        self.offloaded: Offloaded | None = None
        self.shared_gate: Weight | None = None
        self.shared_gate_up: Weight | None = None
        self.shared_down: Weight | None = None
        if shared_expert_size:
            self.shared_gate = new_weight(
                1, hidden_size, dtype=dtype, device=device, can_quantize=False
            )
            own = ranks.part(shared_expert_size, "inner columns in the shared expert")
            both = (own, scaled(own, 1, shared_expert_size))
            self.shared_gate_up = _new_share(
                Share((2 * shared_expert_size, hidden_size), (both, None)), dtype, device
            )
            self.shared_down = _new_share(
                Share((hidden_size, shared_expert_size), (None, (own,))), dtype, device
            )
            self.shared_gate_up.is_with_experts = self.shared_down.is_with_experts = True

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
        if self.own is not None:
            weights, ids = own_experts(weights, ids, self.own.start, len(self.own))
        run = sparse_mlp if self.offloaded is None else self.offloaded.run
        out = run(
            x,
            weights,
            ids,
            self.gate_up,
            self.down,
            hidden if self.ranks.decides else torch.zeros_like(hidden),  # only one rank adds it
            shared_weight,
            self.shared_gate_up,
            self.shared_down,
            self.counters,
            deterministic=deterministic,
        )
        return out if self.ranks.is_alone else self.ranks.add(out, deterministic=deterministic)


def _whole_experts(ranks: Ranks, num_experts: int, experts_per_token: int) -> range:
    own = ranks.part(num_experts, "experts")
    if len(own) < experts_per_token:
        raise SplitError(
            f"ep is on, tp is {ranks.size}, but a layer has only {num_experts} experts",
            f"A rank would have {len(own)}, fewer than the {experts_per_token} that a token uses.",
        )
    return own


def _new_share(share: Share, dtype: torch.dtype, device: torch.device | str) -> Weight:
    is_whole = share.own_shape == share.shape
    return new_weight(
        *share.own_shape, dtype=dtype, device=device, share=None if is_whole else share
    )
