# mypy: disable-error-code="no-untyped-def"
"""Decodes of a mixer that has a journal: a token, drafts behind it, and earlier drafts to replay.

As in `delta_net`, a program is one value head of one row with its whole state in registers, and in
the same layout. It reads the state once, replays the entries of the drafts that were right, and
writes the state once, behind the row's own token; drafts go on from there in registers, and only
their entries are written. A state is rounded to the dtype of its slot after every token, as a step
of that token alone would do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.reference.journal import Journal, Replay
from penstock.ops.triton.activation import silu, softplus
from penstock.ops.triton.delta_net_blocks import rounded
from penstock.ops.triton.launch import (
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.triton.tuning import Tile

L2_EPS = tl.constexpr(1e-6)


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
    query_start: Tensor,  # [R + 1]  of these rows, among the tokens of the step
    context_lens: Tensor,  # [R]
    state_slots: Tensor,
    initial_slots: Tensor,
    num_key_heads: int,
    journal: Journal,
    replay: Replay,
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
        out,
        eps,
        mixed.stride(0),
        conv.stride(0),
        recurrent.stride(0),
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
    gates,  # [rows, n, 2, Hv]
    rows,
    num_accepted,
    keep_at,
    keep_slots,
    out,
    eps,
    mixed_stride,
    conv_stride,
    recurrent_stride,
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
    i_key_head = i_head // HEADS_A_KEY
    writes_key = i_head % HEADS_A_KEY == 0  # value heads of one key head share its channels
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
    p_gates = gates + first_entry * (2 * NUM_VALUE_HEADS) + i_head

    # The layout of `delta_net`: a sum over the keys stays within a warp.
    NUM_PARTS: tl.constexpr = BLOCK_V // WARP_V
    COLUMNS: tl.constexpr = 128 // recurrent.dtype.element_ty.primitive_bitwidth
    LANES_K: tl.constexpr = min(32 * COLUMNS // WARP_V, BLOCK_K)
    GROUPS_K: tl.constexpr = BLOCK_K // LANES_K
    s_k = tl.arange(0, LANES_K)[:, None] * GROUPS_K + tl.arange(0, GROUPS_K)[None, :]
    s_v = tl.arange(0, NUM_PARTS)[:, None] * WARP_V + tl.arange(0, WARP_V)[None, :]
    in_k, in_v = s_k < KEY_DIM, s_v < VALUE_DIM
    owns_k = tl.where(writes_key, in_k, False)
    in_state = in_k[:, None, :, None] & in_v[None, :, None, :]
    state_offsets = (
        i_head * (KEY_DIM * VALUE_DIM) + s_k[:, None, :, None] * VALUE_DIM + s_v[None, :, None, :]
    )
    b_state = tl.load(
        recurrent + initial_slot * recurrent_stride + state_offsets,
        mask=tl.where(start > 0, in_state, False),
        other=0.0,
        eviction_policy="evict_first",
    ).to(tl.float32)
    qk_channels = i_key_head * KEY_DIM + s_k  # of the query; the key's are KEY_SIZE further
    v_channels = 2 * KEY_SIZE + i_head * VALUE_DIM + s_v

    wait_for_previous(PDL)  # nothing is written before
    # A state that is passed here is kept with its ring: inputs before it are still there.
    num_done = start - num_right
    for entry in range(num_right + 1):
        if (keep_slot > 0) & (num_done + entry == kept_at):
            tl.store(
                recurrent + keep_slot * recurrent_stride + state_offsets,
                rounded(b_state, recurrent.dtype.element_ty),
                mask=in_state,
            )
            p_kept = conv + keep_slot * conv_stride
            for i in tl.static_range(RING):
                kept_v = tl.load(p_old_ring + i * NUM_CHANNELS + v_channels, mask=in_v)
                tl.store(p_kept + i * NUM_CHANNELS + v_channels, kept_v, mask=in_v)
                for part in tl.static_range(2):
                    channels = i * NUM_CHANNELS + part * KEY_SIZE + qk_channels
                    kept = tl.load(p_old_ring + channels, mask=owns_k)
                    tl.store(p_kept + channels, kept, mask=owns_k)
        if entry < num_right:
            b_k = tl.load(p_keys + entry * ALL_KEYS + s_k, mask=in_k, other=0.0)
            b_v = tl.load(p_values + entry * VALUE_SIZE + s_v, mask=in_v, other=0.0)
            p_gate = p_gates + entry * (2 * NUM_VALUE_HEADS)
            decay = tl.exp(tl.load(p_gate))
            beta = tl.load(p_gate + NUM_VALUE_HEADS)
            b_state = _add_token(b_state, b_k, b_v, decay, beta)
            b_state = rounded(b_state, recurrent.dtype.element_ty).to(tl.float32)

    rate = tl.load(a_log + i_head)
    step_bias = tl.load(dt_bias + i_head)
    b_norm = tl.load(norm_weight + s_v, mask=in_v, other=0.0)
    p_row = mixed + first * mixed_stride
    for token in range(num_tokens):
        b_q = _convolve(
            p_row, mixed_stride, p_old_ring, conv_weight, qk_channels, in_k, start, token,
            conv.dtype.element_ty, NUM_CHANNELS, NUM_TAPS, RING,
        )  # fmt: skip
        b_k = _convolve(
            p_row, mixed_stride, p_old_ring, conv_weight, KEY_SIZE + qk_channels, in_k, start,
            token, conv.dtype.element_ty, NUM_CHANNELS, NUM_TAPS, RING,
        )  # fmt: skip
        b_v = _convolve(
            p_row, mixed_stride, p_old_ring, conv_weight, v_channels, in_v, start, token,
            conv.dtype.element_ty, NUM_CHANNELS, NUM_TAPS, RING,
        )  # fmt: skip
        b_q = b_q * tl.rsqrt(tl.sum(tl.sum(b_q * b_q, axis=1), axis=0) + L2_EPS)
        b_k = b_k * tl.rsqrt(tl.sum(tl.sum(b_k * b_k, axis=1), axis=0) + L2_EPS)
        p_token = p_row + token * mixed_stride
        p_own = p_token + NUM_CHANNELS + i_head
        gate = tl.load(p_token + NUM_CHANNELS + i_head * VALUE_DIM + s_v, mask=in_v, other=0.0).to(
            tl.float32
        )
        beta = tl.sigmoid(tl.load(p_own + VALUE_SIZE).to(tl.float32))
        step = tl.load(p_own + VALUE_SIZE + NUM_VALUE_HEADS).to(tl.float32)
        log_decay = -tl.exp(rate) * softplus(step + step_bias)
        b_state = _add_token(b_state, b_k, b_v, tl.exp(log_decay), beta)
        read = _look_up(b_state, b_q) * KEY_DIM**-0.5
        b_state = rounded(b_state, recurrent.dtype.element_ty).to(tl.float32)
        mean_square = tl.sum(tl.sum(read * read, axis=1), axis=0) / VALUE_DIM
        normed = read * tl.rsqrt(mean_square + eps) * b_norm
        p_out = out + (first + token) * VALUE_SIZE + i_head * VALUE_DIM + s_v
        tl.store(p_out, (normed * silu(gate)).to(out.dtype.element_ty), mask=in_v)
        if token == 0:
            tl.store(
                recurrent + state_slot * recurrent_stride + state_offsets,
                b_state.to(recurrent.dtype.element_ty),
                mask=in_state,
                eviction_policy="evict_first",
            )
        else:
            entry = token - 1
            tl.store(p_keys + entry * ALL_KEYS + s_k, b_k, mask=in_k)
            tl.store(p_values + entry * VALUE_SIZE + s_v, b_v, mask=in_v)
            p_gate = p_gates + entry * (2 * NUM_VALUE_HEADS)
            tl.store(p_gate, log_decay)
            tl.store(p_gate + NUM_VALUE_HEADS, beta)

    # The ring has room for what it read and for what is written now, see the reference.
    if initial_slot != state_slot:
        for i in tl.static_range(NUM_TAPS - 1):
            position = start - 1 - i
            p_from = p_old_ring + (position + RING) % RING * NUM_CHANNELS
            p_to = p_ring + (position + RING) % RING * NUM_CHANNELS
            exists = position >= 0
            old_v = tl.load(p_from + v_channels, mask=tl.where(exists, in_v, False))
            tl.store(p_to + v_channels, old_v, mask=tl.where(exists, in_v, False))
            for part in tl.static_range(2):
                channels = part * KEY_SIZE + qk_channels
                mask = tl.where(exists, owns_k, False)
                tl.store(p_to + channels, tl.load(p_from + channels, mask=mask), mask=mask)
    for token in range(num_tokens):
        p_token = p_row + token * mixed_stride
        p_entry = p_ring + (start + token) % RING * NUM_CHANNELS
        new_v = tl.load(p_token + v_channels, mask=in_v)
        tl.store(p_entry + v_channels, new_v.to(conv.dtype.element_ty), mask=in_v)
        for part in tl.static_range(2):
            channels = part * KEY_SIZE + qk_channels
            new = tl.load(p_token + channels, mask=owns_k)
            tl.store(p_entry + channels, new.to(conv.dtype.element_ty), mask=owns_k)


@triton.jit
def _add_token(b_state, b_k, b_v, decay, beta):
    """Decays the state and replaces the value under a key."""
    s_key = b_k[:, None, :, None]
    b_state = decay * b_state
    correction = beta * (b_v - _look_up(b_state, b_k))
    return b_state + s_key * correction[None, :, None, :]


@triton.jit
def _look_up(b_state, b_key):
    return tl.sum(tl.sum(b_key[:, None, :, None] * b_state, axis=2), axis=0)


@triton.jit
def _convolve(
    p_row,  # the first token of the row in this step
    stride,
    p_ring,
    weight,
    channels,
    mask,
    start,
    token,
    DTYPE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING: tl.constexpr,
):
    """silu of the convolution at a token: inputs of this step, and before them those of the
    ring.
    """
    total = tl.zeros(channels.shape, dtype=tl.float32)
    for i in tl.static_range(NUM_TAPS):
        source = token - (NUM_TAPS - 1 - i)
        position = start + source
        is_new = source >= 0
        b_new = tl.load(
            p_row + source * stride + channels, mask=tl.where(is_new, mask, False), other=0.0
        )
        p_old = p_ring + (position + RING) % RING * NUM_CHANNELS
        is_old = (source < 0) & (position >= 0)
        b_old = tl.load(p_old + channels, mask=tl.where(is_old, mask, False), other=0.0)
        b_tap = tl.load(weight + i * NUM_CHANNELS + channels, mask=mask, other=0.0)
        b_input = tl.where(is_new, b_new.to(DTYPE).to(tl.float32), b_old.to(tl.float32))
        total += b_input * b_tap.to(tl.float32)
    return silu(total)
