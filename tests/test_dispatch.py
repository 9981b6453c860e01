"""Every op with a kernel has the same name and signature in both; the device decides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock import ops
from penstock.ops import dispatch

MIRRORED = [name for name in ops.__all__ if hasattr(getattr(ops, name), "__wrapped__")]


@pytest.mark.parametrize("name", MIRRORED)
def test_twins_have_one_signature(name: str) -> None:
    reference: Callable[..., Any] = getattr(ops, name).__wrapped__
    twin = dispatch.twin_of(reference)
    assert twin is not reference
    assert inspect.signature(twin) == inspect.signature(reference)


def test_what_a_decode_step_is_made_of_has_kernels() -> None:
    assert {"norm_linear", "linear", "swiglu_linear", "norm_route", "sparse_mlp"} <= set(MIRRORED)
    assert {"rope_and_store", "paged_attention", "gated_delta_net"} <= set(MIRRORED)
    assert {"decode_rows", "take_rows", "sample"} <= set(MIRRORED)


def test_a_cpu_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(reference: Callable[..., Any]) -> Callable[..., Any]:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(dispatch, "twin_of", never)
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    assert torch.equal(ops.linear(x, ops.Weight(weight)), torch.full((2, 4), 3.0))
