# mypy: disable-error-code="no-untyped-def"
"""What a piece of a prompt is to the delta rule before it meets the state: one kernel, all pieces at once.

A piece is up to 64 tokens of one row. A program takes a piece and a value head: it convolves their channels,
brings queries and keys to length one, and solves the unit lower-triangular system that says how a token's
correction depends on those of the tokens before it. It writes nothing but its pages; of the state it reads
only the ring, where the first tokens of a row look behind themselves.

The pages of a piece, in the model's dtype, padded with zeros to 64 tokens and to whole blocks:

    of every key head    queries [64, K] | keys [64, K]
    of every value head  readers [64, K] | values [V, 64] | scores [64, 64]

`values - (readers @ state)^T` are the corrections; `scores` are the products of queries and keys, causal and
decayed between the two tokens. Beside the pages lie the logarithms of the decay since the piece began, in
float32; behind the last token of a short piece they stay as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.reference import delta_net, rows
from penstock.ops.triton.launch import let_next_start, wait_for_previous

L2_EPS = tl.constexpr(delta_net.L2_EPS)
CHUNK = tl.constexpr(rows.CHUNK)
SUBCHUNK = tl.constexpr(16)  # tokens of the system that are solved one by one


def num_page_elements(num_key_heads: int, num_value_heads: int, block_k: int, padded_v: int) -> int:
    """Of one piece."""
    of_values = num_value_heads * (block_k + padded_v + rows.CHUNK)
    return rows.CHUNK * (2 * num_key_heads * block_k + of_values)


@triton.jit
def find_pages(
    prepared,
    i_piece,  # int64
    i_head,  # a value head
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_V: tl.constexpr,
):
    """Where a value head's queries, keys, readers, values and scores begin."""
    KEY_PAGE: tl.constexpr = 2 * CHUNK * BLOCK_K
    VALUE_PAGE: tl.constexpr = CHUNK * (BLOCK_K + PADDED_V + CHUNK)
    HEADS_A_KEY: tl.constexpr = NUM_VALUE_HEADS // NUM_KEY_HEADS
    p_piece = prepared + i_piece * (NUM_KEY_HEADS * KEY_PAGE + NUM_VALUE_HEADS * VALUE_PAGE)
    p_queries = p_piece + i_head // HEADS_A_KEY * KEY_PAGE
    p_readers = p_piece + NUM_KEY_HEADS * KEY_PAGE + i_head * VALUE_PAGE
    p_values = p_readers + CHUNK * BLOCK_K
    return p_queries, p_queries + CHUNK * BLOCK_K, p_readers, p_values, p_values + CHUNK * PADDED_V


