"""The Gated DeltaNet mixer: causal convolution, gates, the delta rule, and the gated norm of its
output.

Rows of one token take the recurrence, all of them at once; rows of several tokens are computed
in blocks of 64 aligned to absolute positions, so that a prompt split at a multiple of 64
gives the same bits. With `deterministic` every row is computed alone, and a token at such a
position always in a block.

State is read from the initial slots and written to the state and checkpoint slots only; it is
computed in float32 and rounded to what the slots hold. The inputs of the convolution are kept as a
ring: the input of position p lies at p % W, so a step writes its own tokens' entries and no other,
unless the row moves to another slot. Positions before 0 count as zero, whatever the ring holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.cpu import decode
from penstock.ops.reference.activation import sigmoid, silu, softplus
from penstock.ops.reference.norm import gated_rms_norm
from penstock.ops.reference.rows import BLOCK_TOKENS, Span, TokenBlocks, cut_rows

L2_EPS = 1e-6


def gated_delta_net(
    mixed: Tensor,  # [T, C + Hv * V + 2 * Hv]  conv channels (q, k, v), z, b, a
    conv_weight: Tensor,  # [Kc, C]  the newest input last
    a_log: Tensor,  # [Hv] float32
    dt_bias: Tensor,  # [Hv] float32
    norm_weight: Tensor,  # [V] float32
    eps: float,
    conv: Tensor,  # [slots, W, C]  rings of the convolution's inputs, W >= Kc
    recurrent: Tensor,  # [slots, Hv, K, V] float32 or float16
    query_start: Tensor,  # [R + 1]
    context_lens: Tensor,  # [R]
    state_slots: Tensor,  # [R]
    initial_slots: Tensor,  # [R]
    spans: Sequence[Span],
    blocks: TokenBlocks,
    num_key_heads: int,
    *,
    deterministic: bool = False,
) -> Tensor:  # [T, Hv * V]
    is_alone = (
        decode.is_alone(mixed, deterministic) and len(spans) == 1 and not spans[0].checkpoints
    )
    if is_alone and recurrent.dtype == torch.float32:
        position = spans[0].context_len - 1
        weights, slots = (conv_weight, a_log, dt_bias, norm_weight), (state_slots, initial_slots)
        return decode.gated_delta_net(
            mixed, *weights, eps, conv, recurrent, *slots, position, num_key_heads, L2_EPS
        )
    num_value_heads, value_dim = a_log.shape[0], norm_weight.shape[0]
    sizes = (conv_weight.shape[1], num_value_heads * value_dim, num_value_heads, num_value_heads)
    channels, z, b, a = mixed.split_with_sizes(sizes, dim=-1)
    beta = sigmoid(b, deterministic)  # [T, Hv]
    log_decay = -a_log.exp() * softplus(a.float() + dt_bias, deterministic)  # [T, Hv]
    starts = context_lens - query_start.diff()  # [R]  tokens that came before this step
    out = torch.empty(
        len(mixed), num_value_heads, value_dim, dtype=torch.float32, device=mixed.device
    )
    for group in cut_rows(spans, batch_decodes=not deterministic):
        rows, tokens = group.rows, group.tokens
        state = _initial(recurrent, initial_slots[rows], starts[rows] == 0)
        rings = conv.index_select(0, initial_slots[rows])
        inputs = channels[tokens].unflatten(0, (len(state), -1)).to(conv.dtype)
        history = _history(rings, starts[rows], num_inputs=len(conv_weight) - 1)
        convolved = _convolve(inputs, history, conv_weight, deterministic)
        q, k, v = _split_heads(convolved, num_key_heads, num_value_heads, value_dim)
        if _takes_blocks(group.span):
            out[tokens], states = _row_in_blocks(
                q[0],
                k[0],
                v[0],
                log_decay[tokens],
                beta[tokens],
                state[0],
                group.span,
                deterministic,
            )
            state = states[group.span.num_tokens][None]
        else:
            heads = q[:, 0], k[:, 0], v[:, 0]
            out[tokens], state = _recurrence(*heads, log_decay[tokens], beta[tokens], state)
            states = {1: state[0]}
        recurrent.index_copy_(0, state_slots[rows], _rounded(state, recurrent.dtype))
        conv.index_copy_(0, state_slots[rows], _add_to_rings(rings, inputs, starts[rows]))
        for num_tokens, slot in group.span.checkpoints if group.span else ():
            recurrent[slot] = _rounded(states[num_tokens], recurrent.dtype)
            conv[slot] = _add_to_rings(rings, inputs[:, :num_tokens], starts[rows])[0]
    z = z.unflatten(-1, (-1, value_dim))
    return gated_rms_norm(out, z, norm_weight, eps, deterministic=deterministic).flatten(1)


def _takes_blocks(span: Span | None) -> TypeGuard[Span]:
    """Several tokens, or one that another split of its prompt would have put at the start of a
    block.
    """
    return span is not None and (span.num_tokens > 1 or span.context_len % BLOCK_TOKENS == 1)


def _initial(pool: Tensor, slots: Tensor, starts_empty: Tensor) -> Tensor:
    """The rows' states, copied; zero where nothing came before, whatever the slot holds."""
    states = pool.index_select(0, slots).float()
    return states.masked_fill_(starts_empty.view(-1, *[1] * (pool.dim() - 1)), 0.0)


