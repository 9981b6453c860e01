"""NVIDIA's Model Optimizer: FP8 and NVFP4, distinguished by the dtype of each weight.

Its config is `quantization_config` in config.json, or a separate file in older releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock.errors import CheckpointError
from penstock.models.reading import read, unusable
from penstock.weights.formats.fp4 import open_nvfp4
from penstock.weights.formats.fp8 import open_scaled
from penstock.weights.formats.parts import CODES, Format, Parts, check_fields
from penstock.weights.stored import StoredTensor

SCALE, COARSE, BEFORE = "weight_scale", "weight_scale_2", "pre_quant_scale"
ENDINGS = {f".{role}": (".weight", role) for role in (SCALE, COARSE, BEFORE)}
FIELDS = (
    *(
        "quant_method",
        "quant_algo",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "group_size",
        "ignore",
    ),
    *("exclude_modules", "producer", "config_groups", "quantization", "quantized_layers"),
)
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")


def read_config(config: Mapping[str, Any]) -> Format:
    check_fields("modelopt", config, FIELDS)
    if "quantization" in config:
        config = read(config, "quantization", dict)
        check_fields("modelopt", config, FIELDS)
    algorithm = read(config, "quant_algo", str, "")
    if algorithm.upper() not in ALGORITHMS:
        raise unusable("quant_algo", algorithm, f"one of {', '.join(ALGORITHMS)}")
    return Format(ENDINGS, _open)


def _open(parts: Parts) -> StoredTensor:
    if BEFORE in parts:
        raise CheckpointError(
            f"{parts.name} has a {BEFORE}, which scales activations and is not supported"
        )
    if parts.take(CODES, (torch.uint8, torch.float8_e4m3fn)).dtype == torch.uint8:
        return open_nvfp4(parts, SCALE, COARSE, divides=False)
    return open_scaled(parts, None, SCALE)
