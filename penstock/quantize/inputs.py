"""Collects the inputs of a layer's matrices while calibration text runs through it.

Keeps the second moment of the inputs, which determines a quantized matrix's output error. Experts
have one each, computed on demand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.layers.linear import Linear
from penstock.layers.mlp import SparseMLP
from penstock.models.placement import Placement
from penstock.ops import norm_route, rms_norm
from penstock.ops.reference.matmul import swiglu


@dataclass(slots=True)
class Moments:
    """Sums over the input tokens of a matrix [N, K]."""

    products: Tensor  # [K, K] float32
    sizes: Tensor  # [K] float32  of absolute values
    num_tokens: int

    @classmethod
    def of(cls, x: Tensor) -> Moments:  # [T, K]
        wide = x.float()
        return cls(wide.t() @ wide, wide.abs().sum(0), len(wide))

    def add(self, x: Tensor) -> None:
        wide = x.float()
        self.products.addmm_(wide.t(), wide)
        self.sizes += wide.abs().sum(0)
        self.num_tokens += len(wide)

    @property
    def importance(self) -> Tensor:  # [K]
        return self.products.diagonal() / self.num_tokens

    def divided(self, scales: Tensor) -> Moments:
        """For inputs that are divided by one number per column."""
        return Moments(
            self.products / torch.outer(scales, scales), self.sizes / scales, self.num_tokens
        )

    def error_of(self, difference: Tensor) -> Tensor:  # [N, K] -> []
        """The squared output error per token caused by a difference of matrices."""
        return ((difference @ self.products) * difference).sum() / self.num_tokens


class LayerInputs:
    """The inputs of all matrices of a layer, by the names of our parameters."""

    def __init__(self) -> None:
        self._moments: dict[str, Moments] = {}
        self._routed: dict[str, list[tuple[Tensor, Tensor]]] = {}  # normed tokens, their experts
        self._mlps: dict[str, SparseMLP] = {}
        self._scales: dict[tuple[str, int | None], Tensor] = {}
        self._last: tuple[tuple[str, int], Moments | None] | None = None

    @contextmanager
    def watch(self, layer: nn.Module, prefix: str) -> Iterator[None]:
        hooks = []
        for name, module in layer.named_modules():
            if isinstance(module, Linear):
                see: Any = partial(self._see_linear, f"{prefix}{name}.weight")
            elif isinstance(module, SparseMLP):
                see = partial(self._see_experts, f"{prefix}{name}.")
            else:
                continue
            hooks.append(module.register_forward_pre_hook(see))
        yield
        for hook in hooks:
            hook.remove()
        for name, seen in self._routed.items():
            self._routed[name] = [
                (torch.cat([x for x, _ in seen]), torch.cat([i for _, i in seen]))
            ]

    def rescale(self, parameter: str, expert: int | None, scales: Tensor) -> None:
        """From now on the inputs are divided by these."""
        self._scales[parameter, expert] = scales
        self._last = None

    def of(self, place: Placement) -> Moments | None:
        """For the matrix of this placement; None: it has seen no token."""
        expert = next((part for part in place.index if isinstance(part, int)), None)
        moments = self._moments.get(place.parameter)
        if expert is not None:
            moments = self._of_expert(place.parameter, expert)
        if moments is None or not moments.num_tokens:
            return None
        for key in ((place.parameter, None), (place.parameter, expert)):
            if key in self._scales:
                return moments.divided(self._scales[key].to(moments.sizes.device))
        return moments

    def of_all_experts(self, mlp: str) -> Moments:
        """For the normed tokens, whichever expert they go to."""
        (seen,) = self._routed[mlp]
        return Moments.of(seen[0])

    def _see_linear(self, key: str, module: Linear, arguments: tuple[Any, ...]) -> None:
        x: Tensor = arguments[0]
        if module.norm is not None:
            assert module.eps is not None
            x = rms_norm(x, module.norm, module.eps)
        elif module.swiglu:
            x = swiglu(x, False)
        self._add(key, x)

    def _see_experts(self, prefix: str, mlp: SparseMLP, arguments: tuple[Any, ...]) -> None:
        x, _, ids, _ = norm_route(
            arguments[0], mlp.norm, mlp.eps, mlp.router, mlp.experts_per_token, mlp.normalize
        )
        self._mlps[prefix] = mlp
        self._routed.setdefault(prefix, []).append((x, ids))
        if mlp.shared_gate_up is not None:
            self._add(f"{prefix}shared_gate_up", x)
            self._add(f"{prefix}shared_down", swiglu(x @ mlp.shared_gate_up.values.t(), False))

    def _add(self, key: str, x: Tensor) -> None:
        if key in self._moments:
            self._moments[key].add(x)
        else:
            self._moments[key] = Moments.of(x)

    def _of_expert(self, parameter: str, expert: int) -> Moments | None:
        prefix, _, matrix = parameter.rpartition(".")
        if self._last is None or self._last[0] != (parameter, expert):  # gate and up share them
            (tokens, ids), mlp = self._routed[f"{prefix}."][0], self._mlps[f"{prefix}."]
            own = tokens[(ids == expert).any(-1)]
            if matrix == "down" and len(own):
                own = swiglu(own @ mlp.gate_up.values[expert].t(), False)
            self._last = (parameter, expert), Moments.of(own) if len(own) else None
        return self._last[1]