def _rounded(state: Tensor, dtype: torch.dtype) -> Tensor:
    """As slots hold it: of what is too large, the largest number, as infinity would stay."""
    if dtype == torch.float32:
        return state
    largest = torch.finfo(dtype).max
    return state.clamp(-largest, largest).to(dtype)


def _history(rings: Tensor, starts: Tensor, num_inputs: int) -> Tensor:
    """The last inputs before each row's start: rings [n, W, C] -> [n, num_inputs, C]."""
    positions = starts[:, None] + torch.arange(
        -num_inputs, 0, device=rings.device
    )  # [n, num_inputs]
    rows = torch.arange(len(rings), device=rings.device)[:, None]
    history = rings[rows, positions % rings.shape[1]]
    return history.masked_fill_((positions < 0)[..., None], 0.0)


def _add_to_rings(rings: Tensor, inputs: Tensor, starts: Tensor) -> Tensor:
    """rings [n, W, C] with inputs [n, t, C], from each row's start on, in their places."""
    num_tokens, width = inputs.shape[1], rings.shape[1]
    kept = torch.arange(max(0, num_tokens - width), num_tokens, device=rings.device)
    rows = torch.arange(len(rings), device=rings.device)[:, None]
    return rings.index_put((rows, (starts[:, None] + kept) % width), inputs[:, -width:])


def _convolve(inputs: Tensor, history: Tensor, weight: Tensor, deterministic: bool) -> Tensor:
    """inputs [n, t, C] after history [n, Kc - 1, C] -> silu of the causal convolution [n, t, C]
    float32.
    """
    windows = torch.cat((history, inputs), dim=1)
    num_tokens = inputs.shape[1]
    taps = weight.float()
    total = windows[:, :num_tokens].float() * taps[0]
    for age in range(1, len(taps)):
        total = torch.addcmul(total, windows[:, age : age + num_tokens].float(), taps[age])
    return silu(total, deterministic)


def _split_heads(
    convolved: Tensor,  # [n, t, C]
    num_key_heads: int,
    num_value_heads: int,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # [n, t, Hk, K], [n, t, Hk, K], [n, t, Hv, V]
    """Queries and keys have length one; the queries carry the scale K^-0.5."""
    value_size = num_value_heads * value_dim
    key_size = (convolved.shape[-1] - value_size) // 2
    qk, v = convolved.split_with_sizes((2 * key_size, value_size), dim=-1)
    q, k = _unit_length(qk.unflatten(-1, (2, num_key_heads, -1))).unbind(-3)
    return q * q.shape[-1] ** -0.5, k, v.unflatten(-1, (num_value_heads, value_dim))


def _unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def _recurrence(
    q: Tensor,  # [n, Hk, K]
    k: Tensor,  # [n, Hk, K]
    v: Tensor,  # [n, Hv, V]
    log_decay: Tensor,  # [n, Hv]
    beta: Tensor,  # [n, Hv]
    state: Tensor,  # [n, Hv, K, V]  consumed
) -> tuple[Tensor, Tensor]:  # [n, Hv, V], [n, Hv, K, V]
    """One token of every row: decay, replace what the state holds under the key, read with the
    query.
    """
    heads_a_key = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(heads_a_key, dim=1).flatten(0, 1).unsqueeze(1) for x in (q, k))
    held = state.mul_(log_decay.exp()[..., None, None]).flatten(0, 1)  # [n * Hv, K, V]
    correction = beta.flatten()[:, None, None] * (v.flatten(0, 1).unsqueeze(1) - k @ held)
    held.baddbmm_(k.transpose(1, 2), correction)
    return (q @ held).view(v.shape), held.view(state.shape)


