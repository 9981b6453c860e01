"""Repacks weights for CPU GEMMs. Nothing else of the model changes."""

from __future__ import annotations

from torch import nn

from penstock.layers.linear import Linear
from penstock.layers.mlp import SparseMLP
from penstock.ops import Weight

# Size limit of a model's float32 weights: their bf16 copies add half of it.
MOST_SHORTENED_BYTES = 1 << 30


def shorten_weights(model: nn.Module) -> None:
    """Keeps bf16 copies of a small model's weights if the checkpoint's values are bf16, so that a
    step of a few tokens reads half the bytes. Not for slots, whose experts change at run time.
    """
    weights = {module for module in model.modules() if isinstance(module, Weight)}
    for module in model.modules():
        if isinstance(module, SparseMLP) and module.offloaded is not None:
            weights -= {module.gate_up, module.down}
    if sum(weight.num_bytes for weight in weights) <= MOST_SHORTENED_BYTES:
        for weight in weights:
            weight.shorten()


def narrow_weights(model: nn.Module) -> None:
    """Keeps what a quantized checkpoint stores in bf16 as it is, so that the model takes hardly
    more memory than its files. Not experts: kernels read those of one layer together.
    """
    weights = [module for module in model.modules() if isinstance(module, Weight)]
    if any(weight.parts for weight in weights):
        for weight in weights:
            if weight.is_dense:
                weight.narrow()


def pack_weights(model: nn.Module, keep: Weight) -> None:
    """Packs the weights that every token uses: not experts, most of which a token skips, and not
    `keep`, the head, which may also be the embedding and has float32 results. One at a time, so
    that only one exists twice.
    """
    for module in model.modules():
        weights: list[Weight | None] = []
        if isinstance(module, Linear):
            weights = [module.weight]
        elif isinstance(module, SparseMLP):
            weights = [module.shared_gate_up, module.shared_down]
        for weight in weights:
            if weight is not None and weight is not keep:
                weight.pack()
