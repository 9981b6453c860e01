"""The norm kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from kernel_checks import FULL_SIZE, PLACES, assert_near, random
from penstock.ops.reference import norm as reference
from penstock.ops.triton import norm

EPS = 1e-6


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (2, 5, 96), (7, 1000)])
def test_rms_norm_is_its_reference_for_any_shape(
    device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = random(*shape, dtype=dtype, device=device, scale=3.0)
    weight = random(shape[-1], dtype=torch.float32, device=device, seed=1)
    seen = norm.rms_norm(x, weight, EPS)
    assert seen.dtype == dtype
    assert_near(seen, reference.rms_norm(x, weight, EPS), dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rms_norm_takes_rows_that_are_parts_of_something_else(
    device: str, dtype: torch.dtype
) -> None:
    wide = random(5, 200, dtype=dtype, device=device)
    weight = random(64, dtype=torch.float32, device=device, seed=1)
    columns = random(64, 5, dtype=dtype, device=device).T
    for x in (wide[:, 100:164], wide[:, 10:74], columns):
        assert_near(norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rms_norm_of_a_tiny_row_is_held_by_epsilon(device: str, dtype: torch.dtype) -> None:
    x = random(2, 64, dtype=torch.float32, device=device, scale=1e-3).to(dtype)
    weight = torch.ones(64, device=device)
    assert_near(norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), dtype)
    assert (norm.rms_norm(torch.zeros_like(x), weight, EPS) == 0).all()


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (7, 1000)])
def test_two_norms_stand_beside_each_other(
    device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    first = random(*shape, dtype=dtype, device=device, scale=3.0)
    wide = random(shape[0], 3 * shape[1], dtype=dtype, device=device, seed=1)
    second = wide[:, shape[1] : 2 * shape[1]]  # its rows are parts of something else
    weights = [random(shape[1], dtype=torch.float32, device=device, seed=n) for n in (2, 3)]
    seen = norm.rms_norm_pair(first, weights[0], second, weights[1], EPS)
    assert seen.dtype == dtype
    assert_near(seen, reference.rms_norm_pair(first, weights[0], second, weights[1], EPS), dtype)
    alone = [norm.rms_norm(x, weight, EPS) for x, weight in zip((first, second), weights)]
    assert torch.equal(seen, torch.cat(alone, dim=1))


@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
@pytest.mark.parametrize("shape", [(1, 2048), (64, 2560), (8192, 5120)])
def test_rms_norm_is_its_reference_at_full_size(
    device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = random(*shape, dtype=dtype, device=device)
    weight = random(shape[1], dtype=torch.float32, device=device, seed=1)
    assert_near(norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), dtype)