class _Prepared(NamedTuple):
    """What a block is before it meets the state; heads as [Hk, r] with r = Hv / Hk."""

    q: Tensor  # [blocks, Hk, r, 64, K]  decayed since the block began
    k: Tensor  # [blocks, Hk, 1, 64, K]
    attn: Tensor  # [blocks, Hk, r, 64, 64]  q k^T, causal, decayed between the two tokens
    u: Tensor  # [blocks, Hk, r, 64, V]  values, corrected for the block's own earlier tokens
    w: Tensor  # [blocks, Hk, r, 64, K]  what the corrections read from the state before the block
    log_decay: Tensor  # [blocks, Hk, r, 64]  since the block began


def _row_in_blocks(
    q: Tensor,  # [t, Hk, K]
    k: Tensor,  # [t, Hk, K]
    v: Tensor,  # [t, Hv, V]
    log_decay: Tensor,  # [t, Hv]
    beta: Tensor,  # [t, Hv]
    state: Tensor,  # [Hv, K, V]
    span: Span,
    deterministic: bool,
) -> tuple[Tensor, dict[int, Tensor]]:  # [t, Hv, V], states after the wanted numbers of tokens
    offset = (span.context_len - span.num_tokens) % BLOCK_TOKENS  # of the first token in its block
    wanted = {num_tokens for num_tokens, _ in span.checkpoints} | {span.num_tokens}
    padded = [
        _in_blocks(x, offset, k.shape[1]) for x in (q, k, v, log_decay[..., None], beta[..., None])
    ]
    num_blocks = len(padded[0])
    at_once = 1 if deterministic else num_blocks
    held = state.unflatten(0, (k.shape[1], -1))  # [Hk, r, K, V]
    outputs, states = [], {}
    for first in range(0, num_blocks, at_once):
        prepared = _prepare_blocks(*(x[first : first + at_once] for x in padded))
        for index, block in enumerate(map(_Prepared, *prepared), start=first):
            output, corrected = _attend_block(block, held)
            outputs.append(output)
            begin, before = index * BLOCK_TOKENS - offset, held
            held = _advance(block, corrected, before, BLOCK_TOKENS)
            for num_tokens in wanted:
                if num_tokens == begin + BLOCK_TOKENS:
                    states[num_tokens] = held.flatten(0, 1)
                elif begin < num_tokens < begin + BLOCK_TOKENS:
                    inside = _advance(block, corrected, before, num_tokens - begin)
                    states[num_tokens] = inside.flatten(0, 1)
    out = torch.stack(outputs).permute(0, 3, 1, 2, 4).reshape(-1, *v.shape[1:])
    return out[offset : offset + span.num_tokens], states


def _in_blocks(x: Tensor, offset: int, num_key_heads: int) -> Tensor:
    """[t, heads, W] -> [blocks, Hk, heads / Hk, 64, W]. Zeros before and after change no state."""
    after = -(offset + len(x)) % BLOCK_TOKENS
    blocks = F.pad(x, (0, 0, 0, 0, offset, after)).unflatten(0, (-1, BLOCK_TOKENS)).transpose(1, 2)
    return blocks.unflatten(1, (num_key_heads, -1)).contiguous()


def _prepare_blocks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> _Prepared:
    """Within a block, token t's correction needs those of s < t: a unit lower-triangular system."""
    total = log_decay.squeeze(-1).cumsum(-1)  # [blocks, Hk, r, 64]
    later = torch.ones(BLOCK_TOKENS, BLOCK_TOKENS, dtype=torch.bool, device=q.device).triu(1)
    # Masked before the exponential: the other half would overflow.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    growth = total.exp()[..., None]
    system = (beta * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    wanted = torch.cat((beta * v, beta * growth * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    return _Prepared(growth * q, k, q @ k.transpose(-1, -2) * decay, u, w, total)


def _attend_block(block: _Prepared, held: Tensor) -> tuple[Tensor, Tensor]:
    """One block's outputs and final corrections [Hk, r, 64, V], given the state before it."""
    corrected = block.u - block.w @ held
    return block.q @ held + block.attn @ corrected, corrected


def _advance(block: _Prepared, corrected: Tensor, held: Tensor, num_tokens: int) -> Tensor:
    """The state after `num_tokens` of the block."""
    since_begin = block.log_decay[..., :num_tokens, None]  # [Hk, r, t, 1]
    in_all = since_begin[..., -1:, :]
    keys = block.k[..., :num_tokens, :] * (in_all - since_begin).exp()
    return in_all.exp() * held + keys.transpose(-1, -2) @ corrected[..., :num_tokens, :]
