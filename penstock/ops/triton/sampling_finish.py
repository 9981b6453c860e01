# mypy: disable-error-code="no-untyped-def"
"""The last kernel of a filtered draw: decides the listed tokens exactly, and merges what the chunks
drew.

One program a row. A list is short, so its tokens are ranked by comparing each with every other. A
row whose end lies among more tokens than a list holds (a large vocabulary of equal logits, say) is
searched by halving instead: as exact, and slow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.triton.gumbel import (
    HIGHEST,
    LOWEST,
    noise_key_of,
    order_of,
    perturbed,
    token_of,
    value_of,
)
from penstock.ops.triton.launch import let_next_start, wait_for_previous
from penstock.ops.triton.sampling_levels import (
    DRAWN,
    FLOOR,
    LAST,
    MASS_ABOVE,
    MASS_BETWEEN,
    MAX_LISTED,
    NUM_ABOVE,
    NUM_BETWEEN,
    NUM_LISTED,
    PEAK,
    PLAN_SIZE,
    SETTINGS,
    SHIFT,
    START,
    TOTAL,
    UNBOUNDED,
    filters_of,
    is_cut_short,
    left,
    level_of,
    load_logits,
    mass_limit,
    mass_of,
    share_of,
)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def finish_kernel(
    p_logits,  # [L, vocab]
    vocab,
    logits_stride,
    p_temperature,  # [L]
    p_top_k,  # [L]
    p_top_p,  # [L]
    p_min_p,  # [L]
    p_seeds,  # [L]
    p_positions,  # [L]
    p_parts,  # [L, NUM_PARTS, chunks]
    p_scale,  # [L, 2]
    p_plan,  # [L, PLAN_SIZE]
    p_listed,  # [L, MAX_LISTED]
    p_token_ids,  # [L]
    num_chunks,
    MAX_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = filters_of(i_row, vocab, p_temperature, p_top_k, p_top_p)
    highest = tl.max(left(p_parts, i_row, PEAK, num_chunks, LOWEST, MAX_CHUNKS), axis=0)
    drawn = highest
    if temperature > 0:
        drawn = tl.max(left(p_parts, i_row, DRAWN, num_chunks, LOWEST, MAX_CHUNKS), axis=0)
    if is_cut_short(temperature, top_k, top_p):
        p_row = p_logits + i_row * logits_stride
        p_row_plan = p_plan + i_row * PLAN_SIZE
        total = tl.sum(left(p_parts, i_row, TOTAL, num_chunks, 0, MAX_CHUNKS), axis=0)
        min_p = tl.load(p_min_p + i_row)
        noise_key = noise_key_of(tl.load(p_seeds + i_row), tl.load(p_positions + i_row))
        if tl.load(p_row_plan + NUM_LISTED) <= MAX_LISTED:
            b_order, is_kept = _rank_listed(
                p_parts,
                p_scale,
                p_row_plan,
                p_listed,
                i_row,
                num_chunks,
                temperature,
                top_k,
                top_p,
                total,
                MAX_CHUNKS,
            )
            b_drawn = _draw(b_order, is_kept, value_of(highest), temperature, min_p, noise_key)
            drawn = tl.maximum(drawn, tl.max(b_drawn, axis=0))
        else:
            lowest = tl.min(left(p_parts, i_row, FLOOR, num_chunks, HIGHEST, MAX_CHUNKS), axis=0)
            end = _end_by_halving(
                p_row, vocab, lowest, highest, temperature, top_k, top_p, total, BLOCK
            )
            for start in range(0, vocab, BLOCK):
                b_token = start + tl.arange(0, BLOCK)
                b_order = order_of(load_logits(p_row, b_token, vocab), b_token)
                b_drawn = _draw(
                    b_order, b_order >= end, value_of(highest), temperature, min_p, noise_key
                )
                drawn = tl.maximum(drawn, tl.max(b_drawn, axis=0))
    # A row without a possible token gives its first.
    tl.store(p_token_ids + i_row, token_of(tl.where(drawn == LOWEST, highest, drawn)))


@triton.jit
def _draw(b_order, is_kept, peak, temperature, min_p, noise_key):
    b_logit, b_token = value_of(b_order), token_of(b_order)
    is_kept &= share_of(b_logit, peak, temperature) >= min_p
    b_score = perturbed(b_logit, b_token, temperature, noise_key)
    return tl.where(is_kept, order_of(b_score, b_token), LOWEST)


@triton.jit
def _rank_listed(
    p_parts,
    p_scale,
    p_row_plan,
    p_listed,
    i_row,
    num_chunks,
    temperature,
    top_k,
    top_p,
    total,
    MAX_CHUNKS: tl.constexpr,
):
    """The listed tokens, and whether each is kept."""
    peak, levels_a_unit = tl.load(p_scale + i_row * 2), tl.load(p_scale + i_row * 2 + 1)
    num_listed = tl.load(p_row_plan + NUM_LISTED)
    mass_above = tl.sum(left(p_parts, i_row, MASS_ABOVE, num_chunks, 0, MAX_CHUNKS), axis=0)
    num_between = tl.sum(left(p_parts, i_row, NUM_BETWEEN, num_chunks, 0, MAX_CHUNKS), axis=0)
    mass_between = tl.sum(left(p_parts, i_row, MASS_BETWEEN, num_chunks, 0, MAX_CHUNKS), axis=0)
    index = tl.arange(0, MAX_LISTED)
    is_listed = index < num_listed
    b_order = tl.load(p_listed + i_row * MAX_LISTED + index, mask=is_listed, other=0)
    b_logit = value_of(b_order)
    b_bin = (level_of(b_logit, peak, levels_a_unit) - tl.load(p_row_plan + START)) >> tl.load(
        p_row_plan + SHIFT
    )
    is_behind = b_bin > tl.load(p_row_plan + LAST)
    b_rank = tl.where(is_behind, num_between, 0)
    b_rank += tl.sum(left(p_parts, i_row, NUM_ABOVE, num_chunks, 0, MAX_CHUNKS), axis=0)
    b_before = (
        tl.zeros([MAX_LISTED], tl.int64) + mass_above
    )  # for those behind it is enough to be cut
    for start in range(0, num_listed, 16):
        other = start + tl.arange(0, 16)
        b_other = tl.load(p_listed + i_row * MAX_LISTED + other, mask=other < num_listed, other=0)
        is_before = (b_other[None, :] > b_order[:, None]) & (other < num_listed)[None, :]
        b_rank += tl.sum(is_before.to(tl.int32), axis=1)
        b_mass = mass_of(value_of(b_other), peak, temperature)
        b_before += tl.sum(tl.where(is_before, b_mass[None, :], 0), axis=1)
    mass = total
    if top_k > 0:
        is_listed &= b_rank < top_k
        b_mass = tl.where(is_listed, mass_of(b_logit, peak, temperature), 0)
        mass = mass_above + mass_between + tl.sum(b_mass, axis=0)
    return b_order, is_listed & (b_before < mass_limit(mass, top_p))


@triton.jit
def _end_by_halving(
    p_row, vocab, lowest, highest, temperature, top_k, top_p, total, BLOCK: tl.constexpr
):
    """The order of the last token that is kept, or of nobody just behind it."""
    peak = value_of(highest)
    max_kept = tl.where(top_k > 0, top_k, vocab)
    end = _halve(p_row, vocab, lowest, highest, peak, temperature, max_kept, UNBOUNDED, BLOCK)
    _, mass = _weigh(p_row, vocab, end - 1, peak, temperature, BLOCK)
    limit = mass_limit(tl.where(top_k > 0, mass, total), top_p)
    return _halve(p_row, vocab, end, highest, peak, temperature, max_kept, limit, BLOCK)


@triton.jit
def _halve(p_row, vocab, low, high, peak, temperature, max_kept, limit, BLOCK: tl.constexpr):
    """The lowest order with fewer than `max_kept` tokens and less mass than `limit` above it."""
    while low < high:
        middle = low + ((high - low) >> 1)
        num, mass = _weigh(p_row, vocab, middle, peak, temperature, BLOCK)
        is_kept = (num < max_kept) & (mass < limit)
        high = tl.where(is_kept, middle, high)
        low = tl.where(is_kept, low, middle + 1)
    return low


@triton.jit
def _weigh(p_row, vocab, order, peak, temperature, BLOCK: tl.constexpr):
    """Number and mass of the tokens above `order`."""
    b_num, b_total = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        b_token = start + tl.arange(0, BLOCK)
        b_logit = load_logits(p_row, b_token, vocab)
        is_above = (b_logit > float("-inf")) & (order_of(b_logit, b_token) > order)
        b_num += is_above.to(tl.int32)
        b_total += tl.where(is_above, mass_of(b_logit, peak, temperature), 0)
    return tl.sum(b_num, axis=0), tl.sum(b_total, axis=0)
