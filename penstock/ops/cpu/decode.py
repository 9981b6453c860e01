"""Fast path for one token on a CPU in float32, in as few calls of torch as possible.

For a small model, a token costs its calls of torch and not its arithmetic: an operation on ten
numbers takes as long as one on ten thousand. So a row is a vector here, state changes in place, and
control flow reads tensors on the host, for which a GPU would have to synchronise. `ops/reference`
is the specification, and tests compare each function with it. Not used with `deterministic`, since
other shapes round differently.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.cpu import attention
from penstock.ops.reference import kv_codes


def is_alone(x: Tensor, deterministic: bool) -> bool:
    """Whether a step of x [T, ..] may take this fast path."""
    return not deterministic and x.is_cpu and x.shape[0] == 1 and x.dtype == torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [1, K] -> [1, K]
    row = x[0]
    mean_square = torch.dot(row, row).item() / row.shape[0]
    return torch.addcmul(_constant(0.0), x, weight, value=(mean_square + eps) ** -0.5)


def add_linear(
    residual: Tensor, x: Tensor, weight: Tensor
) -> Tensor:  # [1, N], [1, K], [N, K] -> [1, N]
    return torch.addmm(residual, x, weight.t())


def sparse_mlp(
    x: Tensor,  # [1, H]  normed
    weights: Tensor,  # [1, k]
    ids: Tensor,  # [1, k]
    gate_up: Tensor,  # [E, 2I, H]
    down: Tensor,  # [E, H, I]
    residual: Tensor,  # [1, H]
    shared_weight: Tensor | None,  # [1, 1]
    shared_gate_up: Tensor | None,  # [2I', H]
    shared_down: Tensor | None,  # [H, I']
) -> Tensor:  # [1, H]
    row, experts = x[0], ids.tolist()[0]
    gate, up = torch.stack([torch.mv(gate_up[expert], row) for expert in experts]).chunk(2, dim=-1)
    inner = F.silu(gate).mul_(up).unbind()  # k of [I]
    total = residual[0].clone()
    for expert, weight, own in zip(experts, weights.tolist()[0], inner):
        total.addmv_(down[expert], own, alpha=weight)
    if shared_weight is not None:
        assert shared_gate_up is not None
        assert shared_down is not None
        gate, up = torch.mv(shared_gate_up, row).chunk(2)
        own = F.silu(gate).mul_(up)
        total.addmv_(shared_down, own, alpha=shared_weight.item())
    return total[None]


def attend(
    q: Tensor,  # [1, Hq, D]
    keys: Tensor,  # [pages, page_size, Hkv, D]
    values: Tensor,  # [pages, page_size, Hkv, D]
    key_scales: Tensor | None,  # [pages, page_size, Hkv], of 8-bit codes
    value_scales: Tensor | None,
    pages: Tensor,  # [P]
    context_len: int,
    scale: float,
    window: int,
) -> Tensor:  # [1, Hq * D]
    """The length is known here, so only keys that are seen are read, and nothing is masked."""
    page_size, num_kv_heads, head_dim = keys.shape[1:]
    first = max(0, context_len - window) if window else 0
    if key_scales is None and pages.dtype == torch.int32 and attention.is_better(q, keys[0], keys):
        return attention.attend(q, keys, values, pages, first, context_len, scale)
    first_page = first // page_size
    used = pages[first_page : -(-context_len // page_size)].tolist()
    seen = slice(first - first_page * page_size, context_len - first_page * page_size)
    shape = (1, -1, num_kv_heads, head_dim)
    k, v = (  # [1, Hkv, S, D]
        _pages_of(cache, scales, used).reshape(shape)[:, seen].transpose(1, 2)
        for cache, scales in ((keys, key_scales), (values, value_scales))
    )
    # The query heads that share a key head are to it as queries of several tokens.
    grouped = q.reshape(1, num_kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(1, -1)


def _pages_of(cache: Tensor, scales: Tensor | None, pages: list[int]) -> Tensor:
    """In float32. No copy where they lie side by side, as those of a sequence that is alone mostly
    do."""
    first, end = pages[0], pages[0] + len(pages)
    if pages != list(range(first, end)):
        return kv_codes.read_pages(cache, scales, torch.tensor(pages))
    adjacent = cache[first:end].float()
    return adjacent if scales is None else adjacent.mul_(scales[first:end, ..., None])


def gated_delta_net(
    mixed: Tensor,  # [1, C + Hv * V + 2 * Hv]
    conv_weight: Tensor,  # [Kc, C]
    a_log: Tensor,  # [Hv]
    dt_bias: Tensor,  # [Hv]
    norm_weight: Tensor,  # [V]
    eps: float,
    conv: Tensor,  # [slots, W, C]
    recurrent: Tensor,  # [slots, Hv, K, V]
    state_slots: Tensor,  # [1]
    initial_slots: Tensor,  # [1]
    position: int,
    num_key_heads: int,
    l2_eps: float,
) -> Tensor:  # [1, Hv * V]
    ring, state = _take_over(conv, recurrent, int(state_slots), int(initial_slots), position)
    num_value_heads, key_dim, value_dim = state.shape
    key_size, value_size = num_key_heads * key_dim, num_value_heads * value_dim
    sizes = (2 * key_size + value_size, value_size, num_value_heads, num_value_heads)
    channels, z, b, a = mixed[0].split_with_sizes(sizes)
    qk, v = _convolve(channels, ring, conv_weight, position).split_with_sizes(
        (2 * key_size, value_size)
    )
    qk = qk.view(2, num_key_heads, 1, key_dim)
    qk = qk * _inverse_rms(qk, l2_eps, mean_of=1)
    q, k = (
        qk.expand(-1, -1, num_value_heads // num_key_heads, -1)
        .reshape(2, num_value_heads, 1, -1)
        .unbind()
    )
    decay = F.softplus(a + dt_bias).mul_(a_log.exp()).neg_().exp_()
    state.mul_(decay.view(-1, 1, 1))
    correction = torch.baddbmm(v.view(num_value_heads, 1, value_dim), k, state, alpha=-1.0)
    state.baddbmm_(k.transpose(1, 2), correction.mul_(b.sigmoid().view(-1, 1, 1)))
    # The scale of q, K^-0.5, passes through the norm into its epsilon.
    out = torch.bmm(q, state).view(num_value_heads, value_dim)
    out.mul_(_inverse_rms(out, eps * key_dim)).mul_(norm_weight)
    return out.view(1, value_size).mul_(F.silu(z))


def _take_over(
    conv: Tensor, recurrent: Tensor, slot: int, initial_slot: int, position: int
) -> tuple[Tensor, Tensor]:  # [W, C], [Hv, K, V]
    """The ring and the state of the slot, after copying what the row starts from."""
    ring, state = conv[slot], recurrent[slot]
    if position == 0:
        state.zero_()
    elif slot != initial_slot:
        ring.copy_(conv[initial_slot])
        state.copy_(recurrent[initial_slot])
    return ring, state


def _convolve(
    channels: Tensor, ring: Tensor, weight: Tensor, position: int
) -> Tensor:  # [C] -> [C]
    """Puts the token's inputs into the ring; silu of the convolution of those that exist."""
    entries, taps = ring.unbind(), weight.unbind()
    entries[position % len(entries)].copy_(channels)
    total = channels * taps[-1]
    for age in range(1, min(len(taps), position + 1)):
        total.addcmul_(entries[(position - age) % len(entries)], taps[-1 - age])
    return F.silu(total, inplace=True)


def _inverse_rms(x: Tensor, eps: float, mean_of: int | None = None) -> Tensor:  # [.., K] -> [.., 1]
    """1 / sqrt(mean of squares + eps); with `mean_of` 1, of their sum."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(
        _constant(eps), length, length, value=1.0 / (mean_of or x.shape[-1])
    ).rsqrt_()


@functools.cache
def _constant(value: float) -> Tensor:
    """Cached per value: torch takes longer to wrap a Python number than to add it."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")
