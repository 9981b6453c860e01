"""The gated delta rule, differentiable, as batched matrix products of fixed shape.

A row is split into chunks of C tokens. Within a chunk, everything is a product of small matrices,
batched over all chunks; between chunks only the state is passed on, S <- M S + B, one product per
chunk. Everything is fp32, has static shapes and never waits for the device, so a CUDA graph can
capture it. Knows nothing of projections or gates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def unit_norm(x: Tensor, scale: float, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) * scale over the last dimension, in fp32, as one fused RMS norm."""
    width = x.shape[-1]
    # sum + eps = width * (mean + eps / width)
    return F.rms_norm(x.float(), (width,), eps=eps / width) * (scale * width**-0.5)


def invert_unit_lower(strict: Tensor) -> Tensor:
    """(I + strict)^-1 for strictly lower triangular [..., C, C], by doubling blocks on the
    diagonal.

    Let X be the inverse of the b x b diagonal blocks, and L the part of `strict` that couples two
    neighbouring blocks. Then X - X L X is the inverse of the 2b x 2b blocks: blockwise forward
    substitution. The shorter product (I - A)(I + A^2)(I + A^4)... costs the same but loses all
    precision when keys repeat: its powers of A then hold binomials up to 10^17 that must cancel.
    """
    return _UnitLowerInverse.apply(strict)


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        size = strict.shape[-1]
        place = torch.arange(size, device=strict.device)
        inverse = torch.eye(size, device=strict.device, dtype=strict.dtype) - strict * _joins(
            place, 1
        )
        block = 2
        while block < size:
            inverse = inverse - inverse @ (strict * _joins(place, block)) @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.mT
        return -(transposed @ gradients[0] @ transposed).tril(-1)


def _joins(place: Tensor, block: int) -> Tensor:  # [C] -> [C, C]
    """True where row and column are in the two blocks of one pair, the row in the later one."""
    number = place // block
    return (number[:, None] == number[None, :] + 1) & (number[None, :] % 2 == 0)


class _ChunkStates(torch.autograd.Function):
    """S[n + 1] = M[n] S[n] + B[n] for every chunk n; one product per chunk, forward and
    backward.
    """

    @staticmethod
    def forward(ctx: Any, transitions: Tensor, increments: Tensor, initial: Tensor) -> Tensor:
        num_chunks = transitions.shape[0]
        states = torch.empty(
            num_chunks + 1, *initial.shape, device=initial.device, dtype=initial.dtype
        )
        states[0] = initial
        for n in range(num_chunks):
            torch.baddbmm(increments[n], transitions[n], states[n], out=states[n + 1])
        ctx.save_for_backward(transitions, states)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        transitions, states = ctx.saved_tensors
        arriving = gradients[0].clone()  # of each state, through all later ones
        for n in reversed(range(transitions.shape[0])):
            arriving[n].baddbmm_(transitions[n].mT, arriving[n + 1])
        return arriving[1:] @ states[:-1].mT, arriving[1:], arriving[0]


@torch.compiler.disable  # a loop of GEMMs: unrolling takes minutes and fuses nothing
def _chain_states(transitions: Tensor, increments: Tensor, initial: Tensor) -> Tensor:
    """[N, B Hv, K, K], [N, B Hv, K, V], [B Hv, K, V] -> the states before each chunk, and the last
    one.
    """
    return _ChunkStates.apply(transitions, increments, initial)


def gated_delta_rule(
    query: Tensor,  # [B, T, Hk, K] fp32, unit length times K^-0.5
    key: Tensor,  # [B, T, Hk, K] fp32, unit length
    value: Tensor,  # [B, T, Hv, V] fp32
    log_decay: Tensor,  # [B, T, Hv] fp32, <= 0
    beta: Tensor,  # [B, T, Hv] fp32
    initial: Tensor | None = None,  # [B, Hv, K, V] fp32; None is zero
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The outputs [B, T, Hv, V] and the state after the last token [B, Hv, K, V].

    Value head j uses key head j // (Hv / Hk). A token with log_decay 0 and beta 0 does not change
    the state.
    """
    rows, length, num_heads, value_dim = value.shape
    key_dim = key.shape[-1]
    chunk = min(chunk, length)
    padding = -length % chunk
    repeat = num_heads // key.shape[2]
    q = _split_chunks(query, chunk, padding, repeat)
    k = _split_chunks(key, chunk, padding, repeat)
    v = _split_chunks(value, chunk, padding, 1)
    b = _split_chunks(beta[..., None], chunk, padding, 1)
    total = _split_chunks(log_decay[..., None], chunk, padding, 1).cumsum(
        2
    )  # [N, B Hv, C, 1] inclusive

    ordered = torch.ones(chunk, chunk, dtype=torch.bool, device=value.device).tril()
    # Masked before exp: above the diagonal the difference is positive and would overflow.
    decay = (total - total.mT).masked_fill(~ordered, -torch.inf).exp()
    grown = total.exp()
    last = total[:, :, -1:]
    inverse = invert_unit_lower((k @ k.mT * decay * b).tril(-1))
    u = inverse @ (v * b)
    w = inverse @ (k * (b * grown))
    kept = (k * (last - total).exp()).mT
    identity = torch.eye(key_dim, device=value.device, dtype=value.dtype)
    transitions = last.exp() * identity - kept @ w
    if initial is None:
        initial = value.new_zeros(rows, num_heads, key_dim, value_dim)
    states = _chain_states(transitions, kept @ u, initial.flatten(0, 1))
    before = states[:-1]
    out = (q * grown) @ before + (q @ k.mT * decay) @ (u - w @ before)
    out = (
        out.unflatten(1, (rows, num_heads))
        .permute(1, 0, 3, 2, 4)
        .reshape(rows, -1, num_heads, value_dim)
    )
    return out[:, :length], states[-1].unflatten(0, (rows, num_heads))


def _split_chunks(x: Tensor, chunk: int, padding: int, repeat: int) -> Tensor:
    """[B, T, H, D] -> [N, B * H * repeat, C, D]; one copy also repeats the heads."""
    rows, _, num_heads, width = x.shape
    if padding:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    x = x.reshape(rows, -1, chunk, num_heads, 1, width).expand(-1, -1, -1, -1, repeat, -1)
    return x.permute(1, 0, 3, 4, 2, 5).reshape(-1, rows * num_heads * repeat, chunk, width)
