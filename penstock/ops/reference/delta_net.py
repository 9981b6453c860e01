"""The Gated DeltaNet mixer: causal convolution, gates, delta rule, and the gated norm of its
output.

Rows of one token use the recurrence, all at once; rows of several tokens are computed in blocks of
64 aligned to absolute positions, so that a prompt split at a multiple of 64 gives the same bits.
With `deterministic` every row is computed alone, and a token at such a position always in a block.

State is read from the initial slots and written only to the state and checkpoint slots; it is
computed in float32 and rounded to the slots' dtype. The convolution's inputs are kept in a ring
buffer: the input of position p is at p % W, so a step writes only the entries of its own tokens,
unless the row moves to another slot. Positions before 0 count as zero, whatever the ring holds.

With a journal, a decode may have drafts after its token, and entries of earlier drafts to replay
before it. State and ring stay in one slot: the slot gets the state after the decode's own token,
the journal gets what its drafts add, and a ring of W >= Kc + n entries has room for the inputs of n
drafts. Every token is computed as if it were a decode of its own.

With a backlog (`backlog.py`), slots may lack their last tokens. Here that is made up for first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.cpu import decode, few_tokens
from penstock.ops.float8 import RoundedTokens
from penstock.ops.reference.activation import sigmoid, silu, softplus
from penstock.ops.reference.backlog import Backlog, whole_states
from penstock.ops.reference.journal import Journal, Replay
from penstock.ops.reference.norm import gated_rms_norm
from penstock.ops.reference.rows import BLOCK_TOKENS, Span, TokenBlocks, cut_rows
from penstock.ops.weight import Weight

L2_EPS = 1e-6


def gated_delta_net(
    mixed: Tensor,  # [T, C + Hv * V + 2 * Hv]  conv channels (q, k, v), z, b, a
    conv_weight: Tensor,  # [Kc, C]  the newest input last
    a_log: Tensor,  # [Hv] float32
    dt_bias: Tensor,  # [Hv] float32
    norm_weight: Tensor,  # [V] float32
    eps: float,
    conv: Tensor,  # [slots, W, C]  ring buffers of the convolution's inputs, W >= Kc
    recurrent: Tensor,  # [slots, Hv, K, V] float32 or float16
    query_start: Tensor,  # [R + 1]
    context_lens: Tensor,  # [R]
    state_slots: Tensor,  # [R]
    initial_slots: Tensor,  # [R]
    spans: Sequence[Span],
    blocks: TokenBlocks,
    num_key_heads: int,
    journal: Journal | None = None,
    replay: Replay | None = None,  # None: nothing to replay, and no drafts
    backlog: Backlog | None = None,  # None: all states are whole
    reader: Weight | None = None,  # that of the GEMM which alone reads the result
    *,
    deterministic: bool = False,
) -> Tensor | RoundedTokens:  # [T, Hv * V]
    if backlog is not None:
        _end_backlog(recurrent, backlog, state_slots, initial_slots, spans, replay)
    if (
        few_tokens.can_read(mixed, deterministic)
        and few_tokens.can_mix(conv_weight, conv, recurrent)
        and _are_rows_of_few_tokens(spans, state_slots, initial_slots)
    ):
        outputs, first = [], 0
        for row, span in enumerate(spans):
            end, start = first + span.num_tokens, span.context_len - span.num_tokens
            entry, *replayed = _numbers_of(replay and replay.part(slice(row, row + 1)))
            own_slots = (int(state_slots[row]), int(initial_slots[row]))
            output = few_tokens.gated_delta_net(
                *(mixed[first:end], conv_weight, a_log, dt_bias, norm_weight, eps, L2_EPS),
                *(conv, recurrent, num_key_heads),
                (*own_slots, start, *replayed, 1 if span.is_decode else span.num_tokens),
                () if journal is None else tuple([part[entry] for part in journal]),
            )
            outputs.append(output)
            first = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    position = spans[0].context_len - spans[0].num_tokens if len(spans) == 1 else 0
    if _is_one_decode(mixed, recurrent, spans, deterministic):
        given = (mixed, conv_weight, a_log, dt_bias, norm_weight, eps, conv, recurrent)
        row, num_accepted, keep_at, keep_slot = _numbers_of(replay)
        if len(mixed) == 1 and not (num_accepted or keep_slot):
            slots = (state_slots, initial_slots)
            return decode.gated_delta_net(*given, *slots, position, num_key_heads, L2_EPS)
        if journal is not None and replay is not None:
            return decode.gated_delta_net_drafts(
                *given,
                (int(state_slots), int(initial_slots)),
                position,
                num_key_heads,
                L2_EPS,
                (journal.keys[row], journal.values[row], journal.gates[row]),
                num_accepted,
                (keep_at, keep_slot),
            )
    num_value_heads, value_dim = a_log.shape[0], norm_weight.shape[0]
    sizes = (conv_weight.shape[1], num_value_heads * value_dim, num_value_heads, num_value_heads)
    channels, z, b, a = mixed.split_with_sizes(sizes, dim=-1)
    beta = sigmoid(b, deterministic)  # [T, Hv]
    log_decay = -a_log.exp() * softplus(a.float() + dt_bias, deterministic)  # [T, Hv]
    starts = context_lens - query_start.diff()  # [R]  tokens before this step
    out = torch.empty(
        len(mixed), num_value_heads, value_dim, dtype=torch.float32, device=mixed.device
    )
    for group in cut_rows(spans, batch_decodes=not deterministic):
        rows, tokens = group.rows, group.tokens
        if journal is not None and replay is not None and spans[rows.start].is_decode:
            out[tokens] = _decode_with_drafts(
                _Decodes(
                    channels[tokens].to(conv.dtype),
                    log_decay[tokens],
                    beta[tokens],
                    spans[rows],
                    starts[rows],
                    state_slots[rows],
                    initial_slots[rows],
                ),
                conv_weight,
                conv,
                recurrent,
                num_key_heads,
                journal,
                replay.part(rows),
                deterministic,
            )
            continue
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


def _end_backlog(
    recurrent: Tensor,
    backlog: Backlog,
    state_slots: Tensor,
    initial_slots: Tensor,
    spans: Sequence[Span],
    replay: Replay | None,
) -> None:
    """Makes the states that a step reads whole; those that it writes will be."""
    whole = whole_states(recurrent, backlog, initial_slots)
    recurrent[initial_slots] = _rounded(whole, recurrent.dtype)
    checkpoints = [slot for span in spans for _, slot in span.checkpoints]
    written = [initial_slots, state_slots, initial_slots.new_tensor(checkpoints)]
    if replay is not None:
        written.append(replay.keep_slots.to(initial_slots.dtype))
    backlog.counts[torch.cat(written)] = 0


def _numbers_of(replay: Replay | None) -> tuple[int, ...]:
    """For a step with one row."""
    return (0, 0, 0, 0) if replay is None else tuple([int(number) for number in replay])


def _are_rows_of_few_tokens(
    spans: Sequence[Span], state_slots: Tensor, initial_slots: Tensor
) -> bool:
    """Whether rows may be computed one after the other, each by the CPU's kernel of few tokens:
    decodes and short prefills, none of which reads a state that one before has written.
    """
    most = few_tokens.MOST_TOKENS
    if not all(1 <= span.num_tokens <= most and not span.checkpoints for span in spans):
        return False
    written = set[int]()
    for slot, initial_slot in zip(state_slots.tolist(), initial_slots.tolist()):
        if initial_slot in written:
            return False
        written.add(slot)
    return bool(spans)


def _is_one_decode(
    mixed: Tensor, recurrent: Tensor, spans: Sequence[Span], deterministic: bool
) -> bool:
    """Whether a step of one row may take the CPU's fast path: one token, or a decode."""
    if len(spans) != 1 or spans[0].checkpoints or recurrent.dtype != torch.float32:
        return False
    has_drafts = spans[0].is_decode and decode.may_be_drafts(mixed, deterministic)
    return has_drafts or decode.is_alone(mixed, deterministic)


