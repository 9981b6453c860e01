"""A scheme chooses scales and codes for a matrix. `Codes.dequantize` defines what they mean.

Symmetric: a value is a code times its scale, as every reader of compressed-tensors expects.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.weights.codes import Codes, Scales

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
# Scales to try, as fractions of the one at which nothing is clipped.
SHARES = {4: torch.linspace(1.0, 0.55, 19).tolist(), 8: torch.linspace(1.0, 0.9, 5).tolist()}


@dataclass(frozen=True, slots=True)
class Scheme:
    name: str  # "fp8", "int8" or "int4"
    group: int | None = None  # group size in columns; None: a row

    @property
    def bits(self) -> int:
        return 4 if self.name == "int4" else 8

    @property
    def is_float(self) -> bool:
        return self.name == "fp8"

    def find_scales(
        self,
        weight: Tensor,  # [N, K] float32
        dtype: torch.dtype,  # of the stored scales
        importance: Tensor | None = None,  # [K]  weight of each column's error; None: all equal
    ) -> Tensor:  # [N, G] float32, representable in the dtype
        groups = weight.unflatten(-1, (-1, self.group or weight.shape[-1]))  # [N, G, g]
        largest = groups.abs().amax(-1)
        if self.is_float:
            return _rounded(largest / LARGEST_FP8, dtype)
        weights = None if importance is None else importance.view(groups.shape[1:]) + 1e-12
        best, least = largest, torch.full_like(largest, torch.inf)
        for share in SHARES[self.bits]:
            scales = _rounded(largest * (share / (2 ** (self.bits - 1) - 1)), dtype)
            error = (self.round(groups, scales[..., None]).mul_(scales[..., None])).sub_(groups)
            error = error.square_() if weights is None else error.square_().mul_(weights)
            total = error.sum(-1)
            best = torch.where(total < least, scales, best)
            least = torch.minimum(total, least)
        return best

    def round(self, weight: Tensor, scales: Tensor) -> Tensor:
        """The codes of values, as float32; the scales' shape broadcasts to them."""
        if self.is_float:
            return (weight / scales).clamp_(-LARGEST_FP8, LARGEST_FP8).to(FP8).float()
        middle = 2 ** (self.bits - 1)
        return (weight / scales).round_().clamp_(-middle, middle - 1)

    def spread(self, scales: Tensor, num_columns: int) -> Tensor:  # [N, G] -> [N, K]
        return scales.repeat_interleave(self.group or num_columns, -1)

    def as_codes(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Codes:
        """Float32 codes and their scales in their storage format."""
        kind = FP8 if self.is_float else torch.int8
        return Codes(
            values.to(kind).cpu(),
            self.bits,
            (1, self.group or values.shape[-1]),
            Scales(scales.to(dtype).cpu()),
        )


def _rounded(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to the storage dtype. A scale that is zero or too small becomes the smallest one."""
    return scales.clamp_min(torch.finfo(dtype).tiny).to(dtype).float()
