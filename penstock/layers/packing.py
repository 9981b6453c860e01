"""Which weights of a model a CPU may keep in an arrangement of its own. Nothing else changes in the model."""

from __future__ import annotations

from torch import nn

from penstock.layers.attention import Attention
from penstock.layers.delta_net import DeltaNet
from penstock.layers.mlp import DenseMLP, SparseMLP
from penstock.ops import pack

# Those that are multiplied as a whole with every token. Not experts, of which most are not, nor a head, whose
# results are wider than it is and which may be the embedding, too.
PACKED: dict[type[nn.Module], tuple[str, ...]] = {
    Attention: ("qkv", "out"),
    DeltaNet: ("in_proj", "out"),
    DenseMLP: ("gate_up", "down"),
    SparseMLP: ("shared_gate_up", "shared_down"),
}


def pack_weights(model: nn.Module) -> None:
    """One after the other: at no time is more than one of them there twice."""
    for module in model.modules():
        for name in PACKED.get(type(module), ()):
            weight = getattr(module, name)
            if weight is not None:
                setattr(module, name, nn.Parameter(pack(weight), requires_grad=False))
