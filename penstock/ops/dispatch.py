"""Chooses between an op and its twin: the reference, in plain torch, or the kernel, in Triton.

Tensors decide: on a CUDA device the twin runs, elsewhere the reference. Which of several kernels a shape
deserves, and when a library's is better, is the twin's own business.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_REFERENCE = "penstock.ops.reference."


def op(reference: Callable[P, R]) -> Callable[P, R]:
    """The op that `reference` specifies; its first argument is a tensor and decides where it runs."""

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        return (twin_of(reference) if first.is_cuda else reference)(*args, **kwargs)

    return call


@functools.cache
def twin_of(reference: Callable[P, R]) -> Callable[P, R]:
    """The kernel of an op; the reference itself where there is no Triton, which is slow and right."""
    if importlib.util.find_spec("triton") is None:
        return reference
    module = reference.__module__.removeprefix(_REFERENCE)
    twin: Callable[P, R] = getattr(
        importlib.import_module(f"penstock.ops.triton.{module}"), reference.__name__
    )
    return twin
