# mypy: disable-error-code="no-untyped-def"
"""Samples among the tokens that top_k, top_p and min_p keep: a radix select in three launches.

min_p is decided per token. top_k and top_p keep a prefix of the row in descending order, so
the select finds where it ends. A value's level is its distance below the grid's top, in equal
steps: coarse bins are a level's upper bits, fine bins its lower bits.

    survey   for each chunk of a row: the counts of 128 coarse bins, the largest logit, the mass
    refine   if the coarse bins that may hold an end have more tokens than can be listed: the
             counts and masses of up to 1,024 fine bins in their place
    collect  samples from the tokens that are surely kept and lists the undecided ones; the last
             program of a row ranks the list, samples from what it keeps, and writes the token

Bins are decided only with a margin, so rounding decides nothing: the last program compares exact
sums. The mass of a token, exp((logit - largest) / temperature), is an integer multiple of 2^-40.
The sum of a million of them fits 63 bits, is the same in any order, and is within 2^-20 of the
real one, of a total that is 1 or more: the reference's running sum in float32 is no closer.

Among equal values at the end of a prefix the lower ids are kept, as in the reference. The order is
that of the logits: values that differ there but become equal after the division by the temperature
are not treated as equal. A greedy row keeps one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton import launch
from penstock.ops.triton.gumbel import LOWEST, noise_key_of, order_of, perturbed, token_of, value_of
from penstock.ops.triton.launch import arrives_last, let_next_start, wait_for_previous
from penstock.ops.tuning import Tile

SURVEY, REFINE, COLLECT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BINS = tl.constexpr(128)
BIN_SHIFT = tl.constexpr(11)  # a coarse bin is 2,048 levels
LEVELS = tl.constexpr(128 << 11)
FINE = tl.constexpr(2048)  # bin 0 is everything above the others
MAX_LISTED = tl.constexpr(512)  # undecided tokens that are ranked individually
NONE = tl.constexpr(1 << 30)  # a top_k that keeps all, and a bin after all bins
UNBOUNDED = tl.constexpr(2**62)
FLOOR = tl.constexpr(-3.4028234e38)  # the largest logit if there is none
MARGIN = tl.constexpr(2.0**-17)  # far above the rounding of a float32 sum over bins

# Shared by the programs of a row, in int64: counts and masses of the fine bins, the list, sums.
MASSES = tl.constexpr(2048)
LISTED = tl.constexpr(4096)
DRAWN = tl.constexpr(4608)  # the best of those surely kept, as a key of perturbed values
NUM_ABOVE = tl.constexpr(4609)  # tokens that are surely kept
MASS_ABOVE = tl.constexpr(4610)
NUM_BETWEEN = tl.constexpr(4611)  # tokens of top_k that top_p surely drops
MASS_BETWEEN = tl.constexpr(4612)
NUM_LISTED = tl.constexpr(4613)
NUM_DONE = tl.constexpr(4614)  # programs
SHARED = tl.constexpr(4616)

# These may be slices of wider buffers; kernels are not recompiled for another alignment.
SETTINGS = ["p_temperature", "p_top_k", "p_top_p", "p_min_p", "p_seeds", "p_positions"]
# Rarely taken branches would cost the registers of half the programs of an SM.
REGISTERS = {"maxnreg": 128}


def draw_filtered(
    logits: Tensor,  # [L, vocab] float32
    settings: tuple[Tensor, ...],  # as in SETTINGS, [L] each
    token_ids: Tensor,  # [L] int64, written
    tile: Tile,
) -> None:
    num_rows, vocab = logits.shape
    num_chunks = launch.cdiv(vocab, tile["CHUNK"])
    device, grid = logits.device, (num_rows, num_chunks)
    counts = torch.empty(*grid, BINS.value, dtype=torch.int16, device=device)
    parts = torch.empty(*grid, 4, dtype=torch.float32, device=device)
    shared = torch.empty(num_rows, SHARED.value, dtype=torch.int64, device=device)
    arguments = (logits, vocab, logits.stride(0), *settings, counts, parts, shared, token_ids)
    options = {**tile, **REGISTERS, **launch.launch_options(device)}
    for stage in (SURVEY, REFINE, COLLECT):
        filter_kernel[grid](
            *arguments, STAGE=stage, MAX_CHUNKS=launch.next_power_of_2(num_chunks), **options
        )


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def filter_kernel(
    p_logits,  # [L, vocab]
    vocab,
    logits_stride,
    p_temperature,  # [L]
    p_top_k,  # [L]
    p_top_p,  # [L]
    p_min_p,  # [L]
    p_seeds,  # [L]
    p_positions,  # [L]
    p_counts,  # [L, chunks, BINS] int16
    p_parts,  # [L, chunks, 4] float32: largest logit, mass relative to it; the grid: top, scale
    p_shared,  # [L, SHARED] int64
    p_token_ids,  # [L], written
    STAGE: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row, num_chunks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    p_row, p_row_shared = p_logits + i_row * logits_stride, p_shared + i_row * SHARED
    p_row_counts = p_counts + i_row * num_chunks * BINS
    p_row_parts, row = p_parts + i_row * num_chunks * 4, (p_row, vocab, p_row_shared)
    temperature, top_k, top_p = _filters_of(i_row, vocab, p_temperature, p_top_k, p_top_p)
    if STAGE == SURVEY:
        _survey(row, p_row_counts, p_row_parts, temperature, CHUNK, BLOCK)
        return

    chunk, b_bin = tl.arange(0, MAX_CHUNKS), tl.arange(0, BINS)
    p_bins, is_chunk = p_row_counts + chunk[:, None] * BINS + b_bin[None, :], chunk < num_chunks
    b_counts = tl.sum(tl.load(p_bins, mask=is_chunk[:, None], other=0).to(tl.int32), axis=0)
    top, levels_a_unit = tl.load(p_row_parts + 2), tl.load(p_row_parts + 3)
    b_peak = tl.load(p_row_parts + chunk * 4, mask=is_chunk, other=FLOOR)
    b_mass = tl.load(p_row_parts + chunk * 4 + 1, mask=is_chunk, other=0.0)
    peak = tl.max(b_peak, axis=0)
    total = tl.sum(b_mass * _share_of(b_peak, peak, temperature), axis=0)
    b_before, b_after = _mass_bounds(b_counts, total, peak, top, levels_a_unit, temperature)
    first, last, k_bin = _undecided(b_counts, b_before, b_after, total, top_k, top_p, BINS)
    is_open = ((b_bin >= first) & (b_bin <= last)) | (b_bin == k_bin)
    is_fine = tl.sum(tl.where(is_open, b_counts, 0), axis=0) > MAX_LISTED
    origin, shift, end = 0, BIN_SHIFT, 0
    if is_fine:
        behind = tl.minimum(tl.where(k_bin < NONE, k_bin, last), BINS - 1) + 1
        shift = 1
        for exponent in tl.static_range(7):  # the smallest with FINE / 2 bins or fewer
            shift += (behind - first > (1 << exponent)).to(tl.int32)
        origin = (first << BIN_SHIFT) - (1 << shift)
        end = ((behind << BIN_SHIFT) - 1 - origin) >> shift
    grid = top, levels_a_unit, origin, shift  # a token's bin is (level - origin) >> shift
    if STAGE == REFINE:
        if is_fine:
            _refine(row, grid, end, peak, temperature, CHUNK, BLOCK)
        return

    if is_fine:
        p_fine = p_row_shared + tl.arange(0, FINE)
        b_fine = tl.load(p_fine + MASSES).to(tl.float32) * (2.0**-40)
        b_sum = tl.cumsum(b_fine, axis=0)
        first, last, k_bin = _undecided(
            tl.load(p_fine), b_sum - b_fine, b_sum, total, top_k, top_p, FINE
        )
        first, last = tl.minimum(first, end), tl.minimum(last, end)
    noise_key = noise_key_of(tl.load(p_seeds + i_row), tl.load(p_positions + i_row))
    draw = peak, temperature, tl.load(p_min_p + i_row), noise_key
    _collect(row, grid, (first, last, k_bin), draw, top_p, CHUNK, BLOCK)
    if arrives_last(p_row_shared + NUM_DONE, num_chunks):
        drawn = _finish(row, grid, last, draw, top_k, top_p, BLOCK)
        tl.store(p_token_ids + i_row, token_of(drawn))  # the first, if no token is possible


@triton.jit
def _survey(row, p_row_counts, p_row_parts, temperature, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    p_row, vocab, p_row_shared = row
    i_chunk = tl.program_id(1)
    top, levels_a_unit = _grid_of(p_row, vocab, temperature)
    grid = top, levels_a_unit, 0, BIN_SHIFT
    peak, mass = tl.full([], FLOOR, tl.float32), 0.0
    b_counts = tl.zeros([BINS], tl.int32)
    for start in range(i_chunk * CHUNK, (i_chunk + 1) * CHUNK, BLOCK):
        b_logit, is_possible = _load_logits(p_row, start + tl.arange(0, BLOCK), vocab)
        b_counts += tl.histogram(_bin_of(b_logit, grid), BINS, mask=is_possible)
        higher = tl.maximum(peak, tl.max(tl.where(is_possible, b_logit, FLOOR), axis=0))
        b_share = tl.where(is_possible, _share_of(b_logit, higher, temperature), 0.0)
        mass = mass * _share_of(peak, higher, temperature) + tl.sum(b_share, axis=0)
        peak = higher
    tl.store(p_row_counts + i_chunk * BINS + tl.arange(0, BINS), b_counts.to(tl.int16))
    p_part = p_row_parts + i_chunk * 4
    tl.store(p_part, peak)
    tl.store(p_part + 1, mass)
    tl.store(p_part + 2, top)
    tl.store(p_part + 3, levels_a_unit)
    if i_chunk == 0:  # accumulators of the later stages
        fine, sums = tl.arange(0, 2 * FINE), tl.arange(0, SHARED - DRAWN)
        tl.store(p_row_shared + fine, tl.zeros([2 * FINE], tl.int64))
        tl.store(p_row_shared + DRAWN + sums, tl.where(sums == 0, LOWEST, 0))


@triton.jit
def _refine(row, grid, end, peak, temperature, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    p_row, vocab, p_row_shared = row
    num_above, mass_above = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for start in range(tl.program_id(1) * CHUNK, (tl.program_id(1) + 1) * CHUNK, BLOCK):
        b_logit, is_possible = _load_logits(p_row, start + tl.arange(0, BLOCK), vocab)
        b_bin = _bin_of(b_logit, grid)
        b_mass = _mass_of(b_logit, peak, temperature)
        is_above = is_possible & (b_bin < 1)
        num_above += tl.sum(is_above.to(tl.int32), axis=0)
        mass_above += tl.sum(tl.where(is_above, b_mass, 0), axis=0)
        is_inside = is_possible & (b_bin >= 1) & (b_bin <= end)
        p_bins = p_row_shared + b_bin
        tl.atomic_add(p_bins, is_inside.to(tl.int64), mask=is_inside, sem="relaxed")
        tl.atomic_add(p_bins + MASSES, b_mass, mask=is_inside, sem="relaxed")
    tl.atomic_add(p_row_shared, num_above, sem="relaxed")
    tl.atomic_add(p_row_shared + MASSES, mass_above, sem="relaxed")


@triton.jit
def _collect(row, grid, bins, draw, top_p, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    p_row, vocab, p_row_shared = row
    first, last, k_bin = bins
    drawn = tl.full([], LOWEST, tl.int64)
    num_above, mass_above = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    num_between, mass_between = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for start in range(tl.program_id(1) * CHUNK, (tl.program_id(1) + 1) * CHUNK, BLOCK):
        b_token = start + tl.arange(0, BLOCK)
        b_logit, is_possible = _load_logits(p_row, b_token, vocab)
        b_bin = _bin_of(b_logit, grid)
        is_above = is_possible & (b_bin < first)
        # In most tiles of most rows there is nothing to keep and nothing to list.
        if tl.max(is_above.to(tl.int32), axis=0) > 0:
            drawn = tl.maximum(drawn, _draw(is_above, b_logit, b_token, draw))
            num_above += tl.sum(is_above.to(tl.int32), axis=0)
        is_open = is_possible & (((b_bin >= first) & (b_bin <= last)) | (b_bin == k_bin))
        num_open = tl.sum(is_open.to(tl.int64), axis=0)
        if num_open > 0:
            slot = tl.atomic_add(p_row_shared + NUM_LISTED, num_open, sem="relaxed")
            b_slot = slot + tl.cumsum(is_open.to(tl.int32), axis=0) - 1
            is_open &= b_slot < MAX_LISTED
            tl.store(p_row_shared + LISTED + b_slot, order_of(b_logit, b_token), mask=is_open)
        is_between = is_possible & (b_bin > last) & (b_bin < k_bin)
        if (top_p < 1) & (tl.max((is_above | is_between).to(tl.int32), axis=0) > 0):
            b_mass = _mass_of(b_logit, draw[0], draw[1])
            mass_above += tl.sum(tl.where(is_above, b_mass, 0), axis=0)
            mass_between += tl.sum(tl.where(is_between, b_mass, 0), axis=0)
            num_between += tl.sum(is_between.to(tl.int32), axis=0)
    tl.atomic_max(p_row_shared + DRAWN, drawn, sem="relaxed")
    tl.atomic_add(p_row_shared + NUM_ABOVE, num_above, sem="relaxed")
    tl.atomic_add(p_row_shared + MASS_ABOVE, mass_above, sem="relaxed")
    tl.atomic_add(p_row_shared + NUM_BETWEEN, num_between, sem="relaxed")
    tl.atomic_add(p_row_shared + MASS_BETWEEN, mass_between, sem="relaxed")


@triton.jit
def _finish(row, grid, last, draw, top_k, top_p, BLOCK: tl.constexpr):
    p_row, vocab, p_row_shared = row
    drawn = _shared(p_row_shared + DRAWN)
    if _shared(p_row_shared + NUM_LISTED) > MAX_LISTED:
        end = _end_by_halving(p_row, vocab, draw[0], draw[1], top_k, top_p, BLOCK)
        for start in range(0, vocab, BLOCK):
            b_token = start + tl.arange(0, BLOCK)
            b_logit, is_possible = _load_logits(p_row, b_token, vocab)
            is_kept = is_possible & (order_of(b_logit, b_token) >= end)
            drawn = tl.maximum(drawn, _draw(is_kept, b_logit, b_token, draw))
    else:
        b_order, is_kept = _rank_listed(p_row_shared, grid, last, draw[0], draw[1], top_k, top_p)
        drawn = tl.maximum(drawn, _draw(is_kept, value_of(b_order), token_of(b_order), draw))
    return drawn


@triton.jit
def _load_logits(p_row, b_token, vocab):
    b_logit = tl.load(p_row + b_token, mask=b_token < vocab, other=float("-inf"))
    return b_logit, b_logit > float("-inf")


@triton.jit
def _filters_of(i_row, vocab, p_temperature, p_top_k, p_top_p):
    """temperature, top_k (NONE: keeps all) and top_p (1 or more: keeps all)."""
    temperature, top_k = tl.load(p_temperature + i_row), tl.load(p_top_k + i_row)
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, NONE)
    is_greedy = temperature <= 0
    top_k = tl.where(is_greedy, 1, top_k).to(tl.int32)
    top_p = tl.where(is_greedy, 1.0, tl.load(p_top_p + i_row))
    return tl.where(is_greedy, 1.0, temperature), top_k, top_p


@triton.jit
def _grid_of(p_row, vocab, temperature):
    """The value of level 0 and the levels per unit, from a sample of the row.

    Any grid gives the same token. A good one leaves few tokens in a bin: it reaches from above the
    largest value to the smallest, but outliers far below all others widen it only a little.
    """
    b_group = tl.arange(0, 64)[:, None] * tl.maximum(vocab // 64, 1)
    b_logit, is_possible = _load_logits(p_row, b_group + tl.arange(0, 16)[None, :], vocab)
    highest = tl.max(tl.max(b_logit, axis=1), axis=0)
    b_depth = tl.where(is_possible, tl.minimum(highest - b_logit, 64.0), 0.0)
    num_possible = tl.sum(tl.sum(is_possible.to(tl.float32), axis=1), axis=0)
    reach = 3 * tl.sum(tl.sum(b_depth, axis=1), axis=0) / tl.maximum(num_possible, 1.0)
    reach = tl.where(reach > 0, reach, 8 * temperature)
    return tl.where(highest > float("-inf"), highest, 0.0) + 0.2 * reach, 1 / reach * LEVELS


@triton.jit
def _level_of(b_logit, top, levels_a_unit):
    b_level = tl.minimum((top - b_logit) * levels_a_unit, LEVELS - 1.0).to(tl.int32)
    return tl.maximum(b_level, 0)


@triton.jit
def _bin_of(b_logit, grid):
    top, levels_a_unit, origin, shift = grid
    return (_level_of(b_logit, top, levels_a_unit) - origin) >> shift


@triton.jit
def _share_of(b_logit, peak, temperature):
    """The probability of a token, relative to the most likely one."""
    return tl.exp2((b_logit - peak) * tl.minimum(1.4426950408889634 / temperature, 1e30))


@triton.jit
def _mass_of(b_logit, peak, temperature):
    """The same as an integer, in units of 2^-40."""
    return (_share_of(b_logit, peak, temperature) * (2.0**40)).to(tl.int64)


@triton.jit
def _mass_limit(mass, top_p):
    """A token is kept if the mass before it is less than this; the first has none before it."""
    limit = tl.maximum(top_p.to(tl.float64) * mass.to(tl.float64), 1.0).to(tl.int64)
    return tl.where(top_p < 1, limit, UNBOUNDED)


@triton.jit
def _mass_bounds(b_counts, total, peak, top, levels_a_unit, temperature):
    """Bounds of the mass above each coarse bin, and including its own, from the edges of the bins.

    Near the top the sums from above are tight, near the bottom the total minus the sums from below.
    """
    b_bin = tl.arange(0, BINS)
    width = 1 / levels_a_unit * (LEVELS // BINS)
    rounding = (tl.abs(top) + tl.abs(peak) + width * BINS) * (2.0**-22)
    b_upper = tl.where(b_bin == 0, peak, tl.minimum(top - b_bin * width + rounding, peak))
    b_lower = tl.minimum(top - (b_bin + 1) * width - rounding, peak)
    b_most = b_counts * _share_of(b_upper, peak, temperature) * (1 + MARGIN)
    b_least = b_counts * _share_of(b_lower, peak, temperature) * (1 - MARGIN)
    b_least = tl.where(b_bin == BINS - 1, 0.0, b_least)  # it holds everything further down
    b_most_below = tl.cumsum(b_most, axis=0, reverse=True)
    b_least_below = tl.cumsum(b_least, axis=0, reverse=True)
    b_before = tl.maximum(tl.cumsum(b_least, axis=0) - b_least, total - b_most_below)
    b_after = tl.minimum(tl.cumsum(b_most, axis=0), total - (b_least_below - b_least))
    return b_before, b_after


@triton.jit
def _undecided(b_counts, b_before, b_after, total, top_k, top_p, SIZE: tl.constexpr):
    """The bins [first, last] that may hold the end of top_p, and the bin of the k-th token.

    top_p is a share of the mass that top_k keeps, so the bin of the k-th token is undecided even if
    top_p ends far above it.
    """
    b_bin = tl.arange(0, SIZE)
    k_bin = tl.sum((tl.cumsum(b_counts, axis=0) < top_k).to(tl.int32), axis=0)
    least = tl.where(k_bin < SIZE, tl.sum(tl.where(b_bin == k_bin, b_before, 0.0), axis=0), total)
    most = tl.where(k_bin < SIZE, tl.sum(tl.where(b_bin == k_bin, b_after, 0.0), axis=0), total)
    kept_below = tl.where(top_p < 1, top_p * least - total * MARGIN, float("inf"))
    cut_above = tl.where(top_p < 1, top_p * most + total * MARGIN, float("inf"))
    first = tl.minimum(tl.sum((b_after < kept_below).to(tl.int32), axis=0), k_bin)
    last = tl.minimum(tl.sum((b_before <= cut_above).to(tl.int32), axis=0) - 1, k_bin)
    return first, tl.maximum(first, last), tl.where(k_bin < SIZE, k_bin, NONE)


@triton.jit
def _draw(is_kept, b_logit, b_token, draw):
    """The best of the tokens that min_p keeps too, as a key of perturbed values."""
    peak, temperature, min_p, noise_key = draw
    is_kept &= ~(_share_of(b_logit, peak, temperature) < min_p)
    b_order = order_of(perturbed(b_logit, b_token, temperature, noise_key), b_token)
    return tl.max(tl.where(is_kept, b_order, LOWEST), axis=0)


@triton.jit
def _shared(pointers):
    """Bypasses L1: other SMs wrote these."""
    return tl.load(pointers, cache_modifier=".cg")


@triton.jit
def _rank_listed(p_row_shared, grid, last, peak, temperature, top_k, top_p):
    """The keys of the listed tokens, and whether each is kept."""
    num_listed = _shared(p_row_shared + NUM_LISTED)
    mass_above = _shared(p_row_shared + MASS_ABOVE)
    mass_between = _shared(p_row_shared + MASS_BETWEEN)
    index = tl.arange(0, MAX_LISTED)
    b_order = tl.where(index < num_listed, _shared(p_row_shared + LISTED + index), LOWEST)
    is_behind = _bin_of(value_of(b_order), grid) > last
    b_rank = _shared(p_row_shared + NUM_ABOVE)
    b_rank += tl.where(is_behind, _shared(p_row_shared + NUM_BETWEEN), 0)
    b_before = mass_above + tl.where(is_behind, mass_between, 0)
    for start in range(0, num_listed, 8):
        other = start + tl.arange(0, 8)
        b_other = tl.where(other < num_listed, _shared(p_row_shared + LISTED + other), LOWEST)
        is_before = b_other[None, :] > b_order[:, None]
        b_rank += tl.sum(is_before.to(tl.int32), axis=1)
        b_others = _mass_of(value_of(b_other), peak, temperature)
        b_before += tl.sum(tl.where(is_before, b_others[None, :], 0), axis=1)
    is_kept = (b_order > LOWEST) & (b_rank < top_k)
    b_mass = tl.where(is_kept, _mass_of(value_of(b_order), peak, temperature), 0)
    limit = _mass_limit(mass_above + mass_between + tl.sum(b_mass, axis=0), top_p)
    return b_order, is_kept & (b_before < limit)


@triton.jit
def _end_by_halving(p_row, vocab, peak, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """A key that all kept tokens reach and no other: as exact as a list, and slow.

    For rows whose end lies among more tokens than a list holds, for example many equal logits.
    """
    end, limit = tl.full([], LOWEST, tl.int64), tl.full([], UNBOUNDED, tl.int64)
    is_cut = top_k < NONE
    for _ in range(2):  # the end of top_k, then that of top_p
        low, high = end, tl.where(is_cut, order_of(peak, tl.full([], 0, tl.int32)), end)
        while low < high:
            middle = low + ((high - low) >> 1)
            num, mass = _weigh(p_row, vocab, middle, peak, temperature, BLOCK)
            is_kept = (num < top_k) & (mass < limit)
            high = tl.where(is_kept, middle, high)
            low = tl.where(is_kept, low, middle + 1)
        end = low
        _, mass = _weigh(p_row, vocab, end - 1, peak, temperature, BLOCK)
        limit, is_cut = _mass_limit(mass, top_p), top_p < 1
    return end


@triton.jit
def _weigh(p_row, vocab, order, peak, temperature, BLOCK: tl.constexpr):
    """Number and mass of the tokens above `order`."""
    b_num, b_mass = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        b_token = start + tl.arange(0, BLOCK)
        b_logit, is_possible = _load_logits(p_row, b_token, vocab)
        is_above = is_possible & (order_of(b_logit, b_token) > order)
        b_num += is_above.to(tl.int32)
        b_mass += tl.where(is_above, _mass_of(b_logit, peak, temperature), 0)
    return tl.sum(b_num, axis=0), tl.sum(b_mass, axis=0)
