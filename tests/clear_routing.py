"""Small random models whose routers choose clearly, as those of trained models mostly do.

In a random model, some token always has two experts nearly tied for the last place. Rounding then
decides which one runs, and the logits of two correct implementations differ by a whole expert.
"""

from __future__ import annotations

import torch
from torch import nn

CLARITY = 10.0  # of a chosen expert's direction in an embedding; layers add an rms of about 1


@torch.no_grad()
def make_routing_clear(model: nn.Module, num_chosen: int, generator: torch.Generator) -> None:
    """Writes into each token's embedding which experts it wants, in directions that all routers
    look at.

    Every router permutes the experts, and a token wants some more than others, so that layers
    choose differently and weights are unequal.
    """
    parameters = dict(model.named_parameters())
    embedding = parameters["model.embed_tokens.weight"]
    routers = [values for name, values in parameters.items() if name.endswith("mlp.gate.weight")]
    num_experts, hidden_size = routers[0].shape
    directions = torch.linalg.qr(torch.randn(hidden_size, num_experts, generator=generator)).Q.T
    preferences = torch.rand(len(embedding), num_experts, generator=generator)
    is_chosen = preferences >= preferences.topk(num_chosen).values[:, -1:]
    embedding.add_(CLARITY * is_chosen * (1 + 0.25 * preferences) @ directions)
    for router in routers:
        router.copy_(directions[torch.randperm(num_experts, generator=generator)])
