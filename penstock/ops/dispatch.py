"""Chooses between an op and its twin: the reference, in plain torch, or the kernel, in Triton.

Tensors decide: on a CUDA device the twin runs, elsewhere the reference. Which of several kernels a
shape deserves, and when a library's is better, is the twin's own business. `bench` may watch: it
then runs both.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_REFERENCE = "penstock.ops.reference."


def op(reference: Callable[P, R]) -> Callable[P, R]:
    """The op that `reference` specifies; its first argument is a tensor and decides where it
    runs.
    """

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        run = twin_of(reference) if first.is_cuda else reference
        if (watcher := _watcher.get()) is not None:
            result: R = watcher(reference, run, args, kwargs)
            return result
        return run(*args, **kwargs)

    return call


# Is given an op's reference, what was chosen to run it, and its arguments; returns the op's result.
Watcher = Callable[
    [Callable[..., Any], Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any
]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Every op of this thread passes the watcher meanwhile."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@functools.cache
def twin_of(reference: Callable[P, R]) -> Callable[P, R]:
    """The kernel of an op; the reference itself where there is no Triton, which is slow and
    right.
    """
    if importlib.util.find_spec("triton") is None:
        return reference
    module = reference.__module__.removeprefix(_REFERENCE)
    twin: Callable[P, R] = getattr(
        importlib.import_module(f"penstock.ops.triton.{module}"), reference.__name__
    )
    return twin