def _takes_blocks(span: Span | None) -> TypeGuard[Span]:
    """Whether a row has several tokens, or one that starts a block."""
    return span is not None and (span.num_tokens > 1 or span.context_len % BLOCK_TOKENS == 1)


def _initial(pool: Tensor, slots: Tensor, starts_empty: Tensor) -> Tensor:
    """Copies of the rows' states; zero for rows at position 0, whatever the slot holds."""
    states = pool.index_select(0, slots).float()
    return states.masked_fill_(starts_empty.view(-1, *[1] * (pool.dim() - 1)), 0.0)


def _rounded(state: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to the slots' dtype, and clamped, since an infinity would never go away."""
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
    """Writes inputs [n, t, C], from each row's start on, to their entries in rings [n, W, C]."""
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
    """Queries and keys are normalized to length one; the queries include the scale K^-0.5."""
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
    """One token of every row: decay, replace the value under the key, read with the query."""
    heads_a_key = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(heads_a_key, dim=1).flatten(0, 1).unsqueeze(1) for x in (q, k))
    held = state.mul_(log_decay.exp()[..., None, None]).flatten(0, 1)  # [n * Hv, K, V]
    correction = beta.flatten()[:, None, None] * (v.flatten(0, 1).unsqueeze(1) - k @ held)
    held.baddbmm_(k.transpose(1, 2), correction)
    return (q @ held).view(v.shape), held.view(state.shape)


