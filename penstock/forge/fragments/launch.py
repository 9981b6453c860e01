# mypy: disable-error-code="no-untyped-def"
"""How kernels are launched: on cards that can, each starts while the one before it still runs.

A kernel first lets the next one start, may read weights, then waits for the one before, and only then reads
activations and writes. Every program waits, so a kernel that is complete implies that all before it are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        tl_cuda.gdc_wait()


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Kernels of cards from sm_90 on start early; PDL tells them so."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def num_processors(device: torch.device) -> int:
    """What a grid should fill. An interpreter pretends to have a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
