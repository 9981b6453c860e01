"""A scheme chooses scales and codes for a matrix. `Codes.dequantize` defines what they mean.

Symmetric: a value is a code times its scale, as every reader of compressed-tensors expects.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.quantize.inputs import Moments
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
    """Rounded to the storage dtype. A scale that is zero or too small becomes the smallest one: in
    float16 a subnormal number, since rows of small weights have scales below its normal ones.
    """
    own, wide = torch.finfo(dtype), torch.finfo(torch.float32)
    return scales.clamp_min(max(own.tiny * own.eps, wide.tiny)).to(dtype).float()


BLOCK = 128  # columns corrected one by one before the rest at once
DAMPING = 0.01  # fraction of the mean of the diagonal
MAX_DAMPING = 10.0


def quantize_matrix(
    weight: Tensor,  # [N, K] float32
    scheme: Scheme,
    dtype: torch.dtype,  # of the scales
    moments: Moments | None,  # of its inputs; None: unknown
    *,
    corrects: bool,
) -> Codes:
    """Rounds to nearest or, if it corrects, column by column, where later columns compensate for
    the errors of earlier ones (GPTQ, arXiv 2210.17323)."""
    importance = None if moments is None else moments.importance
    scales = scheme.find_scales(weight, dtype, importance)
    if moments is not None and corrects:
        values = _correct(weight, scheme, scales, moments)
    else:
        values = scheme.round(weight, scheme.spread(scales, weight.shape[1]))
    return scheme.as_codes(values, scales, dtype)


def _correct(weight: Tensor, scheme: Scheme, scales: Tensor, moments: Moments) -> Tensor:
    """Processes columns by importance; scales and groups keep their order in the file."""
    num_columns = weight.shape[1]
    order = torch.argsort(moments.products.diagonal(), descending=True)
    upper = _inverse_root(moments.products[order][:, order])
    weight = weight[:, order]  # a copy
    scales = scheme.spread(scales, num_columns)[:, order]
    values = torch.empty_like(weight)
    for first in range(0, num_columns, BLOCK):
        last = min(first + BLOCK, num_columns)
        errors = torch.empty_like(weight[:, first:last])
        for column in range(first, last):
            own, scale = weight[:, column], scales[:, column]
            values[:, column] = scheme.round(own, scale)
            error = (own - values[:, column] * scale) / upper[column, column]
            weight[:, column:last] -= torch.outer(error, upper[column, column:last])
            errors[:, column - first] = error
        weight[:, last:] -= errors @ upper[first:last, last:]
    ordered = torch.empty_like(values)
    ordered[:, order] = values
    return ordered


def _inverse_root(products: Tensor) -> Tensor:
    """The upper triangle U of the inverse, U^T U, of a matrix that may be singular and is damped
    for it.
    """
    mean = products.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    damping = DAMPING
    while damping <= MAX_DAMPING:
        damped = products + torch.eye(len(products), device=products.device) * (damping * mean)
        root, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(root)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        damping *= 10
    return torch.eye(len(products), device=products.device)  # nothing is corrected
