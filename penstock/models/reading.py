"""Typed reads from a model's config (config.json, or GGUF metadata translated to its keys); a
missing key or a wrong type is an error that names the key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, overload

from penstock.errors import CheckpointError

T = TypeVar("T", int, float, str, bool, list[Any], dict[str, Any])
D = TypeVar("D")

# Above all sizes and counts of real models; the largest is a context of 10 million tokens.
MAX_NUMBER = 2**24
# Several times the deepest model; every layer is built before the weights are read.
MAX_LAYERS = 1000
MAX_SHOWN = 100  # characters of an unusable value

_REQUIRED: Any = object()
_NAMES = {
    int: f"a whole number from 0 to {MAX_NUMBER:,}",
    float: "a number above 0",
    str: "a string",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


@overload
def read(config: Mapping[str, Any], key: str, kind: type[T]) -> T: ...
@overload
def read(config: Mapping[str, Any], key: str, kind: type[T], default: D) -> T | D: ...
def read(config: Mapping[str, Any], key: str, kind: type[Any], default: Any = _REQUIRED) -> Any:
    """The value of a key; the default if it is absent or null, an error without a default."""
    value = config.get(key)
    if value is None:
        if default is not _REQUIRED:
            return default
        raise CheckpointError(
            f"The model's config has no {key}",
            f"It must be {_NAMES[kind]}; the keys there are {', '.join(sorted(config)) or 'none'}.",
            "Check that the config is complete and belongs to this model.",
        )
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    # Not isinstance: True must not count as a whole number.
    if type(value) is not kind or not _is_in_range(value):
        raise unusable(key, value, _NAMES[kind])
    return value


def read_size(
    config: Mapping[str, Any], key: str, default: int = _REQUIRED, *, largest: int = MAX_NUMBER
) -> int:
    """A whole number of at least one: layers, heads, elements."""
    size = read(config, key, int, default)
    if not 1 <= size <= largest:
        raise unusable(key, size, f"a whole number from 1 to {largest:,}")
    return size


def read_num_experts(config: Mapping[str, Any]) -> int:
    """Published as num_experts; transformers 5 writes num_local_experts."""
    return read(
        config, "num_local_experts" if "num_local_experts" in config else "num_experts", int
    )


def read_sparse_layers(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """The layers with experts: every decoder_sparse_step-th one, except those in
    mlp_only_layers.
    """
    step = read_size(config, "decoder_sparse_step", 1)
    dense = read(config, "mlp_only_layers", list, None) or []
    if any(type(layer) is not int for layer in dense):
        raise unusable("mlp_only_layers", dense, "a list of layer numbers")
    if read_num_experts(config) == 0:
        return frozenset()
    return frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)


def unusable(key: str, value: object, expected: str) -> CheckpointError:
    shown = repr(value)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
    return CheckpointError(
        f"{key} in the model's config is {shown}",
        f"It must be {expected}.",
        "Correct the config, or download the model again.",
    )


def _is_in_range(value: object) -> bool:
    """All numbers of a model are sizes, counts or positive factors."""
    if type(value) is int:
        return 0 <= value <= MAX_NUMBER
    return type(value) is not float or 0.0 < value < math.inf
