# mypy: disable-error-code="no-untyped-def"
"""Decodes with a journal: a token, drafts after it, and earlier drafts to replay.

As in `delta_net`, a program computes one value head of one row with its whole state in registers,
in the same layout and with the same sums in the same order. It reads the state once, replays the
entries of the accepted drafts, and writes the state once, after the row's own token; drafts
continue from there in registers, and only their entries are written. The state is rounded to its
slot's dtype after every token, as a step of that token alone would do.

All that depends on earlier steps only, the replay too, is computed before the preceding projection
is complete. Then a token takes as long as its sums: the inputs of the convolution stay in
registers, and those of the next token are loaded meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.reference.backlog import Backlog
from penstock.ops.reference.journal import Journal, Replay
from penstock.ops.triton.activation import silu, softplus
from penstock.ops.triton.delta_net_backlog import (
    add_backlog,
    backlog_of,
    end_backlog,
    late_tokens,
    most_late,
)
from penstock.ops.triton.delta_net_blocks import rounded
from penstock.ops.triton.delta_net_sums import add_pairs, add_triples
from penstock.ops.triton.launch import (
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.tuning import Tile

L2_EPS = tl.constexpr(1e-6)
NUM_GATES = tl.constexpr(3)


def decode_with_drafts(
    out: Tensor,  # [T, Hv * V]
    mixed: Tensor,  # [T, C + Hv * V + 2 * Hv]
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv: Tensor,
    recurrent: Tensor,
    query_start: Tensor,  # [R + 1]  of these rows, in the step's tokens
    context_lens: Tensor,  # [R]
    state_slots: Tensor,
    initial_slots: Tensor,
    num_key_heads: int,
    journal: Journal,
    replay: Replay,
    backlog: Backlog | None,
    tile: Tile,
) -> None:
    """All tokens of every row, in one launch."""
    num_rows, (_, num_value_heads, key_dim, value_dim) = len(state_slots), recurrent.shape
    drafts_kernel[num_value_heads, num_rows](
        mixed,
        conv_weight,
        a_log,
        dt_bias,
        norm_weight,
        conv,
        recurrent,
        query_start,
        context_lens,
        state_slots,
        initial_slots,
        *journal,
        *replay,
        *backlog_of(backlog, recurrent),
        out,
        eps,
        mixed.stride(0),
        conv.stride(0),
        recurrent.stride(0),
        MOST_LATE=most_late(backlog),
        NUM_ENTRIES=journal.keys.shape[1],
        NUM_KEY_HEADS=num_key_heads,
        NUM_VALUE_HEADS=num_value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        NUM_TAPS=conv_weight.shape[0],
        RING=conv.shape[1],
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=next_power_of_2(value_dim),
        **tile,
        **launch_options(mixed.device),
    )


@triton.jit(
    do_not_specialize=[
        "query_start",
        "context_lens",
        "state_slots",
        "initial_slots",
        "rows",
        "num_accepted",
        "keep_at",
        "keep_slots",
    ]
)
def drafts_kernel(
    mixed,
    conv_weight,
    a_log,
    dt_bias,
    norm_weight,
    conv,
    recurrent,
    query_start,
    context_lens,
    state_slots,
    initial_slots,
    keys,  # [rows, n, Hv, K]
    values,  # [rows, n, Hv, V]
    gates,  # [rows, n, 3, Hv]
    rows,
    num_accepted,
    keep_at,
    keep_slots,
    late_counts,  # [slots, Hv]
    late_keys,  # [slots, MOST_LATE, Hv, K]
    late_corrections,  # [slots, MOST_LATE, Hv, V]
    late_decays,  # [slots, MOST_LATE, Hv]
    out,
    eps,
    mixed_stride,
    conv_stride,
    recurrent_stride,
    MOST_LATE: tl.constexpr,
    NUM_ENTRIES: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WARP_V: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = NUM_VALUE_HEADS * VALUE_DIM
    NUM_CHANNELS: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    ALL_KEYS: tl.constexpr = NUM_VALUE_HEADS * KEY_DIM
    HEADS_A_KEY: tl.constexpr = NUM_VALUE_HEADS // NUM_KEY_HEADS
    i_head = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    first = tl.load(query_start + i_row).to(tl.int64)
    num_tokens = tl.load(query_start + i_row + 1).to(tl.int64) - first
    start = tl.load(context_lens + i_row).to(tl.int64) - num_tokens
    state_slot = tl.load(state_slots + i_row).to(tl.int64)
    initial_slot = tl.load(initial_slots + i_row).to(tl.int64)
    num_right = tl.load(num_accepted + i_row).to(tl.int64)
    kept_at = tl.load(keep_at + i_row).to(tl.int64)
    keep_slot = tl.load(keep_slots + i_row).to(tl.int64)
    p_old_ring = conv + initial_slot * conv_stride
    p_ring = conv + state_slot * conv_stride
    first_entry = tl.load(rows + i_row).to(tl.int64) * NUM_ENTRIES
    p_keys = keys + first_entry * ALL_KEYS + i_head * KEY_DIM
    p_values = values + first_entry * VALUE_SIZE + i_head * VALUE_DIM
    p_gates = gates + first_entry * (NUM_GATES * NUM_VALUE_HEADS) + i_head

    # Channels and layout of `delta_net`: query and key are one vector, and a sum over the keys of
    # the state stays within a warp.
    i_qk, i_k, i_v = tl.arange(0, 2 * BLOCK_K), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_qk, in_key, in_v = i_qk % BLOCK_K < KEY_DIM, i_k < KEY_DIM, i_v < VALUE_DIM
    qk_channels = i_qk // BLOCK_K * KEY_SIZE + i_head // HEADS_A_KEY * KEY_DIM + i_qk % BLOCK_K
    v_channels = 2 * KEY_SIZE + i_head * VALUE_DIM + i_v
    writes_qk = tl.where(i_head % HEADS_A_KEY == 0, in_qk, False)  # value heads share their key
    NUM_PARTS: tl.constexpr = BLOCK_V // WARP_V
    COLUMNS: tl.constexpr = 128 // recurrent.dtype.element_ty.primitive_bitwidth
    LANES_K: tl.constexpr = min(32 * COLUMNS // WARP_V, BLOCK_K)
    GROUPS_K: tl.constexpr = BLOCK_K // LANES_K
    s_k = tl.arange(0, LANES_K)[:, None] * GROUPS_K + tl.arange(0, GROUPS_K)[None, :]
    s_v = tl.arange(0, NUM_PARTS)[:, None] * WARP_V + tl.arange(0, WARP_V)[None, :]
    in_state = (s_k < KEY_DIM)[:, None, :, None] & (s_v < VALUE_DIM)[None, :, None, :]
    state_offsets = (
        i_head * (KEY_DIM * VALUE_DIM) + s_k[:, None, :, None] * VALUE_DIM + s_v[None, :, None, :]
    )
    b_state = tl.load(
        recurrent + initial_slot * recurrent_stride + state_offsets,
        mask=tl.where(start > 0, in_state, False),
        other=0.0,
        eviction_policy="evict_first",
    ).to(tl.float32)
    if MOST_LATE > 0:
        num_late = late_tokens(late_counts, initial_slot, i_head, start, NUM_VALUE_HEADS)
        b_state = add_backlog(
            b_state, late_keys, late_corrections, late_decays, initial_slot, num_late, i_head,
            s_k, s_v, NUM_VALUE_HEADS, MOST_LATE, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
    rate = tl.load(a_log + i_head)
    step_bias = tl.load(dt_bias + i_head)
    b_norm = tl.load(norm_weight + i_v, mask=in_v, other=0.0)
    b_norm = tl.reshape(b_norm, (NUM_PARTS, WARP_V))
    qk_taps, qk_past = _load_past(
        p_old_ring, conv_weight, qk_channels, in_qk, start, NUM_CHANNELS, NUM_TAPS, RING
    )
    v_taps, v_past = _load_past(
        p_old_ring, conv_weight, v_channels, in_v, start, NUM_CHANNELS, NUM_TAPS, RING
    )

    # A state to keep is saved with its ring: the inputs before it are still there.
    if keep_slot > 0:
        wait_for_previous(PDL)  # nothing is written before
    num_done = start - num_right
    for entry in range(num_right + 1):
        if (keep_slot > 0) & (num_done + entry == kept_at):
            tl.store(
                recurrent + keep_slot * recurrent_stride + state_offsets,
                rounded(b_state, recurrent.dtype.element_ty),
                mask=in_state,
            )
            end_backlog(late_counts, keep_slot, i_head, NUM_VALUE_HEADS, MOST_LATE)
            p_kept = conv + keep_slot * conv_stride
            for i in tl.static_range(RING):
                p_from, p_to = p_old_ring + i * NUM_CHANNELS, p_kept + i * NUM_CHANNELS
                _copy(p_from, p_to, qk_channels, writes_qk)
                _copy(p_from, p_to, v_channels, in_v)
        if entry < num_right:
            b_k = tl.load(p_keys + entry * ALL_KEYS + i_k, mask=in_key, other=0.0)
            b_v = tl.load(p_values + entry * VALUE_SIZE + i_v, mask=in_v, other=0.0)
            p_gate = p_gates + entry * (NUM_GATES * NUM_VALUE_HEADS)
            decay = tl.exp(tl.load(p_gate))
            beta = tl.load(p_gate + NUM_VALUE_HEADS)
            k_scale = tl.load(p_gate + 2 * NUM_VALUE_HEADS)
            s_key = tl.reshape(b_k, (LANES_K, GROUPS_K))[:, None, :, None]
            b_v = tl.reshape(b_v, (NUM_PARTS, WARP_V))
            k_held = tl.sum(tl.sum(s_key * b_state, axis=2), axis=0)
            correction = beta * (b_v - decay * k_scale * k_held)
            b_state = decay * b_state + (k_scale * s_key) * correction[None, :, None, :]
            b_state = rounded(b_state, recurrent.dtype.element_ty).to(tl.float32)

    wait_for_previous(PDL)
    p_token = mixed + first * mixed_stride
    p_own = p_token + NUM_CHANNELS + i_head * VALUE_DIM
    p_beta = p_token + NUM_CHANNELS + VALUE_SIZE + i_head
    qk_next = tl.load(p_token + qk_channels, mask=in_qk, other=0.0)
    v_next = tl.load(p_token + v_channels, mask=in_v, other=0.0)
    gate_next = tl.load(p_own + i_v, mask=in_v, other=0.0)
    beta_next, step_next = tl.load(p_beta), tl.load(p_beta + NUM_VALUE_HEADS)
    for token in range(num_tokens):
        qk_input, v_input = qk_next.to(conv.dtype.element_ty), v_next.to(conv.dtype.element_ty)
        gate = gate_next.to(tl.float32)
        beta = tl.sigmoid(beta_next.to(tl.float32))
        step = step_next.to(tl.float32)
        has_next = token + 1 < num_tokens
        ahead = (token + 1) * mixed_stride
        qk_next = tl.load(p_token + ahead + qk_channels, tl.where(has_next, in_qk, False), 0.0)
        v_next = tl.load(p_token + ahead + v_channels, tl.where(has_next, in_v, False), 0.0)
        gate_next = tl.load(p_own + ahead + i_v, tl.where(has_next, in_v, False), 0.0)
        beta_next = tl.load(p_beta + ahead, has_next, 0.0)
        step_next = tl.load(p_beta + ahead + NUM_VALUE_HEADS, has_next, 0.0)
        b_qk, qk_past = _convolve(qk_past, qk_input, qk_taps)
        b_v, v_past = _convolve(v_past, v_input, v_taps)
        log_decay = -tl.exp(rate) * softplus(step + step_bias)
        decay = tl.exp(log_decay)

        # As in `delta_net`, in the same order: one pass over the old state computes all reads.
        b_q, b_k = tl.split(tl.permute(tl.reshape(b_qk, (2, BLOCK_K)), (1, 0)))
        s_q = tl.reshape(b_q, (LANES_K, GROUPS_K))[:, None, :, None]
        s_key = tl.reshape(b_k, (LANES_K, GROUPS_K))[:, None, :, None]
        q_part, k_part = tl.reduce((s_q * b_state, s_key * b_state), 2, add_pairs)
        q_held, k_held = tl.reduce((q_part, k_part), 0, add_pairs)
        q_square, k_square, q_k = tl.reduce((b_q * b_q, b_k * b_k, b_q * b_k), 0, add_triples)
        q_scale = tl.rsqrt(q_square + L2_EPS) * KEY_DIM**-0.5
        k_scale = tl.rsqrt(k_square + L2_EPS)
        s_value = tl.reshape(b_v, (NUM_PARTS, WARP_V))
        correction = beta * (s_value - decay * k_scale * k_held)
        read = q_scale * (decay * q_held + k_scale * q_k * correction)
        b_state = decay * b_state + (k_scale * s_key) * correction[None, :, None, :]
        b_state = rounded(b_state, recurrent.dtype.element_ty).to(tl.float32)
        mean_square = tl.sum(tl.sum(read * read, axis=1), axis=0) / VALUE_DIM
        normed = read * tl.rsqrt(mean_square + eps) * b_norm
        gate = tl.reshape(gate, (NUM_PARTS, WARP_V))
        p_out = out + (first + token) * VALUE_SIZE + i_head * VALUE_DIM + s_v
        tl.store(p_out, (normed * silu(gate)).to(out.dtype.element_ty), mask=s_v < VALUE_DIM)
        # The ring has room for what was read and for what is written now, see the reference.
        p_entry = p_ring + (start + token) % RING * NUM_CHANNELS
        tl.store(p_entry + qk_channels, qk_input, mask=writes_qk)
        tl.store(p_entry + v_channels, v_input, mask=in_v)
        if token == 0:
            tl.store(
                recurrent + state_slot * recurrent_stride + state_offsets,
                b_state.to(recurrent.dtype.element_ty),
                mask=in_state,
                eviction_policy="evict_first",
            )
            end_backlog(late_counts, state_slot, i_head, NUM_VALUE_HEADS, MOST_LATE)
        else:
            entry = token - 1
            tl.store(p_keys + entry * ALL_KEYS + i_k, b_k, mask=in_key)
            tl.store(p_values + entry * VALUE_SIZE + i_v, b_v, mask=in_v)
            p_gate = p_gates + entry * (NUM_GATES * NUM_VALUE_HEADS)
            tl.store(p_gate, log_decay)
            tl.store(p_gate + NUM_VALUE_HEADS, beta)
            tl.store(p_gate + 2 * NUM_VALUE_HEADS, k_scale)

    if initial_slot != state_slot:
        for i in tl.static_range(NUM_TAPS - 1):
            position = start - 1 - i
            entry_offset = (position + RING) % RING * NUM_CHANNELS
            p_from, p_to = p_old_ring + entry_offset, p_ring + entry_offset
            exists = position >= 0
            _copy(p_from, p_to, qk_channels, tl.where(exists, writes_qk, False))
            _copy(p_from, p_to, v_channels, tl.where(exists, in_v, False))


@triton.jit
def _copy(p_from, p_to, channels, mask):
    copied = tl.load(p_from + channels, mask=mask)
    tl.store(p_to + channels, copied.to(p_to.dtype.element_ty), mask=mask)


@triton.jit
def _load_past(
    p_ring,
    weight,
    channels,
    mask,
    start,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING: tl.constexpr,
):
    """The taps of the convolution, and the inputs before position `start`, the oldest first."""
    taps, past = (), ()
    for i in tl.static_range(NUM_TAPS):
        b_tap = tl.load(weight + i * NUM_CHANNELS + channels, mask=mask, other=0.0)
        taps += (b_tap.to(tl.float32),)  # type: ignore[assignment]
    for i in tl.static_range(NUM_TAPS - 1):
        position = start - (NUM_TAPS - 1 - i)
        p_input = p_ring + (position + RING) % RING * NUM_CHANNELS + channels
        b_input = tl.load(p_input, mask=tl.where(position >= 0, mask, False), other=0.0)
        past += (b_input.to(tl.float32),)  # type: ignore[assignment]
    return taps, past


@triton.jit
def _convolve(past, b_input, taps):
    """silu of the convolution at a token, and the inputs before the next one."""
    inputs = past + (b_input.to(tl.float32),)  # noqa: RUF005  Triton has no starred items
    total = tl.zeros(b_input.shape, dtype=tl.float32)
    for i in tl.static_range(len(taps)):
        total += inputs[i] * taps[i]
    return silu(total), inputs[1:]
