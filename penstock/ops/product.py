"""The arguments of a GEMM of activations and a weight, for every kernel that computes one.

    out [T, N] = prepared(x) [T, K] @ weight [N, K] transposed, + bias [N], + residual [T, N]

`prepared` is x as it is, its RMS norm, or silu(gate) * up of its two halves. With `ends_in_swiglu`
the result is silu(gate) * up of the halves of `out`, [T, N / 2].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tile = Mapping[str, int]  # the constants of a kernel, and its num_warps and num_stages


@dataclass(frozen=True, slots=True)
class Product:
    x: Tensor  # [T, K], or [T, 2M] (gate, then up) when is_swiglu
    weight: Tensor  # [N, K]
    out_dtype: torch.dtype
    bias: Tensor | None = None  # [N]
    residual: Tensor | None = None  # [T, N]
    norm_weight: Tensor | None = None  # [K] float32
    eps: float = 0.0
    is_swiglu: bool = False
    ends_in_swiglu: bool = False

    def __post_init__(self) -> None:
        assert self.x.shape[1] == self.weight.shape[1] * (2 if self.is_swiglu else 1)
        assert self.x.stride(-1) == 1, "activations are read along contiguous rows"
        assert self.residual is None or self.residual.stride(-1) == 1
        assert self.weight.is_contiguous()

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """N, K"""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def row_strides(self) -> tuple[int, int]:
        """Strides of x and the residual. A single row gets the stride of a contiguous one: kernels
        are compiled for it.
        """
        if self.num_tokens == 1:
            return self.x.shape[1], self.shape[0]
        return self.x.stride(0), self.residual.stride(
            0
        ) if self.residual is not None else self.shape[0]

    def new_out(self) -> Tensor:
        width = self.shape[0] // (2 if self.ends_in_swiglu else 1)
        return torch.empty(self.num_tokens, width, dtype=self.out_dtype, device=self.x.device)