@triton.jit(do_not_specialize=["query_start", "context_lens", "initial_slots", "pieces"])
def prepare_kernel(
    mixed,
    conv_weight,
    a_log,
    dt_bias,
    conv,
    query_start,
    context_lens,
    initial_slots,
    pieces,
    prepared,
    log_decays,
    mixed_stride,
    conv_stride,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (h, p): value head h of piece p."""
    let_next_start(PDL)
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = NUM_VALUE_HEADS * VALUE_DIM
    NUM_CHANNELS: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    HEADS_A_KEY: tl.constexpr = NUM_VALUE_HEADS // NUM_KEY_HEADS
    dtype = prepared.dtype.element_ty
    i_head = tl.program_id(0)
    i_piece = tl.program_id(1).to(tl.int64)
    row = tl.load(pieces + i_piece * 4)
    first_token = tl.load(pieces + i_piece * 4 + 1).to(tl.int64)
    num_tokens = tl.load(pieces + i_piece * 4 + 2)
    row_start = tl.load(query_start + row)
    row_tokens = tl.load(query_start + row + 1) - row_start
    num_ahead = (first_token - row_start).to(tl.int32)  # tokens of the row in this step, before the piece
    position = (tl.load(context_lens + row) - row_tokens).to(tl.int32) + num_ahead
    p_ring = conv + tl.load(initial_slots + row).to(tl.int64) * conv_stride
    p_mixed = mixed + first_token * mixed_stride
    wait_for_previous(PDL)

    i_t = tl.arange(0, CHUNK)
    beta, log_decay = _gates(
        p_mixed + NUM_CHANNELS + VALUE_SIZE + i_head, a_log + i_head, dt_bias + i_head, i_t, num_tokens,
        mixed_stride, NUM_VALUE_HEADS,
    )  # fmt: skip
    tl.store(log_decays + (i_piece * NUM_VALUE_HEADS + i_head) * CHUNK + i_t, log_decay)
    i_k = tl.arange(0, BLOCK_K)
    i_v = tl.arange(0, PADDED_V)
    in_k = i_k < KEY_DIM
    channels = i_head // HEADS_A_KEY * KEY_DIM + i_k
    b_q = _convolve(
        p_mixed, p_ring, conv_weight, channels, in_k, num_ahead, position, num_tokens, mixed_stride,
        NUM_CHANNELS, NUM_TAPS, RING,
    )  # fmt: skip
    b_q = (b_q * (tl.rsqrt(tl.sum(b_q * b_q, axis=1) + L2_EPS) * KEY_DIM**-0.5)[:, None]).to(dtype)
    b_k = _convolve(
        p_mixed, p_ring, conv_weight, KEY_SIZE + channels, in_k, num_ahead, position, num_tokens,
        mixed_stride, NUM_CHANNELS, NUM_TAPS, RING,
    )  # fmt: skip
    b_k = (b_k * tl.rsqrt(tl.sum(b_k * b_k, axis=1) + L2_EPS)[:, None]).to(dtype)
    b_v = _convolve(
        p_mixed, p_ring, conv_weight, 2 * KEY_SIZE + i_head * VALUE_DIM + i_v, i_v < VALUE_DIM, num_ahead,
        position, num_tokens, mixed_stride, NUM_CHANNELS, NUM_TAPS, RING,
    ).to(dtype)  # fmt: skip
    p_queries, p_keys, p_readers, p_values, p_scores = find_pages(
        prepared, i_piece, i_head, NUM_KEY_HEADS, NUM_VALUE_HEADS, BLOCK_K, PADDED_V
    )
    key_offsets = i_t[:, None] * BLOCK_K + i_k[None, :]
    if i_head % HEADS_A_KEY == 0:  # value heads of one key head share these: the first of them writes
        tl.store(p_queries + key_offsets, b_q)
        tl.store(p_keys + key_offsets, b_k)

    # Masked before the exponential: the other half would overflow.
    is_causal = i_t[:, None] >= i_t[None, :]
    decay = tl.exp(tl.where(is_causal, log_decay[:, None] - log_decay[None, :], float("-inf")))
    scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * decay
    tl.store(p_scores + i_t[:, None] * CHUNK + i_t[None, :], scores.to(dtype))
    system = tl.dot(b_k, tl.trans(b_k), input_precision="ieee") * decay * beta[:, None]
    inverse = _invert(tl.where(i_t[:, None] > i_t[None, :], system, 0.0), SOLVE_PRECISION)
    # Factors of the tokens go to the inverse: values and keys are then operands as they are.
    inverse *= beta[None, :]
    values = _multiply(inverse, b_v)
    tl.store(p_values + i_v[:, None] * CHUNK + i_t[None, :], tl.trans(values.to(dtype)))
    readers = _multiply(inverse * tl.exp(log_decay)[None, :], b_k)
    tl.store(p_readers + key_offsets, readers.to(dtype))


@triton.jit
def _convolve(
    p_mixed,  # the piece's first token
    p_ring,
    weight,
    channels,
    in_channels,
    num_ahead,
    position,
    num_tokens,
    mixed_stride,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING: tl.constexpr,
):
    """silu of the causal convolution of some channels: [64, channels] float32, zero behind the last token.

    By fours of neighbours: what one loads is an input of the others too. An input has the same value whether
    it comes from the step or from the ring, so a sum has the same bits however a row is cut.
    """
    i_four = tl.arange(0, CHUNK // 4) * 4
    inputs = ()
    for i in tl.static_range(NUM_TAPS + 3):
        i_t = i_four + (i + 1 - NUM_TAPS)
        is_here = (i_t + num_ahead >= 0) & (i_t < num_tokens)
        p_input = p_mixed + i_t.to(tl.int64)[:, None] * mixed_stride + channels[None, :]
        b_input = tl.load(p_input, mask=is_here[:, None] & in_channels[None, :], other=0.0)
        b_input = b_input.to(p_ring.dtype.element_ty)
        if i < NUM_TAPS - 1:  # may lie before the step
            is_past = (i_t + num_ahead < 0) & (i_t + position >= 0)
            entries = tl.maximum(i_t + position, 0) % RING * NUM_CHANNELS
            p_past = p_ring + entries[:, None] + channels[None, :]
            b_past = tl.load(p_past, mask=is_past[:, None] & in_channels[None, :], other=0.0)
            b_input = tl.where(is_past[:, None], b_past, b_input)
        inputs += (b_input,)  # type: ignore[assignment]
    total_0 = tl.zeros([CHUNK // 4, channels.shape[0]], tl.float32)
    total_1, total_2, total_3 = total_0, total_0, total_0
    for i in tl.static_range(NUM_TAPS):
        b_tap = tl.load(weight + i * NUM_CHANNELS + channels, mask=in_channels, other=0.0)
        tap = b_tap.to(tl.float32)[None, :]
        total_0 += inputs[i].to(tl.float32) * tap
        total_1 += inputs[i + 1].to(tl.float32) * tap
        total_2 += inputs[i + 2].to(tl.float32) * tap
        total_3 += inputs[i + 3].to(tl.float32) * tap
    fours = tl.join(tl.join(total_0, total_1), tl.join(total_2, total_3))  # [16, channels, 2, 2]
    total = tl.reshape(tl.permute(fours, (0, 3, 2, 1)), [CHUNK, channels.shape[0]])
    return tl.where((tl.arange(0, CHUNK) < num_tokens)[:, None], silu(total), 0.0)


@triton.jit
def _gates(
    p_beta,  # of the piece's first token
    p_rate,
    p_bias,
    i_t,
    num_tokens,
    mixed_stride,
    NUM_VALUE_HEADS: tl.constexpr,
):
    """beta [64], and the logarithm of the decay since the piece began [64]."""
    is_token = i_t < num_tokens
    p_tokens = p_beta + i_t.to(tl.int64) * mixed_stride
    b = tl.load(p_tokens, mask=is_token, other=0.0).to(tl.float32)
    a = tl.load(p_tokens + NUM_VALUE_HEADS, mask=is_token, other=0.0).to(tl.float32)
    log_decay = -tl.exp(tl.load(p_rate)) * softplus(a + tl.load(p_bias))
    return tl.sigmoid(b), tl.cumsum(tl.where(is_token, log_decay, 0.0), axis=0)


@triton.jit
def _invert(system, PRECISION: tl.constexpr):
    """The inverse of one plus a strictly lower-triangular [64, 64].

    Blocks of 16 on the diagonal, all at once, one column of the system after the other; then twice as large
    blocks from pairs of them: below the diagonal, the inverse is -(lower inverse) link (upper inverse).
    Powers of the system would be fewer steps, but for similar keys they grow beyond what float32 can cancel.
    """
    BLOCKS: tl.constexpr = CHUNK // SUBCHUNK
    i_block = tl.arange(0, BLOCKS)
    on_diagonal = i_block[:, None, None, None] == i_block[None, None, :, None]
    tiles = tl.reshape(system, [BLOCKS, SUBCHUNK, BLOCKS, SUBCHUNK])
    blocks = tl.sum(tl.where(on_diagonal, tiles, 0.0), axis=2)  # [4, 16, 16]
    i = tl.arange(0, SUBCHUNK)
    inverses = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(blocks)
    for j in range(SUBCHUNK - 1):
        column = tl.sum(tl.where(i[None, None, :] == j, blocks, 0.0), axis=2)
        row = tl.sum(tl.where(i[None, :, None] == j, inverses, 0.0), axis=1)
        inverses -= column[:, :, None] * row[:, None, :]
    inverse = tl.reshape(tl.where(on_diagonal, inverses[:, :, None, :], 0.0), [CHUNK, CHUNK])
    i_t = tl.arange(0, CHUNK)
    for level in tl.static_range(2):
        i_pair = i_t // (SUBCHUNK << level)
        is_link = (i_pair[:, None] == i_pair[None, :] + 1) & (i_pair % 2 == 1)[:, None]
        link = tl.where(is_link, system, 0.0)
        step = tl.dot(inverse, link, input_precision=PRECISION)
        inverse -= tl.dot(step, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _multiply(inverse, operand):
    """inverse @ operand. Where many similar tokens follow each other the terms nearly cancel: what the
    inverse loses in a narrow dtype is multiplied too.
    """
    narrow = inverse.to(operand.dtype)
    total = tl.dot(narrow, operand, input_precision="ieee")
    if operand.dtype != tl.float32:
        total = tl.dot((inverse - narrow.to(tl.float32)).to(operand.dtype), operand, total)
    return total


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + exp(x)). A sum with one drops what the logarithm would have kept; the quotient puts it back."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    kept = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    return tl.maximum(x, 0.0) + tl.where(rounded == 1.0, small, tl.log(rounded) * (small / kept))