class _Decodes(NamedTuple):
    """n rows of a step, each a token followed by drafts."""

    channels: Tensor  # [T, C]
    log_decay: Tensor  # [T, Hv]
    beta: Tensor  # [T, Hv]
    spans: Sequence[Span]
    starts: Tensor  # [n]
    state_slots: Tensor  # [n]
    initial_slots: Tensor  # [n]

    @property
    def places(self) -> tuple[Tensor, Tensor]:  # [n, t] both
        """The indices of each row's tokens among all; False where a row has fewer than others."""
        lens = torch.tensor([span.num_tokens for span in self.spans], device=self.starts.device)
        place = torch.arange(int(lens.max()), device=lens.device)
        firsts = lens.cumsum(0) - lens
        return (firsts[:, None] + place).clamp(max=len(self.channels) - 1), place < lens[:, None]


def _decode_with_drafts(
    decodes: _Decodes,
    conv_weight: Tensor,
    conv: Tensor,
    recurrent: Tensor,
    num_key_heads: int,
    journal: Journal,
    replay: Replay,
    deterministic: bool,
) -> Tensor:  # [T, Hv, V]
    """All rows take every step together; an inactive row has a decay of 1 and a beta of 0, which
    leave its state unchanged.
    """
    starts, (places, exist) = decodes.starts, decodes.places
    num_value_heads, value_dim = recurrent.shape[1], recurrent.shape[3]
    num_done = starts - replay.num_accepted  # [n]  tokens in the slots' states
    state = _initial(recurrent, decodes.initial_slots, starts == 0)
    rings = conv.index_select(0, decodes.initial_slots)
    num_entries = journal.keys.shape[1] if state.is_cuda else int(replay.num_accepted.max())
    # Of the first row: a row that computes blocks is alone.
    position = int(num_done[0]) if deterministic else None
    keys, values, gates = (part[replay.rows] for part in journal)
    heads_a_key = num_value_heads // num_key_heads
    keys = keys[:, :, ::heads_a_key]
    for entry in range(num_entries + 1):
        _keep(recurrent, conv, state, rings, num_done + entry, starts, replay)
        if entry < num_entries:
            is_right = (entry < replay.num_accepted)[:, None]
            log_decay, beta = torch.where(is_right[..., None], gates[:, entry, :2], 0.0).unbind(1)
            heads = keys[:, entry], keys[:, entry], values[:, entry]
            _, state = _one_token(*heads, log_decay, beta, state, recurrent.dtype, position)
            position = None if position is None else position + 1
    inputs = decodes.channels[places]  # [n, t, C]
    history = _history(rings, starts, num_inputs=len(conv_weight) - 1)
    convolved = _convolve(inputs, history, conv_weight, deterministic)
    q, k, v = _split_heads(convolved, num_key_heads, num_value_heads, value_dim)
    log_decay = decodes.log_decay[places].masked_fill(~exist[..., None], 0.0)
    beta = decodes.beta[places].masked_fill(~exist[..., None], 0.0)
    outputs = []
    for token in range(places.shape[1]):
        gated = log_decay[:, token], beta[:, token]
        heads = q[:, token], k[:, token], v[:, token]
        output, state = _one_token(*heads, *gated, state, recurrent.dtype, position)
        position = None if position is None else position + 1
        outputs.append(output)
        if token == 0:
            recurrent.index_copy_(0, decodes.state_slots, _rounded(state, recurrent.dtype))
    num_drafts = places.shape[1] - 1
    journal.keys[replay.rows, :num_drafts] = k[:, 1:].repeat_interleave(heads_a_key, dim=2)
    journal.values[replay.rows, :num_drafts] = v[:, 1:]
    own_gates = torch.stack((log_decay, beta, torch.ones_like(beta)), dim=2)
    journal.gates[replay.rows, :num_drafts] = own_gates[:, 1:]
    conv.index_copy_(0, decodes.state_slots, _add_to_rings(rings, inputs, starts))
    return torch.stack(outputs, dim=1)[exist]


