"""What an engine is to be written for: a config, the weights beside it, a device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import CheckpointError, ConfigError
from penstock.forge.fragments.shape import Shape, pick_dtype, read_shape

MODEL_TYPES = ("tiny_llama", None)


@dataclass(frozen=True, slots=True)
class Target:
    config: dict[str, Any]
    shape: Shape
    weight_dir: Path
    device: str
    dtype: torch.dtype

    @classmethod
    def open(cls, config_path: Path, weight_dir: Path, device: str) -> Target:
        if not config_path.exists():
            raise CheckpointError(f"There is no {config_path}", "", "Name a config with --config.")
        if not (weight_dir / "model.pt").exists():
            raise CheckpointError(
                f"There is no {weight_dir / 'model.pt'}",
                "Weights are one state dict in a file model.pt.",
                f"python scripts/generate_toy_weights.py --config {config_path} --output {weight_dir}",
            )
        try:
            config = json.loads(config_path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{config_path} is not JSON", f"{error}.") from None
        return cls.of(config, weight_dir, device)

    @classmethod
    def of(cls, config: dict[str, Any], weight_dir: Path, device: str) -> Target:
        if config.get("model_type") not in MODEL_TYPES:
            raise ConfigError(
                f"The config is of a {config.get('model_type')!r}",
                "forge writes engines for plain Llamas: model_type tiny_llama, interleaved rope, no biases.",
            )
        try:
            shape = read_shape(config)
        except KeyError as error:
            raise ConfigError(f"The config has no {error.args[0]!r}") from None
        if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
            raise ConfigError(
                f"{shape.num_heads} heads of {shape.head_dim} over {shape.num_kv_heads} key heads do not go",
                "Heads are a multiple of key heads, and a head has an even width.",
            )
        dtype = pick_dtype(config, torch.device(device))
        return cls(config, shape, weight_dir.resolve(), device, dtype)

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def weight_bytes(self) -> int:
        """Of what a decode step reads: everything but the embedding."""
        shape = self.shape
        heads = 2 * shape.num_query_rows + 2 * shape.num_key_rows
        layer = shape.hidden_size * (heads + 3 * shape.intermediate_size)
        return (shape.num_layers * layer + shape.vocab_size * shape.hidden_size) * self.dtype.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.shape.num_layers * self.shape.num_key_rows * self.dtype.itemsize

    def describe(self) -> str:
        """One line: `12 layers x 768, 12 heads of 64 over 4 key heads, vocabulary 32000, bfloat16`."""
        shape = self.shape
        heads = f"{shape.num_heads} heads of {shape.head_dim} over {shape.num_kv_heads} key heads"
        numbers = str(self.dtype).removeprefix("torch.")
        layers = f"{shape.num_layers} layers x {shape.hidden_size}"
        return f"{layers}, {heads}, vocabulary {shape.vocab_size}, {numbers}"
