"""The layers of a small model for a few tokens on a CPU in float32 (`few_tokens.cpp`)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cpu import library

LANES = 16
MOST_TOKENS = 16  # one plus its drafts, or a small batch
MOST_ELEMENTS = 1 << 22  # per weight; torch's libraries read larger ones as fast


def are_few(x: Tensor, deterministic: bool) -> bool:
    """Whether these functions support tokens x [T, ..]."""
    return 1 <= x.shape[0] <= MOST_TOKENS and can_read(x, deterministic)


def can_read(x: Tensor, deterministic: bool) -> bool:
    """The same if they are given some tokens of x at a time."""
    return not deterministic and x.dtype == torch.float32 and x.is_cpu and is_available()


def can_multiply(weight: Tensor) -> bool:
    """Whether a GEMM of `are_few` tokens with a weight [.., N, K] is supported."""
    return (
        weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.shape[-1] % LANES == 0
        and weight.shape[-1] * weight.shape[-2] <= MOST_ELEMENTS
    )


def can_multiply_narrow(weight: Tensor) -> bool:
    """The same for a weight in bf16, of any size: half the bytes that torch's libraries read."""
    is_bf16 = weight.dtype == torch.bfloat16 and weight.is_contiguous()
    return is_bf16 and weight.dim() == 2 and weight.shape[-1] % LANES == 0


def shortened(weight: Tensor) -> Tensor | None:
    """A bf16 copy, half the bytes to read, if it is exact."""
    if not (can_multiply(weight) and weight.is_cpu and is_available()):
        return None
    short = weight.detach().bfloat16()
    return short if torch.equal(short.float(), weight) else None


def can_mix(conv_weight: Tensor, conv: Tensor, recurrent: Tensor) -> bool:
    """For `are_few` tokens of one sequence with states [slots, Hv, K, V]."""
    key_dim, value_dim = recurrent.shape[2:]
    return (
        conv.dtype == recurrent.dtype == torch.float32
        and key_dim % LANES == value_dim % LANES == 0
        and conv_weight.is_contiguous()
        and len(conv_weight) <= MOST_TOKENS
    )


def linear(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K] float32 or bf16
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N]
    norm: Tensor | None = None,  # [K]
    eps: float = 0.0,
) -> Tensor:  # [T, N]
    x = x.contiguous()
    (T, K), N = x.shape, weight.shape[0]
    residual = None if residual is None else residual.contiguous()
    out = torch.empty(T, N)
    _library().few_linear(
        x.data_ptr(),
        None if norm is None else norm.data_ptr(),
        eps,
        weight.data_ptr(),
        weight.dtype == torch.bfloat16,
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        *(T, N, K),
    )
    return out


def norm_route(
    hidden: Tensor,  # [T, H]
    norm: Tensor,  # [H]
    eps: float,
    router: Tensor,  # [E, H]
    k: int,
    normalize: bool,
    shared_gate: Tensor | None,  # [1, H]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # [T, H], [T, k], [T, k], [T, 1]
    hidden = hidden.contiguous()
    T, H = hidden.shape
    normed, weights = torch.empty(T, H), torch.empty(T, k)
    ids = torch.empty(T, k, dtype=torch.int64)
    shared = None if shared_gate is None else torch.empty(T, 1)
    _library().few_norm_route(
        hidden.data_ptr(),
        norm.data_ptr(),
        eps,
        router.data_ptr(),
        None if shared_gate is None else shared_gate.data_ptr(),
        normalize,
        normed.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        None if shared is None else shared.data_ptr(),
        *(T, H, router.shape[0], k),
    )
    return normed, weights, ids, shared


def sparse_mlp(
    x: Tensor,  # [T, H]  normed
    weights: Tensor,  # [T, k]
    ids: Tensor,  # [T, k] int64
    gate_up: Tensor,  # [E, 2I, H]  weights are all float32 or all bf16
    down: Tensor,  # [E, H, I]
    residual: Tensor,  # [T, H]
    shared_weight: Tensor | None,  # [T, 1]
    shared_gate_up: Tensor | None,  # [2J, H]
    shared_down: Tensor | None,  # [H, J]
) -> Tensor:  # [T, H]
    x, weights, ids, residual = (one.contiguous() for one in (x, weights, ids, residual))
    T, H = x.shape
    out = torch.empty(T, H)
    shared = (shared_weight, shared_gate_up, shared_down)
    _library().few_experts(
        *(x.data_ptr(), weights.data_ptr(), ids.data_ptr()),
        *(gate_up.data_ptr(), down.data_ptr(), residual.data_ptr()),
        *(None if one is None else one.data_ptr() for one in shared),
        out.data_ptr(),
        gate_up.dtype == torch.bfloat16,
        *(T, ids.shape[1], H, down.shape[2], 0 if shared_down is None else shared_down.shape[1]),
    )
    return out


def gated_delta_net(
    mixed: Tensor,  # [T, C + Hv * V + 2 * Hv]
    conv_weight: Tensor,  # [Kc, C]
    a_log: Tensor,  # [Hv]
    dt_bias: Tensor,  # [Hv]
    norm_weight: Tensor,  # [V]
    eps: float,
    l2_eps: float,
    conv: Tensor,  # [slots, W, C]  written
    recurrent: Tensor,  # [slots, Hv, K, V]  written
    num_key_heads: int,
    # State slot and initial slot; the first token's position; accepted journal entries; tokens and
    # slot of a state to keep; tokens that are not drafts.
    places: Sequence[int],
    journal: Sequence[Tensor],  # keys, values and gates of the row, written; or empty
) -> Tensor:  # [T, Hv * V]
    """Some tokens and their drafts: `num_accepted` entries of the journal are replayed first."""
    mixed = mixed.contiguous()
    _, num_value_heads, key_dim, value_dim = recurrent.shape
    T, Kc, W = len(mixed), len(conv_weight), conv.shape[1]
    out = torch.empty(T, num_value_heads * value_dim)
    sizes = (c_long * 7)(num_key_heads, num_value_heads, key_dim, value_dim, T, Kc, W)
    given = (mixed, conv_weight, a_log, dt_bias, norm_weight)
    entries = [one.data_ptr() for one in journal]
    _library().few_delta_net(
        *(one.data_ptr() for one in given),
        *(eps, l2_eps, conv.data_ptr(), recurrent.data_ptr()),
        *(entries or (None, None, None)),
        *(sizes, (c_long * 7)(*places), out.data_ptr()),
    )
    return out


def is_available() -> bool:
    return _load() is not None


def _library() -> ctypes.CDLL:
    loaded = _load()
    assert loaded is not None, "called only where it is available"
    return loaded


@functools.cache
def _load() -> ctypes.CDLL | None:
    loaded = library.load(Path(__file__).with_suffix(".cpp"))
    if loaded is None:
        return None
    loaded.few_linear.argtypes = [
        *(c_void_p, c_void_p, c_float, c_void_p, c_int, c_void_p, c_void_p, c_void_p),
        *(c_long, c_long, c_long),
    ]
    loaded.few_norm_route.argtypes = [
        *(c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int),
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_long, c_long, c_long, c_long),
    ]
    loaded.few_experts.argtypes = [*[c_void_p] * 10, c_int, *[c_long] * 5]
    loaded.few_delta_net.argtypes = [
        *[c_void_p] * 5,
        *(c_float, c_float),
        *[c_void_p] * 8,
    ]
    for name in ("few_linear", "few_norm_route", "few_experts", "few_delta_net"):
        getattr(loaded, name).restype = None
    return loaded
