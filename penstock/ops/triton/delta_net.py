# mypy: disable-error-code="no-untyped-def"
"""The Gated DeltaNet mixer on a GPU: the kernel for rows of one token. `delta_net_blocks` has the
others.

A program computes one value head of one row with its whole state [K, V], 64 KB in registers for K =
V = 128: it is read once and written once, nearly all of the traffic. Each warp has its own columns,
so warps synchronize only for the norm at the end. With a backlog (`reference/backlog.py`) the state
is written at every fourth position only, at others what the token adds: a token reads the state as
it is stored and the backlog, and adds both reads. The program prefetches the state and the ring
before the preceding projection is complete, since no other kernel of a step writes them; the rows'
slots and lengths, which determine their addresses, must be written before a step's first layer is
launched.

A row's bits depend only on the tile, never on what else is in the step. A single token always uses
the recurrence here, even where the deterministic reference would start a block with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.cuda import delta_net_drafts as few_drafts
from penstock.ops.float8 import RoundedTokens
from penstock.ops.reference import delta_net as reference
from penstock.ops.reference.backlog import Backlog
from penstock.ops.reference.journal import Journal, Replay
from penstock.ops.reference.rows import Span, TokenBlocks, are_in_blocks, decode_runs
from penstock.ops.tiles import STEP
from penstock.ops.triton import delta_net_blocks, delta_net_drafts, fp8
from penstock.ops.triton.activation import silu, softplus
from penstock.ops.triton.delta_net_backlog import (
    add_backlog,
    backlog_of,
    end_backlog,
    entry_of,
    late_tokens,
    most_late,
)
from penstock.ops.triton.delta_net_blocks import rounded
from penstock.ops.triton.delta_net_sums import add_pairs, add_triples, multiply
from penstock.ops.triton.launch import (
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.tuning import Tile, choose
from penstock.ops.weight import Weight

L2_EPS = tl.constexpr(reference.L2_EPS)
STATE_REGISTERS = 128  # per thread, for the state
MAX_REGISTERS = 255  # per thread
FEW_ROWS = 4  # with drafts


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
    weights = (conv_weight, a_log, dt_bias, norm_weight, eps, conv, recurrent)
    out = mixed.new_empty(len(mixed), a_log.shape[0] * norm_weight.shape[0])
    rounded_out = None
    if not deterministic and norm_weight.shape[0] == STEP and are_in_blocks(spans):
        rounded_out = fp8.rounded_for(reader, out)
    for rows, tokens in decode_runs(spans):
        if journal is not None and replay is not None:
            given = (
                out,
                mixed,
                *weights,
                query_start[rows.start : rows.stop + 1],
                context_lens[rows],
                state_slots[rows],
                initial_slots[rows],
                num_key_heads,
                journal,
                replay.part(rows),
                backlog,
            )
            num_rows, width = rows.stop - rows.start, max(span.num_tokens for span in spans[rows])
            shapes = (mixed, conv_weight, conv, recurrent, journal.keys.shape[1])
            if not deterministic and few_drafts.can_decode(num_rows, width, *shapes):
                few_drafts.decode_with_drafts(*given, width)
            else:
                tile = _drafts_rule(num_rows, recurrent, deterministic)
                delta_net_drafts.decode_with_drafts(*given, tile)
            continue
        places = (context_lens[rows], state_slots[rows], initial_slots[rows])
        _decode(
            out[tokens], mixed[tokens], *weights, *places, backlog, num_key_heads, deterministic
        )
    delta_net_blocks.mix_blocks(
        out,
        mixed,
        *weights,
        query_start,
        context_lens,
        state_slots,
        initial_slots,
        blocks,
        num_key_heads,
        backlog,
        rounded_out,
        num_tokens=len(mixed),
        deterministic=deterministic,
    )
    return out if rounded_out is None else rounded_out


def _decode(
    out: Tensor,  # [R, Hv * V]
    mixed: Tensor,  # [R, C + Hv * V + 2 * Hv]
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv: Tensor,
    recurrent: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
    initial_slots: Tensor,
    backlog: Backlog | None,
    num_key_heads: int,
    deterministic: bool,
) -> None:
    """One token of every row, in one launch."""
    num_rows, (_, num_value_heads, key_dim, value_dim) = len(mixed), recurrent.shape
    tile = _choose_tile(recurrent, num_rows, deterministic)
    _decode_kernel[num_value_heads, num_rows](
        mixed,
        conv_weight,
        a_log,
        dt_bias,
        norm_weight,
        conv,
        recurrent,
        context_lens,
        state_slots,
        initial_slots,
        *backlog_of(backlog, recurrent),
        out,
        eps,
        mixed.stride(0),
        conv.stride(0),
        recurrent.stride(0),
        MOST_LATE=most_late(backlog),
        BLOCK_LATE=next_power_of_2(max(most_late(backlog), 1)),
        NUM_KEY_HEADS=num_key_heads,
        NUM_VALUE_HEADS=num_value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        NUM_TAPS=conv_weight.shape[0],
        RING=conv.shape[1],
        BLOCK_RING=next_power_of_2(conv.shape[1]),
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=next_power_of_2(value_dim),
        **tile,
        **launch_options(mixed.device),
    )


def _choose_tile(recurrent: Tensor, num_rows: int, deterministic: bool) -> Tile:
    """Another number of warps sums in another order: in deterministic mode it must not depend on
    what else is in the step.
    """
    _, num_value_heads, key_dim, value_dim = recurrent.shape
    shape, tile_rows = (num_value_heads, key_dim, value_dim), 1 if deterministic else num_rows
    rule = _rule(key_dim, value_dim)
    return choose("gated_delta_net", shape, tile_rows, rule, recurrent.device)


def _rule(key_dim: int, value_dim: int) -> Tile:
    """As many warps as give every thread its share of the state: the best on an H200 from 1 row to
    64.
    """
    elements = next_power_of_2(key_dim) * next_power_of_2(value_dim)
    return _tile(value_dim, max(1, min(elements // (32 * STATE_REGISTERS), 16)), MAX_REGISTERS)


def _drafts_rule(num_rows: int, recurrent: Tensor, deterministic: bool) -> Tile:
    """In deterministic mode that of a row without drafts. A few rows leave SMs idle: there twice
    the warps, with half of the state each, are faster.
    """
    key_dim, value_dim = recurrent.shape[2:]
    rule = _rule(key_dim, value_dim)
    if deterministic or num_rows > FEW_ROWS:
        return rule
    return _tile(value_dim, min(16, 2 * rule["num_warps"]), MAX_REGISTERS)


def _tile(value_dim: int, num_warps: int, registers: int) -> Tile:
    num_columns = max(next_power_of_2(value_dim) // num_warps, 4)
    return {"WARP_V": num_columns, "num_warps": num_warps, "num_stages": 1, "maxnreg": registers}


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """The tiles that `penstock tune` tries: more warps, and fewer registers for more programs per
    SM.
    """
    if kernel != "gated_delta_net":
        return delta_net_blocks.candidates(kernel, shape, num_tokens)
    _, key_dim, value_dim = shape
    num_warps = _rule(key_dim, value_dim)["num_warps"]
    sizes = ((num_warps, 255), (num_warps, 168), (2 * num_warps, 255), (2 * num_warps, 128))
    return [_tile(value_dim, warps, registers) for warps, registers in sizes if warps <= 16]


# Rows are slices of a step's tensors: another alignment must not require another kernel.
@triton.jit(do_not_specialize=["context_lens", "state_slots", "initial_slots"])
def _decode_kernel(
    mixed,
    conv_weight,
    a_log,
    dt_bias,
    norm_weight,
    conv,
    recurrent,
    context_lens,
    state_slots,
    initial_slots,
    late_counts,  # [slots, Hv]
    late_keys,  # [slots, MOST_LATE, Hv, K]
    late_corrections,  # [slots, MOST_LATE, Hv, V]
    late_decays,  # [slots, MOST_LATE, Hv]
    out,
    eps,
    mixed_stride,
    conv_stride,
    recurrent_stride,
    MOST_LATE: tl.constexpr,  # tokens that a state may lack
    BLOCK_LATE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_RING: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WARP_V: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = NUM_VALUE_HEADS * VALUE_DIM
    NUM_CHANNELS: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    HEADS_A_KEY: tl.constexpr = NUM_VALUE_HEADS // NUM_KEY_HEADS
    i_head = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    position = tl.load(context_lens + i_row).to(tl.int64) - 1
    state_slot = tl.load(state_slots + i_row).to(tl.int64)
    initial_slot = tl.load(initial_slots + i_row).to(tl.int64)
    p_old_ring = conv + initial_slot * conv_stride
    p_ring = conv + state_slot * conv_stride

    # Channels of the convolution, as one vector for query and key, and one for the value.
    i_qk = tl.arange(0, 2 * BLOCK_K)
    i_v = tl.arange(0, BLOCK_V)
    in_qk, in_v = i_qk % BLOCK_K < KEY_DIM, i_v < VALUE_DIM
    qk_channels = i_qk // BLOCK_K * KEY_SIZE + i_head // HEADS_A_KEY * KEY_DIM + i_qk % BLOCK_K
    v_channels = 2 * KEY_SIZE + i_head * VALUE_DIM + i_v
    qk_past = _convolve_past(
        p_old_ring, conv_weight, qk_channels, in_qk, position, NUM_CHANNELS, NUM_TAPS, RING
    )
    v_past = _convolve_past(
        p_old_ring, conv_weight, v_channels, in_v, position, NUM_CHANNELS, NUM_TAPS, RING
    )
    p_newest_tap = conv_weight + (NUM_TAPS - 1) * NUM_CHANNELS
    qk_tap = tl.load(p_newest_tap + qk_channels, mask=in_qk, other=0.0).to(tl.float32)
    v_tap = tl.load(p_newest_tap + v_channels, mask=in_v, other=0.0).to(tl.float32)
    rate = tl.load(a_log + i_head)
    step_bias = tl.load(dt_bias + i_head)
    b_norm = tl.load(norm_weight + i_v, mask=in_v, other=0.0)
    # The state as [LANES_K, V / WARP_V, K / LANES_K, WARP_V]: the compiler gives a thread 16 bytes
    # of columns and every warp its own WARP_V, so a sum over the keys stays within a warp.
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
        mask=tl.where(position > 0, in_state, False),
        other=0.0,
        eviction_policy="evict_first",
    ).to(tl.float32)
    if MOST_LATE > 0:
        num_late = late_tokens(late_counts, initial_slot, i_head, position, NUM_VALUE_HEADS)
        i_late, i_k = tl.arange(0, BLOCK_LATE), tl.arange(0, BLOCK_K)
        is_late = i_late < num_late
        entries = entry_of(initial_slot, i_late, i_head, NUM_VALUE_HEADS, MOST_LATE)
        b_late_keys = tl.load(
            late_keys + entries[:, None] * KEY_DIM + i_k[None, :],
            mask=is_late[:, None] & (i_k < KEY_DIM)[None, :],
            other=0.0,
        )
        b_late_corrections = tl.load(
            late_corrections + entries[:, None, None] * VALUE_DIM + s_v[None, :, :],
            mask=is_late[:, None, None] & (s_v < VALUE_DIM)[None, :, :],
            other=0.0,
        )
        b_late_decays = tl.load(late_decays + entries, mask=is_late, other=1.0)
        # Every token after one decays what that added; all of them decay the stored state.
        is_after = i_late[None, :] > i_late[:, None]
        lasting = tl.reduce(tl.where(is_after, b_late_decays[None, :], 1.0), 1, multiply)
        all_decays = tl.reduce(b_late_decays, 0, multiply)

    wait_for_previous(PDL)
    p_mixed = mixed + i_row * mixed_stride
    qk_input = tl.load(p_mixed + qk_channels, mask=in_qk, other=0.0).to(conv.dtype.element_ty)
    v_input = tl.load(p_mixed + v_channels, mask=in_v, other=0.0).to(conv.dtype.element_ty)
    p_gates = p_mixed + NUM_CHANNELS
    gate = tl.load(p_gates + i_head * VALUE_DIM + i_v, mask=in_v, other=0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(p_gates + VALUE_SIZE + i_head).to(tl.float32))
    step = tl.load(p_gates + VALUE_SIZE + NUM_VALUE_HEADS + i_head).to(tl.float32)
    decay = tl.exp(-tl.exp(rate) * softplus(step + step_bias))

    # Query and key are one vector up to here: no smaller than the program, so that each element is
    # loaded only once.
    b_qk = tl.reshape(silu(qk_past + qk_tap * qk_input.to(tl.float32)), (2, BLOCK_K))
    b_v = silu(v_past + v_tap * v_input.to(tl.float32))
    b_q, b_k = tl.split(tl.permute(b_qk, (1, 0)))
    s_q = tl.reshape(b_q, (LANES_K, GROUPS_K))[:, None, :, None]
    s_key = tl.reshape(b_k, (LANES_K, GROUPS_K))[:, None, :, None]
    # One pass over the old state computes all reads: with S' = decay S + k c, q S' = decay q S + (q
    # k) c. Norms are computed meanwhile and divided out afterwards, so that no sum waits for
    # another.
    q_part, k_part = tl.reduce((s_q * b_state, s_key * b_state), 2, add_pairs)
    q_held, k_held = tl.reduce((q_part, k_part), 0, add_pairs)
    q_square, k_square, q_k = tl.reduce((b_q * b_q, b_k * b_k, b_q * b_k), 0, add_triples)
    q_scale = tl.rsqrt(q_square + L2_EPS) * KEY_DIM**-0.5
    k_scale = tl.rsqrt(k_square + L2_EPS)
    if MOST_LATE > 0:
        products = (b_late_keys * b_q[None, :], b_late_keys * b_k[None, :])
        q_late, k_late = tl.reduce(products, 1, add_pairs)
        q_added = (lasting * q_late)[:, None, None] * b_late_corrections
        k_added = (lasting * k_late)[:, None, None] * b_late_corrections
        q_added, k_added = tl.reduce((q_added, k_added), 0, add_pairs)
        q_held, k_held = all_decays * q_held + q_added, all_decays * k_held + k_added

    b_v = tl.reshape(b_v, (NUM_PARTS, WARP_V))
    gate = tl.reshape(gate, (NUM_PARTS, WARP_V))
    b_norm = tl.reshape(b_norm, (NUM_PARTS, WARP_V))
    correction = beta * (b_v - decay * k_scale * k_held)
    read = q_scale * (decay * q_held + k_scale * q_k * correction)
    writes_state = position >= 0  # always
    if MOST_LATE > 0:
        # By position: a row's bits do not depend on its slot, and pages end with whole states.
        is_turn = position % (MOST_LATE + 1) == MOST_LATE
        has_moved = (state_slot != initial_slot) | (position == 0)
        writes_state = is_turn | has_moved | (num_late == MOST_LATE)
        if not writes_state:
            entry = entry_of(state_slot, num_late, i_head, NUM_VALUE_HEADS, MOST_LATE)
            p_key = late_keys + entry * KEY_DIM + tl.arange(0, BLOCK_K)
            tl.store(p_key, k_scale * b_k, mask=tl.arange(0, BLOCK_K) < KEY_DIM)
            p_correction = late_corrections + entry * VALUE_DIM + s_v
            tl.store(p_correction, correction, mask=s_v < VALUE_DIM)
            tl.store(late_decays + entry, decay)
            tl.store(late_counts + state_slot * NUM_VALUE_HEADS + i_head, num_late + 1)
    if writes_state:
        if MOST_LATE > 0:
            b_state = add_backlog(
                b_state, late_keys, late_corrections, late_decays, initial_slot, num_late, i_head,
                s_k, s_v, NUM_VALUE_HEADS, MOST_LATE, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
        b_state = decay * b_state + (k_scale * s_key) * correction[None, :, None, :]
        tl.store(
            recurrent + state_slot * recurrent_stride + state_offsets,
            rounded(b_state, recurrent.dtype.element_ty),
            mask=in_state,
            eviction_policy="evict_first",
        )
        end_backlog(late_counts, state_slot, i_head, NUM_VALUE_HEADS, MOST_LATE)
    mean_square = tl.sum(tl.sum(read * read, axis=1), axis=0) / VALUE_DIM
    normed = read * tl.rsqrt(mean_square + eps) * b_norm
    p_out = out + i_row * VALUE_SIZE + i_head * VALUE_DIM + s_v
    tl.store(p_out, (normed * silu(gate)).to(out.dtype.element_ty), mask=s_v < VALUE_DIM)

    # Value heads of one key head share its channels: the first of them writes.
    writes_qk = tl.where(i_head % HEADS_A_KEY == 0, in_qk, False)
    p_entry = p_ring + position % RING * NUM_CHANNELS
    tl.store(p_entry + qk_channels, qk_input, mask=writes_qk)
    tl.store(p_entry + v_channels, v_input, mask=in_v)
    if initial_slot != state_slot:
        _copy_past(
            p_ring, p_old_ring, qk_channels, writes_qk, position, NUM_CHANNELS, RING, BLOCK_RING
        )
        _copy_past(p_ring, p_old_ring, v_channels, in_v, position, NUM_CHANNELS, RING, BLOCK_RING)


@triton.jit
def _convolve_past(
    p_ring,
    weight,
    channels,
    mask,
    position,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING: tl.constexpr,
):
    """The contribution of inputs before `position` to its convolution; there are none before 0."""
    total = tl.zeros(channels.shape, dtype=tl.float32)
    for i in tl.static_range(NUM_TAPS - 1):
        age = NUM_TAPS - 1 - i
        offsets = (position + RING - age) % RING * NUM_CHANNELS + channels
        b_input = tl.load(p_ring + offsets, mask=tl.where(age <= position, mask, False), other=0.0)
        b_tap = tl.load(weight + i * NUM_CHANNELS + channels, mask=mask, other=0.0)
        total += b_input.to(tl.float32) * b_tap.to(tl.float32)
    return total


@triton.jit
def _copy_past(
    p_ring,
    p_old_ring,
    channels,
    mask,
    position,
    NUM_CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_RING: tl.constexpr,
):
    """Copies the inputs before `position`, as far as the ring reaches, from another ring."""
    i_entry = tl.arange(0, BLOCK_RING)[:, None]
    age = (position % RING + RING - i_entry) % RING
    is_past = mask & (i_entry < RING) & (age > 0) & (age <= position)
    offsets = i_entry * NUM_CHANNELS + channels
    tl.store(p_ring + offsets, tl.load(p_old_ring + offsets, mask=is_past), mask=is_past)
