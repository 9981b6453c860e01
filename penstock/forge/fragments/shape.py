"""The sizes of the model, the type its numbers have, and the angles of its rotation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Shape(NamedTuple):
    """The sizes of the model, by the names of its config."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_len: int
    eps: float
    rope_theta: float
    has_own_head: bool = True  # otherwise the embedding is also the head

    @property
    def num_query_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_key_rows(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_shape(config: dict[str, Any]) -> Shape:
    num_heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}  # of newer configs
    return Shape(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_len=config["max_position_embeddings"],
        eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=config.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        has_own_head=not config.get("tie_word_embeddings"),
    )


def pick_dtype(config: dict[str, Any], device: torch.device) -> torch.dtype:
    """Single precision on a CPU; on a GPU, the config's dtype."""
    if device.type == "cpu":
        return torch.float32
    name = str(config.get("dtype") or config.get("torch_dtype") or "float16")
    return DTYPES[name.removeprefix("torch.")]


def rope_angles(shape: Shape, device: torch.device) -> Tensor:
    """The rotation angle of each pair of dimensions by position, [max_len, D / 2] float32"""
    dims = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
    positions = torch.arange(shape.max_len, device=device, dtype=torch.float32)
    return torch.outer(positions, shape.rope_theta ** (-dims / shape.head_dim))
