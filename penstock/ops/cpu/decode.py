"""Fast path for one token on a CPU in float32, with as few torch calls as possible; and for a token
followed by drafts.

For a small model, a token's cost is its torch calls, not its arithmetic: an operation on ten
numbers takes as long as one on ten thousand. So a row is a vector here, state changes in place, and
control flow reads tensors on the host, for which a GPU would have to synchronize. `ops/reference`
is the specification, and tests compare each function with it. Not used with `deterministic`, since
other shapes round differently.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.reference import kv_codes

FEW = 8  # tokens that rarely share experts
MOST_TOGETHER = 16  # tokens of one sequence: one plus its drafts


def is_alone(x: Tensor, deterministic: bool) -> bool:
    """Whether a step of x [T, ..] may take this fast path."""
    return not deterministic and x.is_cpu and x.shape[0] == 1 and x.dtype == torch.float32


def are_few(x: Tensor, deterministic: bool) -> bool:
    """Whether x [T, ..] is a few tokens, such as one with its drafts."""
    return not deterministic and x.is_cpu and 1 < x.shape[0] <= FEW and x.dtype == torch.float32


def may_be_drafts(x: Tensor, deterministic: bool) -> bool:
    """Whether x [T, ..] may be a token and its drafts."""
    is_small = 1 < x.shape[0] <= MOST_TOGETHER
    return not deterministic and x.is_cpu and is_small and x.dtype == torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [1, K] -> [1, K]
    row = x[0]
    mean_square = torch.dot(row, row).item() / row.shape[0]
    return torch.addcmul(_constant(0.0), x, weight, value=(mean_square + eps) ** -0.5)


def rms_norm_of_few(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [T, K] -> [T, K]
    return (x * _inverse_rms(x, eps)).mul_(weight)


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


def sparse_mlp_of_few(
    x: Tensor,  # [T, H]  normed
    weights: Tensor,  # [T, k]
    ids: Tensor,  # [T, k]
    gate_up: Tensor,  # [E, 2I, H]
    down: Tensor,  # [E, H, I]
    residual: Tensor,  # [T, H]
    shared_weight: Tensor | None,  # [T, 1]
    shared_gate_up: Tensor | None,  # [2I', H]
    shared_down: Tensor | None,  # [H, I']
) -> Tensor:  # [T, H]
    """Runs every token with its own experts: few tokens rarely share one."""
    experts, rows = ids.tolist(), x.unbind()
    products = [torch.mv(gate_up[expert], row) for row, own in zip(rows, experts) for expert in own]
    gate, up = torch.stack(products).chunk(2, dim=-1)
    inner = F.silu(gate).mul_(up).mul_(weights.reshape(-1, 1)).unbind()  # T * k of [I]
    if shared_weight is None:
        total = residual.clone()
    else:
        assert shared_gate_up is not None
        assert shared_down is not None
        gate, up = F.linear(x, shared_gate_up).chunk(2, dim=-1)
        shared = F.silu(gate).mul_(up).mul_(shared_weight)
        total = torch.addmm(residual, shared, shared_down.t())
    each = iter(inner)
    for row, own in zip(total.unbind(), experts):
        for expert in own:
            row.addmv_(down[expert], next(each))
    return total


def attend(
    q: Tensor,  # [1, Hq, D]
    keys: Tensor,  # [pages, page_size, Hkv, D]
    values: Tensor,  # [pages, page_size, Hkv, D]
    key_scales: Tensor | None,  # [pages, page_size, Hkv], of 8-bit KV
    value_scales: Tensor | None,
    pages: Tensor,  # [P]
    context_len: int,
    scale: float,
    window: int,
) -> Tensor:  # [1, Hq * D]
    """The length is known here, so only visible keys are read, and nothing is masked."""
    page_size, num_kv_heads, head_dim = keys.shape[1:]
    first = max(0, context_len - window) if window else 0
    first_page = first // page_size
    used = pages[first_page : -(-context_len // page_size)].tolist()
    seen = slice(first - first_page * page_size, context_len - first_page * page_size)
    shape = (1, -1, num_kv_heads, head_dim)
    k, v = (  # [1, Hkv, S, D]
        _pages_of(cache, scales, used).reshape(shape)[:, seen].transpose(1, 2)
        for cache, scales in ((keys, key_scales), (values, value_scales))
    )
    # The query heads that share a key head act like queries of several tokens.
    grouped = q.reshape(1, num_kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(1, -1)


def attend_drafts(
    q: Tensor,  # [T, Hq, D]
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    pages: Tensor,  # [P]
    context_len: int,  # of the last token
    scale: float,
    window: int,
) -> Tensor:  # [T, Hq * D]
    """Consecutive tokens of one sequence, each over its visible keys; the keys are read once."""
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = keys.shape[1:3]
    used = pages[: -(-context_len // page_size)].tolist()
    shape = (-1, num_kv_heads, head_dim)
    k, v = (  # [1, Hkv, S, D]
        _pages_of(cache, scales, used).reshape(shape)[None, :context_len].transpose(1, 2)
        for cache, scales in ((keys, key_scales), (values, value_scales))
    )
    # [1, Hkv, G * T, D]: heads that share a key head act like further tokens.
    grouped = q.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(1, num_kv_heads, -1, head_dim)
    age = torch.arange(context_len - num_tokens, context_len)[:, None] - torch.arange(context_len)
    seen = (age >= 0) & (age < window) if window else age >= 0
    mask = seen.repeat(num_heads // num_kv_heads, 1)
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    attended = attended.view(num_kv_heads, -1, num_tokens, head_dim).permute(2, 0, 1, 3)
    return attended.reshape(num_tokens, -1)


def _pages_of(cache: Tensor, scales: Tensor | None, pages: list[int]) -> Tensor:
    """In float32. Not copied if they are contiguous, which is common for a single sequence."""
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
    ring, state = _load_slot(conv, recurrent, int(state_slots), int(initial_slots), position)
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


def gated_delta_net_drafts(
    mixed: Tensor,  # [t, C + Hv * V + 2 * Hv]
    conv_weight: Tensor,  # [Kc, C]
    a_log: Tensor,  # [Hv]
    dt_bias: Tensor,  # [Hv]
    norm_weight: Tensor,  # [V]
    eps: float,
    conv: Tensor,  # [slots, W, C]
    recurrent: Tensor,  # [slots, Hv, K, V]
    slots: tuple[int, int],  # state slot and initial slot
    position: int,  # of the first token
    num_key_heads: int,
    l2_eps: float,
    journal: tuple[Tensor, Tensor, Tensor],  # keys, values and gates of the row
    num_accepted: int,
    keep: tuple[int, int],  # tokens, slot
) -> Tensor:  # [t, Hv * V]
    ring, state = _load_slot(conv, recurrent, *slots, position)
    _replay(state, ring, journal, num_accepted, position, keep, conv, recurrent)
    num_tokens = len(mixed)
    num_value_heads, key_dim, value_dim = state.shape
    key_size, value_size = num_key_heads * key_dim, num_value_heads * value_dim
    sizes = (2 * key_size + value_size, value_size, num_value_heads, num_value_heads)
    channels, z, b, a = mixed.split_with_sizes(sizes, dim=1)
    qk, v = _convolve_several(channels, ring, conv_weight, position).split_with_sizes(
        (2 * key_size, value_size), dim=1
    )
    qk = qk.reshape(num_tokens, 2, num_key_heads, 1, key_dim)
    qk = qk * _inverse_rms(qk, l2_eps, mean_of=1)
    qk = qk.expand(-1, -1, -1, num_value_heads // num_key_heads, -1)
    q, k = qk.reshape(num_tokens, 2, num_value_heads, 1, key_dim).unbind(1)  # [t, Hv, 1, K]
    v = v.reshape(num_tokens, num_value_heads, 1, value_dim)
    log_decay = F.softplus(a + dt_bias).mul_(a_log.exp()).neg_()
    beta = b.sigmoid()
    factors = log_decay.exp().view(num_tokens, -1, 1, 1).unbind()
    betas = beta.view(num_tokens, -1, 1, 1).unbind()
    queries, keys, values = q.unbind(), k.unbind(), v.unbind()
    outputs = []
    for token in range(num_tokens):
        if token == 1:  # from here on only drafts
            state = state.clone()
        _add_token(state, keys[token], values[token], factors[token], betas[token])
        outputs.append(torch.bmm(queries[token], state))
    if num_tokens > 1:
        entries = slice(num_tokens - 1)
        journal[0][entries] = k[1:, :, 0]
        journal[1][entries] = v[1:, :, 0]
        journal[2][entries, 0] = log_decay[1:]
        journal[2][entries, 1] = beta[1:]
        journal[2][entries, 2] = 1.0  # keys have length one
    # The scale of q, K^-0.5, passes through the norm into its epsilon.
    out = torch.stack(outputs).view(num_tokens, num_value_heads, value_dim)
    out.mul_(_inverse_rms(out, eps * key_dim)).mul_(norm_weight)
    return out.view(num_tokens, value_size).mul_(F.silu(z))


def _replay(
    state: Tensor,  # [Hv, K, V]
    ring: Tensor,  # [W, C]
    journal: tuple[Tensor, Tensor, Tensor],
    num_accepted: int,
    position: int,
    keep: tuple[int, int],
    conv: Tensor,
    recurrent: Tensor,
) -> None:
    keep_at, keep_slot = keep
    num_done = position - num_accepted
    keeps = keep_slot > 0 and num_done <= keep_at <= position
    if keeps:
        conv[keep_slot] = ring
    keys, values, gates = journal
    for entry in range(num_accepted + 1):
        if keeps and num_done + entry == keep_at:
            recurrent[keep_slot] = state
        if entry < num_accepted:
            log_decay, beta = gates[entry, :2].view(2, -1, 1, 1).unbind()
            own = keys[entry].unsqueeze(1), values[entry].unsqueeze(1)
            _add_token(state, *own, log_decay.exp(), beta)


def _add_token(state: Tensor, k: Tensor, v: Tensor, factor: Tensor, beta: Tensor) -> None:
    """In place: state [Hv, K, V], k [Hv, 1, K], v [Hv, 1, V], factor and beta [Hv, 1, 1]."""
    state.mul_(factor)
    correction = torch.baddbmm(v, k, state, alpha=-1.0).mul_(beta)
    state.baddbmm_(k.transpose(1, 2), correction)


def _convolve_several(
    channels: Tensor, ring: Tensor, weight: Tensor, position: int
) -> Tensor:  # [t, C] -> [t, C]
    """Like `_convolve`, for consecutive tokens."""
    entries, taps, rows = ring.unbind(), weight.unbind(), channels.unbind()
    num_before, num_tokens = len(taps) - 1, len(rows)
    nothing = torch.zeros_like(entries[0]) if position < num_before else entries[0]
    before = [
        entries[(position - age) % len(entries)] if age <= position else nothing
        for age in range(num_before, 0, -1)
    ]
    windows = torch.stack([*before, *rows])
    for place, row in enumerate(rows):
        entries[(position + place) % len(entries)].copy_(row)
    total = channels * taps[-1]
    for age in range(1, len(taps)):
        first = num_before - age
        total.addcmul_(windows[first : first + num_tokens], taps[-1 - age])
    return F.silu(total, inplace=True)


def _load_slot(
    conv: Tensor, recurrent: Tensor, slot: int, initial_slot: int, position: int
) -> tuple[Tensor, Tensor]:  # [W, C], [Hv, K, V]
    """The ring and the state of the slot, after copying those of the initial slot."""
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
    """Writes the token's inputs to the ring; returns silu of the convolution over existing
    inputs.
    """
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
