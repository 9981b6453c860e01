"""Codes as the tensors of a compressed-tensors checkpoint, and its section of config.json.

FP8 is `float-quantized`, integers are `pack-quantized`: weights only, activations are not
quantized.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.quantize.scheme import Scheme
from penstock.weights.codes import Codes

VERSION = "0.10.2"  # of the library that defines these fields
BITS_OF_WORD = 32
PREFIX = r"^(?:model\.|language_model\.)*"


def parts_of(name: str, codes: Codes) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of a weight, by name."""
    module = name.removesuffix(".weight")
    yield f"{module}.weight_scale", codes.scales.fine
    if codes.values.is_floating_point():
        yield f"{module}.weight", codes.values
        return
    yield f"{module}.weight_packed", pack(codes.values, codes.bits)
    yield f"{module}.weight_shape", torch.tensor(codes.values.shape, dtype=torch.int64)


def pack(values: Tensor, bits: int) -> Tensor:  # [N, K] int8 -> [N, ceil(K * bits / 32)] int32
    """The first code is in the lowest bits of a word."""
    per_word = BITS_OF_WORD // bits
    codes = values.to(torch.int32) + 2 ** (bits - 1)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word))
    shifts = torch.arange(per_word, dtype=torch.int32) * bits
    # The sum of disjoint bits; the highest one makes an int32 word negative.
    return (codes.unflatten(-1, (-1, per_word)) << shifts).sum(-1, dtype=torch.int32)


def quantization_config(
    schemes: Mapping[str, Scheme], kept: Collection[str], modules: Collection[str]
) -> dict[str, Any]:
    """`schemes` by module; `kept` are linear layers that stay unquantized; `modules` is all."""
    by_scheme: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(module)
    groups = {}
    for number, (scheme, own) in enumerate(by_scheme.items()):
        # A class is the shortest target; with mixed schemes, each needs names.
        targets = ["Linear"] if len(by_scheme) == 1 else _targets(own, modules)
        groups[f"group_{number}"] = _group(scheme, targets)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": _targets(kept, modules),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "version": VERSION,
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    return {
        "targets": targets,
        "format": "float-quantized" if scheme.is_float else "pack-quantized",
        "weights": {
            "num_bits": scheme.bits,
            "type": "float" if scheme.is_float else "int",
            "symmetric": True,
            "strategy": "channel" if scheme.group is None else "group",
            "group_size": scheme.group,
            "block_structure": None,
            "dynamic": False,
            "actorder": None,
            "observer": "minmax",
            "observer_kwargs": {},
        },
        "input_activations": None,
        "output_activations": None,
    }


def _targets(own: Collection[str], modules: Collection[str]) -> list[str]:
    """One pattern for modules that differ only in numbers, if all of them are included."""
    alike: dict[str, set[str]] = {}
    for module in modules:
        alike.setdefault(_target(module, any_number=True), set()).add(module)
    chosen = set(own)
    targets: dict[str, None] = {}
    for module in own:
        pattern = _target(module, any_number=True)
        targets[pattern if alike[pattern] <= chosen else _target(module)] = None
    return list(targets)


def _target(module: str, *, any_number: bool = False) -> str:
    """A pattern that also matches the text model inside a larger model."""
    bare = re.sub(PREFIX, "", module)
    name = re.escape(bare)
    if any_number:
        name = re.sub(r"(?<=\\\.)\d+(?=\\\.|$)", r"\\d+", name)
    return bare if name == bare else f"re:{PREFIX}{name}$"
