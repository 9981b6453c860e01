"""In which order a model's products run: each may ask for the codes of the next one."""

from __future__ import annotations

from torch import nn

from penstock.layers.linear import Linear
from penstock.layers.mlp import SparseMLP
from penstock.ops import Weight
from penstock.ops.tiles import TiledRows


def link_products(model: nn.Module) -> None:
    """Modules are in the order of their products. Experts are known only after routing: of a
    sparse layer, the one that is always read is asked for.
    """
    first_and_last: list[tuple[Weight, Weight]] = []
    for module in model.modules():
        if isinstance(module, Linear):
            first_and_last.append((module.weight, module.weight))
        elif isinstance(module, SparseMLP):
            first_and_last.append((module.shared_gate_up or module.gate_up, module.down))
    for (_, before), (after, _) in zip(first_and_last, first_and_last[1:]):
        rows = after.parts[0] if after.parts and len(after.shape) == 2 else None
        before.next = rows.codes if isinstance(rows, TiledRows) else None
