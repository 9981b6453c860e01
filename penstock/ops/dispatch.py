"""Chooses the implementation of an op: the reference in plain torch, or its kernel in Triton.

The device of the tensors decides: the kernel on CUDA, the reference elsewhere. The kernel's wrapper
picks among kernels and libraries by shape. A watcher may run both, as `bench` does.
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
    """The op specified by `reference`; the device of its first argument, a tensor, decides where it
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


# Called with an op's reference, the chosen implementation and the arguments; returns the result.
Watcher = Callable[
    [Callable[..., Any], Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any
]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Inside this context every op of this thread goes through the watcher."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@functools.cache
def twin_of(reference: Callable[P, R]) -> Callable[P, R]:
    """The kernel of an op; without Triton the reference, which is correct but slow."""
    if importlib.util.find_spec("triton") is None:
        return reference
    module = reference.__module__.removeprefix(_REFERENCE)
    twin: Callable[P, R] = getattr(
        importlib.import_module(f"penstock.ops.triton.{module}"), reference.__name__
    )
    return twin
