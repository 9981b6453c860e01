"""Typed reads from a config.json: a key that is missing or of another type is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

from penstock.errors import CheckpointError

T = TypeVar("T", int, float, str, bool, list[Any], dict[str, Any])
D = TypeVar("D")

_REQUIRED: Any = object()
_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_NAMES |= {list: "a list", dict: "an object"}


@overload
def read(config: Mapping[str, Any], key: str, kind: type[T]) -> T: ...
@overload
def read(config: Mapping[str, Any], key: str, kind: type[T], default: D) -> T | D: ...
def read(config: Mapping[str, Any], key: str, kind: type[Any], default: Any = _REQUIRED) -> Any:
    """The value of a key; an absent or null one is the default, or an error when there is none."""
    value = config.get(key)
    if value is None:
        if default is not _REQUIRED:
            return default
        raise CheckpointError(
            f"config.json has no {key}",
            f"It must be {_NAMES[kind]}; the keys there are {', '.join(sorted(config)) or 'none'}.",
            "Check that config.json is complete and belongs to this model.",
        )
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:  # not isinstance: True is no whole number
        raise CheckpointError(
            f"{key} in config.json is {value!r}",
            f"It must be {_NAMES[kind]}.",
            "Correct config.json, or download it again.",
        )
    return value
