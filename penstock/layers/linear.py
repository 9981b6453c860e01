"""A linear layer with fused operations: norm or activation before, bias and residual after.

With several ranks, each holds some of its outputs, or some of its inputs: then the partial products
of all ranks are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.layers.parameter import new_weight, norm_parameter, parameter
from penstock.ops import RoundedTokens, Weight, linear, norm_linear, swiglu_linear
from penstock.parallel.ranks import ALONE, Ranks
from penstock.parallel.share import Kept, Share


class Linear(nn.Module):
    """[T, K] -> [T, N]. With `eps` the input is normed first; with `swiglu` it is gate and up, [T,
    2K], or what a GEMM that `ends_in_swiglu` made of them.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        weight: Weight | None = None,  # shared with another module, as a tied head
        bias: bool = False,
        eps: float | None = None,
        swiglu: bool = False,
        outputs: Kept | None = None,  # the outputs that this rank computes
        inputs: Kept | None = None,  # the inputs that this rank has; partial products are summed
        ranks: Ranks = ALONE,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        assert not (swiglu and (bias or eps is not None)), "no model combines these"
        share = None
        if not ranks.is_alone and (outputs is not None or inputs is not None):
            share = Share((num_outputs, num_inputs), (outputs, inputs))
            num_outputs, num_inputs = share.own_shape
        self.ranks = ranks if inputs is not None else ALONE
        self.eps = eps
        self.swiglu = swiglu
        self.norm = None if eps is None else norm_parameter(num_inputs, device)
        self.weight = weight or new_weight(
            num_outputs, num_inputs, dtype=dtype, device=device, share=share
        )
        self.bias = parameter(num_outputs, dtype=dtype, device=device) if bias else None
        self.shares: dict[str, Share] = {}  # shards of plain parameters
        if bias and share is not None and outputs is not None:
            self.shares["bias"] = Share(share.shape[:1], (outputs,))

    def forward(
        self,
        x: Tensor | RoundedTokens,  # [T, K]
        residual: Tensor | None = None,  # [T, N], consumed: the result may overwrite it
        *,
        out_dtype: torch.dtype | None = None,  # of a normed GEMM, without intermediate rounding
        ends_in_swiglu: bool = False,  # of a normed GEMM: silu(gate) * up of its result, [T, N / 2]
        deterministic: bool = False,
    ) -> Tensor:  # [T, N]
        if self.norm is not None:
            assert residual is None
            assert isinstance(x, Tensor)
            assert self.eps is not None
            return norm_linear(
                x,
                self.norm,
                self.eps,
                self.weight,
                self.bias,
                out_dtype=out_dtype,
                ends_in_swiglu=ends_in_swiglu,
                deterministic=deterministic,
            )
        bias = self.bias
        if not self.ranks.decides:  # only one rank adds these
            bias = residual = None
        if self.swiglu:
            assert isinstance(x, Tensor)
            out = swiglu_linear(x, self.weight, residual, deterministic=deterministic)
        else:
            out = linear(x, self.weight, bias, residual, deterministic=deterministic)
        return out if self.ranks.is_alone else self.ranks.add(out, deterministic=deterministic)
