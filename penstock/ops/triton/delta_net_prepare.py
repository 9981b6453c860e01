# mypy: disable-error-code="no-untyped-def"
"""The state-independent part of the delta rule: one kernel prepares all blocks of a step at once.

A block is up to 64 tokens of one row. A program takes a block and a value head: it solves the unit
lower-triangular system by which a token's correction depends on those of the tokens before it.
It reads the output of the convolution, knows no state, and writes only its scratch.

The scratch of a block, in the model's dtype, padded with zeros to 64 tokens and to whole blocks:

    for every value head  w [64, K] | u [V, 64] | attn [64, 64]

w and u are the WY representation: `u - (w @ state)^T` are the corrections. attn is q k^T, causal
and decayed between the two tokens. The log decay since the start of the block is stored beside
them, in float32, and stays constant after the last token of a short block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.reference import rows
from penstock.ops.triton.activation import softplus
from penstock.ops.triton.launch import let_next_start, wait_for_previous

BLOCK_TOKENS = tl.constexpr(rows.BLOCK_TOKENS)
SUBBLOCK = tl.constexpr(8)  # tokens of the system solved sequentially
NUM_LEVELS = tl.constexpr(
    (rows.BLOCK_TOKENS // SUBBLOCK.value).bit_length() - 1
)  # from these blocks to all tokens


def num_scratch_elements(block_k: int, padded_v: int) -> int:
    """Elements of one value head of a block."""
    return rows.BLOCK_TOKENS * (block_k + padded_v + rows.BLOCK_TOKENS)


@triton.jit
def scratch_of(
    prepared,
    i_block,  # int64
    i_head,  # a value head
    NUM_VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_V: tl.constexpr,
):
    """Pointers to a value head's w, u and attn."""
    SCRATCH: tl.constexpr = BLOCK_TOKENS * (BLOCK_K + PADDED_V + BLOCK_TOKENS)
    p_w = prepared + (i_block * NUM_VALUE_HEADS + i_head) * SCRATCH
    p_u = p_w + BLOCK_TOKENS * BLOCK_K
    return p_w, p_u, p_u + BLOCK_TOKENS * PADDED_V


