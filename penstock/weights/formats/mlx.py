"""MLX: codes in 32-bit words with a scale and a bias per group, or its FP4 and FP8 modes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.models.reading import read, read_size, unusable
from penstock.weights.codes import Codes, Scales
from penstock.weights.formats.fp4 import E2M1, as_e4m3, as_e8m0
from penstock.weights.formats.parts import (
    CODES,
    FLOATS,
    Format,
    Grid,
    Parts,
    check_width,
    describe,
    read_bits,
    read_packed,
)
from penstock.weights.stored import StoredTensor

ENDINGS = {".scales": (".weight", "scales"), ".biases": (".weight", "biases")}
MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # bits and group size
SETTINGS = ("bits", "group_size", "mode")


def read_config(config: Mapping[str, Any]) -> Format:
    """The other keys of the config are module names, each with its own settings (or false)."""
    for module, settings in config.items():
        if module in (*SETTINGS, "quant_method"):
            continue
        if not isinstance(settings, dict | bool):
            raise unusable(f"quantization of {module}", settings, "an object, true or false")
        if isinstance(settings, dict):
            _read_settings({**config, **settings})
    _read_settings(config)
    return Format(ENDINGS, partial(_open, config=config))


def _read_settings(settings: Mapping[str, Any]) -> tuple[str, int, int]:
    mode = read(settings, "mode", str, "affine")
    if mode == "affine":
        return mode, read_bits(settings, (2, 3, 4, 5, 6, 8)), read_size(settings, "group_size")
    if mode not in MODES:
        raise unusable("mode of quantization", mode, f"one of affine, {', '.join(MODES)}")
    bits, group = MODES[mode]
    read_bits({"bits": bits, **settings}, (bits,))
    return mode, bits, group


def _open(parts: Parts, config: Mapping[str, Any]) -> StoredTensor:
    own = config.get(parts.module)
    mode, bits, group = _read_settings({**config, **own} if isinstance(own, dict) else config)
    packed = parts.take(CODES, (torch.uint32,))
    scales = parts.take("scales", FLOATS if mode == "affine" else (torch.uint8,))
    shape = (*packed.shape[:-1], scales.shape[-1] * group if scales.shape else 0)
    check_width(packed, bits, shape[-1])
    grid = Grid.of(parts, "scales", shape, (1, group), (scales.dtype,))
    if mode == "affine":
        biases = Grid.of(parts, "biases", shape, (1, group))

    def read_codes(rows: slice | None, columns: slice | None = None) -> Codes:
        values = read_packed(packed, bits, shape[-1], rows, columns)
        return _codes(values, rows).with_columns(columns, shape[-1])

    def _codes(values: Tensor, rows: slice | None) -> Codes:
        fine, block = grid.read(rows)
        if mode == "affine":
            offsets = Scales(biases.read(rows)[0])
            return Codes(values, bits, block, Scales(fine), offsets=offsets)
        fine = as_e4m3(fine) if mode == "nvfp4" else as_e8m0(fine)
        if mode == "mxfp8":
            return Codes(as_e4m3(values), bits, block, Scales(fine))
        return Codes(values, bits, block, Scales(fine), levels=E2M1)

    kind = describe(f"int{bits}", shape, (1, group)) if mode == "affine" else mode
    return parts.make(shape, kind, read_codes)
