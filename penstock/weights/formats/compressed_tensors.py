"""compressed-tensors, written by llm-compressor: packed and plain integers, FP8, NVFP4, MXFP4,
MXFP8.

Groups in config.json say how modules are quantized: by name, by pattern, by class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.reading import read, read_size, unusable
from penstock.weights.codes import Codes, Scales
from penstock.weights.formats.fp4 import E8M0, as_e8m0, open_mxfp4, open_nvfp4
from penstock.weights.formats.fp8 import open_scaled, read_block
from penstock.weights.formats.parts import (
    CODES,
    FLOATS,
    INT32,
    Format,
    Grid,
    Parts,
    check_fields,
    check_values,
    check_width,
    describe,
    group_order,
    matches,
    read_bits,
    read_packed,
    read_values,
    spellings,
    unpack,
    wrong_shape,
)
from penstock.weights.stored import StoredTensor

SCALE, ZERO, COARSE = "weight_scale", "weight_zero_point", "weight_global_scale"
ENDINGS = {
    ".weight_packed": (".weight", CODES),
    ".weight_shape": (".weight", "weight_shape"),
    ".weight_g_idx": (".weight", "weight_g_idx"),
} | {f".{role}": (".weight", role) for role in (SCALE, ZERO, COARSE)}

FIELDS = (
    *(
        "quant_method",
        "config_groups",
        "format",
        "ignore",
        "kv_cache_scheme",
        "quantization_status",
    ),
    *(
        "global_compression_ratio",
        "version",
        "sparsity_config",
        "run_compressed",
        "compression_version",
    ),
)
GROUP_FIELDS = ("targets", "weights", "input_activations", "output_activations", "format")
WEIGHT_FIELDS = (
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder"),
    *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
)
INTEGERS = ("pack-quantized", "int-quantized", "naive-quantized")
FORMATS = (
    *INTEGERS,
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
ZEROS = (torch.int8, torch.uint8, torch.float8_e4m3fn, *INT32, *FLOATS)


@dataclass(frozen=True, slots=True)
class Group:
    """Weights with the same quantization."""

    targets: tuple[str, ...]
    format: str
    bits: int
    kind: str  # "int" or "float"
    strategy: str
    is_symmetric: bool
    group_size: int | None
    block: tuple[int, int] | None

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        if self.strategy == "tensor":
            return shape[-2], shape[-1]
        if self.strategy == "block":
            assert self.block is not None
            return self.block
        return 1, self.group_size or shape[-1]


def read_config(config: Mapping[str, Any]) -> Format:
    check_fields("compressed-tensors", config, FIELDS)
    sparsity = read(config, "sparsity_config", dict, {})
    check_values("sparsity_config", sparsity, {"format": ("dense",)})
    default = read(config, "format", str, "")
    groups = []
    for name, group in read(config, "config_groups", dict).items():
        if not isinstance(group, dict):
            raise unusable(f"config_groups.{name}", group, "an object")
        check_fields(f"group {name}", group, GROUP_FIELDS)
        if group.get("weights") is not None:
            groups.append(_read_group(group, default))
    return Format(ENDINGS, partial(_open, groups=groups))


def _read_group(group: Mapping[str, Any], default: str) -> Group:
    weights = read(group, "weights", dict)
    check_fields("weights", weights, WEIGHT_FIELDS)
    format = read(group, "format", str, default)
    if format not in FORMATS:
        raise unusable("format of compressed-tensors", format, f"one of {', '.join(FORMATS)}")
    kind = read(weights, "type", str, "int")
    check_values("weights", weights, {"type": ("int", "float")})
    targets = read(group, "targets", list)
    if not all(isinstance(target, str) for target in targets):
        raise unusable("targets", targets, "a list of strings")
    group_size = weights.get("group_size")
    group_size = None if group_size in (None, -1) else read_size(weights, "group_size")
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = read(weights, "strategy", str, "group" if group_size else "tensor")
    if strategy not in strategies:
        raise unusable("strategy", strategy, f"one of {', '.join(strategies)}")
    block = read_block(weights, "block_structure")
    if strategy == "block" and block is None:
        raise unusable(
            "block_structure", block, "two whole numbers above 0, as strategy is 'block'"
        )
    return Group(
        targets=tuple(targets),
        format=format,
        bits=read_bits(weights, range(1, 9), "num_bits"),
        kind=kind,
        strategy=strategy,
        is_symmetric=read(weights, "symmetric", bool, True),
        group_size=group_size if strategy in ("group", "tensor_group") else None,
        block=block,
    )


def find_group(module: str, groups: Sequence[Group]) -> Group:
    """The group of a module: by its name, else by a pattern, else by its class."""

    def by_name(target: str) -> bool:
        return target in spellings(module)

    def by_pattern(target: str) -> bool:
        return target.startswith("re:") and matches(target[3:], module)

    def by_class(target: str) -> bool:
        is_embedding = module.endswith("embed_tokens")
        return target.isidentifier() and (target == "Embedding") == is_embedding

    for is_meant in (by_name, by_pattern, by_class):
        found = [group for group in groups if any(is_meant(target) for target in group.targets)]
        if found:
            return found[0]
    if len(groups) == 1:
        return groups[0]
    raise CheckpointError(f"{module} is quantized, but no group of config_groups targets it")


def _open(parts: Parts, groups: Sequence[Group]) -> StoredTensor:
    group = find_group(parts.module, groups)
    if group.format == "pack-quantized":
        return _open_packed(parts, group)
    if group.format == "nvfp4-pack-quantized":
        return open_nvfp4(parts, SCALE, COARSE, divides=True, group=group.group_size or 16)
    if group.format == "mxfp4-pack-quantized":
        return open_mxfp4(parts, SCALE, group.group_size or 32)
    if group.kind == "int":
        return _open_integers(parts, group)
    if group.bits != 8:
        raise unusable("num_bits", group.bits, f"8, for floats of {group.format}")
    if group.format == "mxfp8-quantized":
        return _open_mxfp8(parts, group)
    codes = parts.take(CODES, (torch.float8_e4m3fn,))
    return open_scaled(parts, group.block_of(codes.shape), SCALE)


def _open_integers(parts: Parts, group: Group) -> StoredTensor:
    codes = parts.take(CODES, (torch.int8,))
    shape = codes.shape
    block = group.block_of(shape)
    grid = Grid.of(parts, SCALE, shape, block)
    zeros = Grid.of(parts, ZERO, shape, block, ZEROS) if ZERO in parts else None
    if zeros is None and not group.is_symmetric:
        parts.take(ZERO, ZEROS)

    def read_codes(rows: slice | None, columns: slice | None = None) -> Codes:
        fine, own_block = grid.read(rows)
        own_zeros = None if zeros is None else zeros.read(rows)[0]
        found = Codes(read_values(codes, rows, columns), 8, own_block, Scales(fine), own_zeros)
        return found.with_columns(columns, shape[-1])

    return parts.make(shape, describe("int8", shape, block), read_codes)


def _open_packed(parts: Parts, group: Group) -> StoredTensor:
    bits, middle = group.bits, 2 ** (group.bits - 1)
    packed = parts.take(CODES, INT32)
    shape = _logical_shape(parts, packed, bits)
    block = group.block_of(shape)
    grid = Grid.of(parts, SCALE, shape, block)
    order = parts.take("weight_g_idx", INT32, (shape[-1],)) if "weight_g_idx" in parts else None
    zeros = None if group.is_symmetric else _packed_zeros(parts, bits, grid)

    def read_codes(rows: slice | None, columns: slice | None = None) -> Codes:
        fine, own_block = grid.read(rows)
        own_order = None if order is None else group_order(order.load(), block[1], order.name)
        if own_order is not None:
            values = unpack(packed.load(rows), bits, shape[-1])[..., own_order]
        else:
            values = read_packed(packed, bits, shape[-1], rows, columns)
        if zeros is None:
            centred = (values - middle).view(torch.int8)
            found = Codes(centred, bits, own_block, Scales(fine), columns=own_order)
        else:
            found = Codes(values, bits, own_block, Scales(fine), zeros(rows), columns=own_order)
        if own_order is not None and columns is not None:
            return found.cut(slice(None), columns)
        return found.with_columns(columns, shape[-1])

    return parts.make(shape, describe(f"int{bits}", shape, block), read_codes)


def _logical_shape(parts: Parts, packed: StoredTensor, bits: int) -> tuple[int, ...]:
    stored = parts.take("weight_shape", (torch.int64, torch.int32), (len(packed.shape),))
    shape = tuple(int(size) for size in stored.load())
    if len(shape) < 2 or min(shape) < 1 or shape[:-1] != packed.shape[:-1]:
        raise CheckpointError(
            f"{stored.name} is {list(shape)}, and {packed.name} {list(packed.shape)}"
        )
    check_width(packed, bits, shape[-1])
    return shape


def _packed_zeros(parts: Parts, bits: int, grid: Grid) -> Callable[[slice | None], Tensor]:
    """They are packed along the rows of the weight; early versions stored bytes."""
    part = parts.take(ZERO, (torch.int8, *INT32))
    *stack, num_rows, num_groups = grid.stored_shape
    expected = (*stack, num_rows, num_groups)
    if part.dtype in INT32:
        expected = (*stack, math.ceil(num_rows * bits / 32), num_groups)
    if part.shape != expected:
        raise wrong_shape(part, expected)

    def read_zeros(rows: slice | None) -> Tensor:
        stored = part.load()
        if part.dtype == torch.int8:
            zeros = (stored.short() + 2 ** (bits - 1)).to(torch.uint8)
        else:
            zeros = unpack(stored.transpose(-1, -2), bits, num_rows).transpose(-1, -2)
        return zeros if rows is None else zeros[rows]

    return read_zeros


def _open_mxfp8(parts: Parts, group: Group) -> StoredTensor:
    codes = parts.take(CODES, (torch.float8_e4m3fn,))
    shape = codes.shape
    grid = Grid.of(parts, SCALE, shape, group.block_of(shape), E8M0)

    def read_codes(rows: slice | None, columns: slice | None = None) -> Codes:
        fine, block = grid.read(rows)
        found = Codes(read_values(codes, rows, columns), 8, block, Scales(as_e8m0(fine)))
        return found.with_columns(columns, shape[-1])

    return parts.make(shape, "mxfp8", read_codes)
