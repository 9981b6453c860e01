"""How the codes of one matrix are chosen: round to nearest, or column by column, where later
columns compensate for the errors of earlier ones (GPTQ, arXiv 2210.17323).
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.quantize.inputs import Moments
from penstock.quantize.scheme import Scheme
from penstock.weights.codes import Codes

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
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(
            "A matrix has values that are not finite",
            todo="Check that the checkpoint is not damaged.",
        )
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
