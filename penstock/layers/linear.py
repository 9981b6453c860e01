"""A linear layer with what is fused to it: norm or activation before, bias and residual after."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.layers.parameter import new_weight, norm_parameter, parameter
from penstock.ops import Weight, linear, norm_linear, swiglu_linear


class Linear(nn.Module):
    """[T, K] -> [T, N]. With `eps` the input is normed first; with `swiglu` it is gate and up, [T,
    2K].
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        weight: Weight | None = None,  # shared with another module: a tied head
        bias: bool = False,
        eps: float | None = None,
        swiglu: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        assert not (swiglu and (bias or eps is not None)), "no model combines these"
        self.eps = eps
        self.swiglu = swiglu
        self.norm = None if eps is None else norm_parameter(num_inputs, device)
        self.weight = weight or new_weight(num_outputs, num_inputs, dtype=dtype, device=device)
        self.bias = parameter(num_outputs, dtype=dtype, device=device) if bias else None

    def forward(
        self,
        x: Tensor,  # [T, K]
        residual: Tensor | None = None,  # [T, N], given up: the result may take its place
        *,
        out_dtype: torch.dtype | None = None,  # of a normed product, without rounding before
        deterministic: bool = False,
    ) -> Tensor:  # [T, N]
        if self.norm is not None:
            assert residual is None
            assert self.eps is not None
            return norm_linear(
                x,
                self.norm,
                self.eps,
                self.weight,
                self.bias,
                out_dtype=out_dtype,
                deterministic=deterministic,
            )
        if self.swiglu:
            return swiglu_linear(x, self.weight, residual, deterministic=deterministic)
        return linear(x, self.weight, self.bias, residual, deterministic=deterministic)