def _keep(
    recurrent: Tensor,
    conv: Tensor,
    state: Tensor,  # [n, Hv, K, V]
    rings: Tensor,  # [n, W, C]
    num_tokens: Tensor,  # [n]  in these states
    starts: Tensor,  # [n]
    replay: Replay,
) -> None:
    """Saves the requested states; others go to slot 0, the padding slot."""
    is_here = (num_tokens == replay.keep_at) & (num_tokens <= starts) & (replay.keep_slots > 0)
    if state.is_cuda or bool(is_here.any()):
        slots = torch.where(is_here, replay.keep_slots, 0)
        recurrent.index_copy_(0, slots, _rounded(state, recurrent.dtype))
        conv.index_copy_(0, slots, rings)


def _one_token(
    q: Tensor,  # [n, Hk, K]
    k: Tensor,
    v: Tensor,  # [n, Hv, V]
    log_decay: Tensor,  # [n, Hv]
    beta: Tensor,
    state: Tensor,  # [n, Hv, K, V]  consumed
    dtype: torch.dtype,  # of the slots
    position: int | None,  # None: never in a block
) -> tuple[Tensor, Tensor]:  # [n, Hv, V], [n, Hv, K, V]
    """Computes it like a step of this token alone, with the same rounding of the state."""
    span = None if position is None else _OneToken(position + 1)
    if _takes_blocks(span):
        out, states = _row_in_blocks(q, k, v, log_decay, beta, state[0], span, True)
        return out, states[1][None]
    out, state = _recurrence(q, k, v, log_decay, beta, state)
    return out, _rounded(state, dtype).float()


class _OneToken(NamedTuple):
    context_len: int
    num_tokens: int = 1
    checkpoints: tuple[tuple[int, int], ...] = ()
    is_decode: bool = True
    num_newest: int = 1


class _Prepared(NamedTuple):
    """The state-independent part of a block; heads as [Hk, r] with r = Hv / Hk."""

    q: Tensor  # [blocks, Hk, r, 64, K]  decayed since the start of the block
    k: Tensor  # [blocks, Hk, 1, 64, K]
    attn: Tensor  # [blocks, Hk, r, 64, 64]  q k^T, causal, decayed between the two tokens
    u: Tensor  # [blocks, Hk, r, 64, V]  values, corrected for earlier tokens of the block
    w: Tensor  # [blocks, Hk, r, 64, K]  reads from the state before the block
    log_decay: Tensor  # [blocks, Hk, r, 64]  since the start of the block


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
    """[t, heads, W] -> [blocks, Hk, heads / Hk, 64, W]. Zero padding does not change the state."""
    after = -(offset + len(x)) % BLOCK_TOKENS
    blocks = F.pad(x, (0, 0, 0, 0, offset, after)).unflatten(0, (-1, BLOCK_TOKENS)).transpose(1, 2)
    return blocks.unflatten(1, (num_key_heads, -1)).contiguous()


def _prepare_blocks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> _Prepared:
    """Within a block, token t's correction needs those of s < t: a unit lower-triangular system."""
    total = log_decay.squeeze(-1).cumsum(-1)  # [blocks, Hk, r, 64]
    later = torch.ones(BLOCK_TOKENS, BLOCK_TOKENS, dtype=torch.bool, device=q.device).triu(1)
    # Masked before the exponential: the upper triangle would overflow.
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
