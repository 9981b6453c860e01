"""Random weights in the shapes of a config, for engines of models without real ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from penstock.forge.fragments.shape import Shape

STD = 0.02


def save_toy_weights(
    shape: Shape, folder: Path, dtype: torch.dtype, seed: int, name: str = "model.pt"
) -> Path:
    """Matrices are normal with a deviation of 0.02, norms are near one."""
    # A GPU, if there is one, draws and rounds: eight billion numbers take a CPU minutes.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)

    def draw(size: tuple[int, ...]) -> Tensor:
        numbers = torch.randn(size, generator=generator, device=device).mul_(STD)
        return (numbers.add_(1.0) if len(size) == 1 else numbers).to(dtype).cpu()

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    torch.save({f"{name}.weight": draw(size) for name, size in tensor_shapes(shape)}, path)
    return path


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of every tensor that a model of this shape has, by its bare name."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    yield "embed_tokens", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        at = f"layers.{layer}."
        yield at + "input_layernorm", (hidden,)
        yield at + "self_attn.q_proj", (shape.num_query_rows, hidden)
        yield at + "self_attn.k_proj", (shape.num_key_rows, hidden)
        yield at + "self_attn.v_proj", (shape.num_key_rows, hidden)
        yield at + "self_attn.o_proj", (hidden, shape.num_query_rows)
        yield at + "post_attention_layernorm", (hidden,)
        yield at + "mlp.gate_proj", (width, hidden)
        yield at + "mlp.up_proj", (width, hidden)
        yield at + "mlp.down_proj", (hidden, width)
    yield "norm", (hidden,)
    if shape.has_own_head:
        yield "lm_head", (shape.vocab_size, hidden)
