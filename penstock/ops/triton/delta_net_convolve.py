# mypy: disable-error-code="no-untyped-def"
"""The causal convolution of prefills: convolves the channels of every token, all blocks at once.

A program takes a block, up to 64 tokens of one row, and the channels of one head: of a query or a
key, which it normalizes to length one, or of a value. It writes them to the block's own 64 rows,
[64, channels], and zeros after the last token, so that readers need to know neither tokens nor
rows. It knows nothing of the delta rule. Of the state it reads only the ring, for the inputs before
a row's first tokens; it does not write it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.reference import delta_net, rows
from penstock.ops.triton.activation import silu
from penstock.ops.triton.launch import let_next_start, wait_for_previous

L2_EPS = tl.constexpr(delta_net.L2_EPS)
BLOCK_TOKENS = tl.constexpr(rows.BLOCK_TOKENS)


@triton.jit(do_not_specialize=["query_start", "context_lens", "initial_slots", "blocks"])
def convolve_kernel(
    mixed,
    conv_weight,
    conv,
    query_start,
    context_lens,
    initial_slots,
    blocks,
    convolved,
    mixed_stride,
    conv_stride,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RUN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (h, p): head h of the queries, then of the keys, then of the values, for the tokens
    of block p.

    Processes runs of adjacent tokens, which share their inputs. An input has the same value whether
    it comes from the step or from the ring, so a sum has the same bits however a row is split.
    """
    let_next_start(PDL)
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    NUM_CHANNELS: tl.constexpr = 2 * KEY_SIZE + NUM_VALUE_HEADS * VALUE_DIM
    i_head = tl.program_id(0)
    i_block = tl.program_id(1)
    is_key = i_head < 2 * NUM_KEY_HEADS
    i_value = i_head - 2 * NUM_KEY_HEADS
    i_c = tl.arange(0, BLOCK_C)
    in_head = i_c < tl.where(is_key, KEY_DIM, VALUE_DIM)
    channels = tl.where(is_key, i_head * KEY_DIM, 2 * KEY_SIZE + i_value * VALUE_DIM) + i_c
    taps = ()
    for i in tl.static_range(NUM_TAPS):
        b_tap = tl.load(conv_weight + i * NUM_CHANNELS + channels, mask=in_head, other=0.0)
        taps += (b_tap.to(tl.float32)[None, :],)  # type: ignore[assignment]
    row = tl.load(blocks + i_block * 4)
    first_token = tl.load(blocks + i_block * 4 + 1).to(tl.int64)
    num_tokens = tl.load(blocks + i_block * 4 + 2)
    row_start = tl.load(query_start + row)
    num_ahead = (first_token - row_start).to(
        tl.int32
    )  # tokens of the row in this step, before the block
    row_tokens = tl.load(query_start + row + 1) - row_start
    position = (tl.load(context_lens + row) - row_tokens).to(tl.int32) + num_ahead
    p_ring = conv + tl.load(initial_slots + row).to(tl.int64) * conv_stride + channels[None, :]
    i_run = tl.arange(0, BLOCK_TOKENS // RUN) * RUN
    p_mixed = mixed + first_token * mixed_stride + i_run[:, None] * mixed_stride + channels[None, :]
    p_convolved = convolved + i_block.to(tl.int64) * (BLOCK_TOKENS * NUM_CHANNELS)
    p_convolved += i_run[:, None] * NUM_CHANNELS + channels[None, :]
    wait_for_previous(PDL)
    if num_tokens == 0:  # a padding block, which nothing reads
        return

    # No branch, which would wait for a load before the next ones are issued. Nearly all programs
    # load nothing from the ring, so what waits for that does not wait either.
    inputs = ()
    for step in tl.static_range(1 - NUM_TAPS, RUN):
        i_t = i_run + step
        is_token, b_past = i_t < num_tokens, 0.0
        if step < 0:
            is_past = (i_t + num_ahead < 0) & (i_t + position >= 0)
            p_past = p_ring + (tl.maximum(i_t + position, 0) % RING * NUM_CHANNELS)[:, None]
            b_past = tl.load(p_past, mask=is_past[:, None] & in_head[None, :], other=0.0)
            b_past = b_past.to(mixed.dtype.element_ty)
            is_token = is_token & (i_t + num_ahead >= 0)
        mask = is_token[:, None] & in_head[None, :]
        b_input = tl.load(p_mixed + step * mixed_stride, mask=mask, other=b_past)
        inputs += (b_input.to(conv.dtype.element_ty),)  # type: ignore[assignment]
    for i in tl.static_range(RUN):
        total = tl.zeros([BLOCK_TOKENS // RUN, BLOCK_C], tl.float32)
        for j in tl.static_range(NUM_TAPS):
            total += inputs[i + j].to(tl.float32) * taps[j]
        total = silu(total)
        if is_key:
            scale = tl.rsqrt(tl.sum(total * total, axis=1) + L2_EPS)
            scale *= tl.where(i_head < NUM_KEY_HEADS, KEY_DIM**-0.5, 1.0)
            total *= scale[:, None]
        total = tl.where((i_run + i < num_tokens)[:, None], total, 0.0)
        p_token = p_convolved + i * NUM_CHANNELS
        tl.store(p_token, total.to(convolved.dtype.element_ty), mask=in_head[None, :])
