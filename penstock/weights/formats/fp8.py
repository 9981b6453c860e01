"""FP8 E4M3 as in the official Qwen releases (`quant_method: fp8`), with a scale per block or
tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from penstock.models.reading import MAX_NUMBER, unusable
from penstock.weights.codes import Codes, Scales
from penstock.weights.formats.parts import (
    CODES,
    FLOATS,
    Format,
    Grid,
    Parts,
    check_fields,
    check_values,
    describe,
    read_values,
)
from penstock.weights.stored import StoredTensor

FIELDS = (
    *("quant_method", "fmt", "scale_fmt", "activation_scheme", "weight_block_size", "dequantize"),
    *("modules_to_not_convert", "modules_to_convert", "ignored_layers", "kv_cache_scheme"),
)
FP8_SCALES = (*FLOATS, torch.float8_e8m0fnu)


SCALE = "weight_scale_inv"
ENDINGS = {
    ".weight_scale_inv": (".weight", SCALE),
    ".weight_scale": (".weight", SCALE),
    "_scale_inv": ("", SCALE),  # for stacked experts, whose name has no ".weight"
}


def read_config(config: Mapping[str, Any]) -> Format:
    check_fields("fp8", config, FIELDS)
    check_values("fp8", config, {"fmt": ("e4m3",), "activation_scheme": ("dynamic", "static")})
    return Format(
        ENDINGS, partial(open_scaled, block=read_block(config, "weight_block_size"), role=SCALE)
    )


def read_block(config: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Rows and columns; early files of compressed-tensors write "128x128"."""
    block = config.get(key)
    if block is None:
        return None
    sizes = block
    if isinstance(block, str) and re.fullmatch(r"\d{1,8}x\d{1,8}", block, re.ASCII):
        sizes = [int(size) for size in block.split("x")]
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise unusable(key, block, "two whole numbers")
    if not all(type(size) is int and 1 <= size <= MAX_NUMBER for size in sizes):
        raise unusable(key, block, f"two whole numbers from 1 to {MAX_NUMBER:,}")
    return sizes[0], sizes[1]


def open_scaled(parts: Parts, block: tuple[int, int] | None, role: str) -> StoredTensor:
    """A weight of FP8 values with scales that multiply them."""
    codes = parts.take(CODES, (torch.float8_e4m3fn,))
    shape = codes.shape
    if block is None:
        num_scales = math.prod(parts.take(role, FP8_SCALES).shape)
        is_per_row = num_scales == math.prod(shape[:-1])
        block = (1 if is_per_row else shape[-2], shape[-1])
    grid = Grid.of(parts, role, shape, block, FP8_SCALES)

    def read_codes(rows: slice | None, columns: slice | None = None) -> Codes:
        fine, own_block = grid.read(rows)
        values = read_values(codes, rows, columns)
        return Codes(values, 8, own_block, Scales(fine)).with_columns(columns, shape[-1])

    return parts.make(shape, describe("fp8", shape, block), read_codes)
