"""Initial weights of a run: random, from a model folder, or from a folder with more layers on top.

Layers that the folder lacks are appended after its last one. Their output projections are zero, so
the deeper model initially computes the same as the folder's, and learns from there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from penstock.errors import CheckpointError
from training.config import ModelConfig
from training.export import load_published
from training.model import Qwen35Moe, init_weights

LAYERS = "model.language_model.layers."
WRITING = (
    "out_proj.weight",
    "o_proj.weight",
    "down_proj",
    "down_proj.weight",
)  # into the residual stream


def start_weights(model: Qwen35Moe, seed: int, folder: Path | None = None) -> None:
    init_weights(model, seed)
    if folder is None:
        return
    config, found = model.config, ModelConfig.of_folder(folder)
    if found.num_layers > config.num_layers or config.num_layers % config.full_attention_interval:
        raise CheckpointError(
            f"a model of {config.num_layers} layers cannot start from {folder}",
            f"That has {found.num_layers}; layers are added in groups of "
            f"{config.full_attention_interval}.",
            "Give --layers a larger number, or leave it out.",
        )
    state = model.state_dict()
    state.update(load_published(load_file(folder / "model.safetensors"), config.num_experts))
    for name, tensor in state.items():
        if _layer_number(name) >= found.num_layers and name.endswith(WRITING):
            state[name] = torch.zeros_like(tensor)
    model.load_state_dict(state)


def _layer_number(name: str) -> int:
    return int(name.removeprefix(LAYERS).partition(".")[0]) if name.startswith(LAYERS) else -1
