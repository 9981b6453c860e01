"""Which weights a CPU may rearrange for its products. Nothing else of the model changes."""

from __future__ import annotations

from torch import nn

from penstock.layers.linear import Linear
from penstock.layers.mlp import SparseMLP
from penstock.ops import Weight


def pack_weights(model: nn.Module, keep: Weight) -> None:
    """Packs the weights that every token is multiplied with: not experts, most of which a token
    skips, and not `keep`, the head, which may also be the embedding and has float32 results. One at
    a time, so that only one exists twice.
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
