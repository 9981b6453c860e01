"""Which weights of a model a CPU may keep in an arrangement of its own. Nothing else changes in the
model.
"""

from __future__ import annotations

from torch import nn

from penstock.layers.linear import Linear
from penstock.layers.mlp import SparseMLP
from penstock.ops import Weight


def pack_weights(model: nn.Module, keep: Weight) -> None:
    """Those that are multiplied as a whole with every token: not experts, of which most are not,
    nor `keep`, the head, whose results are wider than it is and which may be the embedding, too.
    One after the other: at no time is more than one of them there twice.
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
