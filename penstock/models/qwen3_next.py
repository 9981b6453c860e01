"""Qwen3-Next: the Qwen3.5 model with other defaults and tensors, and dense layers among MoE layers.

Reads the differences in its config.json; `qwen3_next_placements` maps its checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from penstock.models.qwen3_5 import Qwen3_5
from penstock.models.qwen3_5_config import Qwen3_5Config
from penstock.models.qwen3_next_placements import find_placements
from penstock.models.reading import MAX_LAYERS, read_size, read_sparse_layers
from penstock.parallel.ranks import ALONE, Ranks

# Defaults for missing keys. Releases have a drafting head and no key for it.
DEFAULTS = {"rope_theta": 10_000.0, "mtp_num_hidden_layers": 1}


def build(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device | str,
    with_drafting_head: bool,
    ranks: Ranks = ALONE,
) -> Qwen3_5:
    read = read_config(config)
    read = dataclasses.replace(read, has_mtp=read.has_mtp and with_drafting_head)
    return Qwen3_5(read, dtype, device, find_placements, ranks)


def read_config(config: Mapping[str, Any]) -> Qwen3_5Config:
    num_layers = read_size(config, "num_hidden_layers", largest=MAX_LAYERS)
    sparse = read_sparse_layers(config, num_layers)
    given = {key: value for key, value in config.items() if value is not None}
    as_qwen3_5 = {
        **DEFAULTS,
        **given,
        "model_type": "qwen3_5_moe_text" if sparse else "qwen3_5_text",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    read = Qwen3_5Config.from_dict(as_qwen3_5)
    return dataclasses.replace(
        read,
        is_sparse=tuple(layer in sparse for layer in range(num_layers)),
        intermediate_size=0
        if len(sparse) == num_layers
        else read_size(config, "intermediate_size"),
    )