@triton.jit(do_not_specialize=["blocks"])
def prepare_kernel(
    mixed,
    convolved,
    a_log,
    dt_bias,
    blocks,
    prepared,
    log_decays,
    mixed_stride,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (h, p): value head h of block p."""
    let_next_start(PDL)
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = NUM_VALUE_HEADS * VALUE_DIM
    NUM_CHANNELS: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    HEADS_A_KEY: tl.constexpr = NUM_VALUE_HEADS // NUM_KEY_HEADS
    dtype = prepared.dtype.element_ty
    i_head = tl.program_id(0)
    i_block = tl.program_id(1).to(tl.int64)
    first_token = tl.load(blocks + i_block * 4 + 1).to(tl.int64)
    num_tokens = tl.load(blocks + i_block * 4 + 2)
    i_t = tl.arange(0, BLOCK_TOKENS)
    p_tokens = convolved + i_block * (BLOCK_TOKENS * NUM_CHANNELS) + i_t[:, None] * NUM_CHANNELS
    p_queries = p_tokens + i_head // HEADS_A_KEY * KEY_DIM
    p_w, p_u, p_attn = scratch_of(prepared, i_block, i_head, NUM_VALUE_HEADS, BLOCK_K, PADDED_V)
    wait_for_previous(PDL)
    if num_tokens == 0:  # a padding block, which nothing reads
        return

    queries = _load_parts(p_queries, KEY_DIM, BLOCK_K)
    keys = _load_parts(p_queries + KEY_SIZE, KEY_DIM, BLOCK_K)
    values = _load_parts(p_tokens + 2 * KEY_SIZE + i_head * VALUE_DIM, VALUE_DIM, PADDED_V)
    beta, log_decay = _gates(
        mixed + first_token * mixed_stride + NUM_CHANNELS + VALUE_SIZE + i_head, a_log + i_head,
        dt_bias + i_head, i_t, num_tokens, mixed_stride, NUM_VALUE_HEADS,
    )  # fmt: skip
    tl.store(log_decays + (i_block * NUM_VALUE_HEADS + i_head) * BLOCK_TOKENS + i_t, log_decay)
    attn = tl.zeros([BLOCK_TOKENS, BLOCK_TOKENS], tl.float32)
    system = tl.zeros([BLOCK_TOKENS, BLOCK_TOKENS], tl.float32)
    for i in tl.static_range(len(keys)):
        attn = tl.dot(queries[i], tl.trans(keys[i]), attn, input_precision="ieee")
        system = tl.dot(keys[i], tl.trans(keys[i]), system, input_precision="ieee")
    # Masked before the exponential: the upper triangle would overflow.
    is_causal = i_t[:, None] >= i_t[None, :]
    decay = tl.exp(tl.where(is_causal, log_decay[:, None] - log_decay[None, :], float("-inf")))
    tl.store(p_attn + i_t[:, None] * BLOCK_TOKENS + i_t[None, :], (attn * decay).to(dtype))
    system = tl.where(i_t[:, None] > i_t[None, :], system * decay * beta[:, None], 0.0)
    # Token factors go into the inverse, so values and keys are operands without scaling. For
    # similar consecutive tokens the terms nearly cancel, so the rounding error of the inverse is
    # multiplied too.
    inverse = _invert(system, dtype) * beta[None, :]
    high, low = _split(inverse, dtype)
    for i in tl.static_range(len(values)):
        i_v = i * values[i].shape[1] + tl.arange(0, values[i].shape[1])
        b_u = tl.dot(tl.trans(values[i]), tl.trans(high), input_precision="ieee")
        if dtype != tl.float32:
            b_u = tl.dot(tl.trans(values[i]), tl.trans(low), b_u)
        tl.store(p_u + i_v[:, None] * BLOCK_TOKENS + i_t[None, :], b_u.to(dtype))
    high, low = _split(inverse * tl.exp(log_decay)[None, :], dtype)
    for i in tl.static_range(len(keys)):
        i_k = i * keys[i].shape[1] + tl.arange(0, keys[i].shape[1])
        b_w = tl.dot(high, keys[i], input_precision="ieee")
        if dtype != tl.float32:
            b_w = tl.dot(low, keys[i], b_w)
        tl.store(p_w + i_t[:, None] * BLOCK_K + i_k[None, :], b_w.to(dtype))


@triton.jit
def _load_parts(p_tokens, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """Channels of all tokens as tiles of at most 64, so that a tile to be reduced fits in
    registers.
    """
    PART: tl.constexpr = min(PADDED_WIDTH, 64)
    parts = ()
    for i in tl.static_range(PADDED_WIDTH // PART):
        i_c = i * PART + tl.arange(0, PART)[None, :]
        parts += (tl.load(p_tokens + i_c, mask=i_c < WIDTH, other=0.0),)  # type: ignore[assignment]
    return parts


@triton.jit
def _gates(
    p_beta,  # of the block's first token
    p_rate,
    p_bias,
    i_t,
    num_tokens,
    mixed_stride,
    NUM_VALUE_HEADS: tl.constexpr,
):
    """beta [64], and the log decay since the start of the block [64]."""
    is_token = i_t < num_tokens
    p_tokens = p_beta + i_t.to(tl.int64) * mixed_stride
    b = tl.load(p_tokens, mask=is_token, other=0.0).to(tl.float32)
    a = tl.load(p_tokens + NUM_VALUE_HEADS, mask=is_token, other=0.0).to(tl.float32)
    log_decay = -tl.exp(tl.load(p_rate)) * softplus(a + tl.load(p_bias))
    # beta passes through the scan unchanged: the compiler then reuses it, instead of loading and
    # computing it again for every column of a thread.
    parts = (tl.where(is_token, log_decay, 0.0), tl.sigmoid(b))
    log_decay, beta = tl.associative_scan(parts, 0, _add_first)
    return beta, log_decay


@triton.jit
def _add_first(a, b, c, d):
    return a + c, d


@triton.jit
def _invert(system, dtype):
    """The inverse of one plus a strictly lower-triangular [64, 64].

    Blocks of 8 on the diagonal, all at once, one column of the system after the other; then pairs
    are merged into blocks of twice the size: below the diagonal, the inverse is -(lower inverse)
    link (upper inverse). Powers of the system would take fewer steps, but for similar keys they
    grow beyond what float32 can cancel.
    """
    BLOCKS: tl.constexpr = BLOCK_TOKENS // SUBBLOCK
    i_block = tl.arange(0, BLOCKS)
    on_diagonal = i_block[:, None, None, None] == i_block[None, None, :, None]
    tiles = tl.reshape(system, [BLOCKS, SUBBLOCK, BLOCKS, SUBBLOCK])
    blocks = tl.sum(tl.where(on_diagonal, tiles, 0.0), axis=2)  # [8, 8, 8]
    i = tl.arange(0, SUBBLOCK)
    inverses = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(blocks)
    for j in range(SUBBLOCK - 1):
        column = tl.sum(tl.where(i[None, None, :] == j, blocks, 0.0), axis=2)
        row = tl.sum(tl.where(i[None, :, None] == j, inverses, 0.0), axis=1)
        inverses -= column[:, :, None] * row[:, None, :]
    inverse = tl.reshape(
        tl.where(on_diagonal, inverses[:, :, None, :], 0.0), [BLOCK_TOKENS, BLOCK_TOKENS]
    )
    i_t = tl.arange(0, BLOCK_TOKENS)
    links = system.to(dtype)
    for level in tl.static_range(NUM_LEVELS):
        i_pair = i_t // (SUBBLOCK << level)
        is_link = (i_pair[:, None] == i_pair[None, :] + 1) & (i_pair % 2 == 1)[:, None]
        # Blocks do not mix in the product: everything that is not a link can be dropped after it.
        # Links and steps are rounded, which has one effect only; the inverse, which passes through
        # all levels, is not.
        high, low = _split(inverse, dtype)
        step = tl.where(is_link, tl.dot(high, links, input_precision="ieee"), 0.0).to(dtype)
        inverse -= tl.dot(step, high, input_precision="ieee")
        if dtype != tl.float32:
            inverse -= tl.dot(step, low)
    return inverse


@triton.jit
def _split(x, dtype):
    """x in a narrow dtype, and its rounding error in the same dtype."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)
