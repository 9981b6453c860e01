"""AdamW, gradient clipping and an average of the weights, each over one flat fp32 buffer.

All parameters of a model become views of one tensor, so an update is a dozen launches. Learning
rate and step count are device scalars, so a CUDA graph can capture it. If a gradient is not finite,
the update changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from training.config import TrainConfig

ALIGNMENT = 64  # elements: every parameter is aligned to 256 bytes
EPSILON = 1e-8


class FlatAdamW:
    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.config = config
        parameters = list(model.parameters())
        device = parameters[0].device
        matrices = [p for p in parameters if is_matrix(p)]
        others = [p for p in parameters if not is_matrix(p)]
        self.num_decayed = sum(
            map(_padded_size, matrices)
        )  # matrices come first, so decay is one slice
        size = self.num_decayed + sum(map(_padded_size, others))
        self.weights = torch.zeros(size, device=device)
        self.gradients = torch.zeros(size, device=device)
        self.mean = torch.zeros(size, device=device)
        self.square = torch.zeros(size, device=device)
        self.num_updates = torch.zeros((), device=device)
        self.lr = torch.zeros((), device=device)
        start = 0
        for parameter in (*matrices, *others):
            place = slice(start, start + parameter.numel())
            self.weights[place] = parameter.detach().flatten()
            parameter.data = self.weights[place].view(parameter.shape)
            parameter.grad = self.gradients[place].view(parameter.shape)
            start += _padded_size(parameter)
        self.average = self.weights.clone()

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint needs for an exact resumption."""
        return {
            "weights": self.weights,
            "mean": self.mean,
            "square": self.square,
            "average": self.average,
            "num_updates": self.num_updates,
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores in place, because captured graphs point to these tensors."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    @contextmanager
    def published_weights(self, use_average: bool) -> Iterator[None]:
        """In this context the model computes with weights rounded as a checkpoint stores them."""
        trained = self.weights.clone()
        self.weights.copy_((self.average if use_average else self.weights).bfloat16())
        try:
            yield
        finally:
            self.weights.copy_(trained)

    @torch.no_grad()
    def update(self) -> Tensor:
        """Takes one step with the current gradients; returns 1, or 0 if they are not finite and the
        step was skipped.
        """
        config = self.config
        norm = torch.linalg.vector_norm(self.gradients)
        is_finite = norm.isfinite()
        taken = is_finite.float()
        self.gradients.mul_((config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.gradients.masked_fill_(~is_finite, 0.0)
        first, second = config.betas
        self.num_updates.add_(taken)
        self.mean.lerp_(self.gradients, (1 - first) * taken)
        self.square.lerp_(self.gradients.square(), (1 - second) * taken)
        count = self.num_updates.clamp(min=1.0)
        first_bias = -torch.expm1(count * math.log(first))
        second_bias = -torch.expm1(count * math.log(second))
        rate = self.lr * taken
        self.weights[: self.num_decayed].mul_(1 - rate * config.weight_decay)
        self.weights.sub_(
            self.mean / (self.square / second_bias).sqrt_().add_(EPSILON) * (rate / first_bias)
        )
        # Early averages adapt fast; otherwise they would contain the random start.
        follow = (9.0 / (10.0 + self.num_updates)).clamp(min=1 - config.ema_decay)
        self.average.lerp_(self.weights, follow * taken)
        return taken


def is_matrix(parameter: Tensor) -> bool:
    """Whether weight decay applies: not to norms, gates of one row or convolution taps."""
    return parameter.dim() > 1 and min(parameter.shape[-2:]) > 1


def _padded_size(parameter: Tensor) -> int:
    return -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
