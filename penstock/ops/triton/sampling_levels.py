# mypy: disable-error-code="no-untyped-def"
"""What the kernels of one filtered draw share: levels, bins and masses, and which bins are decided.

A level is a value's distance below the row's largest, in equal steps; bins are runs of levels.
Nothing here launches a kernel or draws a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

COARSE = tl.constexpr(128)  # bins of the first count of a row
LEVELS_PER_BIN = tl.constexpr(2048)
LEVELS = tl.constexpr(128 * 2048)
FINE = tl.constexpr(2048)  # bins of the second
MAX_LISTED = tl.constexpr(512)  # undecided tokens that are ranked one by one
UNBOUNDED = tl.constexpr(2**62)
_MARGIN = tl.constexpr(2.0**-15)  # far above the rounding of a float32 sum over bins

# These may be slices of wider buffers; no kernel is compiled anew for how one happens to be
# aligned.
SETTINGS = ["p_temperature", "p_top_k", "p_top_p", "p_min_p", "p_seeds", "p_positions"]

# What the programs of a row leave for the next kernel: one int64 a chunk.
PEAK = tl.constexpr(0)  # the order of the largest value
FLOOR = tl.constexpr(1)  # of the smallest that is not -inf
TOTAL = tl.constexpr(2)  # mass
OVER_HULL = tl.constexpr(3)  # mass above the hull
NUM_ABOVE = tl.constexpr(4)  # tokens that are surely kept
MASS_ABOVE = tl.constexpr(5)
NUM_BETWEEN = tl.constexpr(6)  # tokens of top_k that top_p surely cuts
MASS_BETWEEN = tl.constexpr(7)
DRAWN = tl.constexpr(8)  # the best of those surely kept, as an order of perturbed values
NUM_PARTS = tl.constexpr(9)

# The hull, the levels of a row that may hold an end: bins of 1 << SHIFT levels, from level START
# on.
START = tl.constexpr(0)
SHIFT = tl.constexpr(1)
END = tl.constexpr(2)  # its last bin
NUM_IN_HULL = tl.constexpr(3)  # tokens
NUM_OVER_HULL = tl.constexpr(4)
LAST = tl.constexpr(5)  # the last bin that top_p leaves undecided
NUM_LISTED = tl.constexpr(6)
PLAN_SIZE = tl.constexpr(8)


@triton.jit
def leave(p_parts, i_row, WHICH: tl.constexpr, value):
    tl.store(p_parts + (i_row * NUM_PARTS + WHICH) * tl.num_programs(1) + tl.program_id(1), value)


@triton.jit
def left(p_parts, i_row, WHICH: tl.constexpr, num_chunks, neutral, MAX_CHUNKS: tl.constexpr):
    """What every chunk of the row left, for a sum or a maximum."""
    chunk = tl.arange(0, MAX_CHUNKS)
    p_chunks = p_parts + (i_row * NUM_PARTS + WHICH) * num_chunks + chunk
    return tl.load(p_chunks, mask=chunk < num_chunks, other=neutral)


@triton.jit
def load_logits(p_row, b_token, vocab):
    return tl.load(p_row + b_token, mask=b_token < vocab, other=float("-inf"))


@triton.jit
def filters_of(i_row, vocab, p_temperature, p_top_k, p_top_p):
    """temperature, top_k (0: none, also when it would keep all) and top_p (1 or more: none)."""
    top_k = tl.load(p_top_k + i_row)
    top_k = tl.where(top_k < vocab, top_k, 0).to(tl.int32)
    return tl.load(p_temperature + i_row), top_k, tl.load(p_top_p + i_row)


@triton.jit
def is_cut_short(temperature, top_k, top_p):
    return (temperature > 0) & ((top_k > 0) | (top_p < 1))


@triton.jit
def level_of(b_logit, peak, levels_a_unit):
    b_level = tl.minimum((peak - b_logit) * levels_a_unit, LEVELS - 1.0).to(tl.int32)
    return tl.maximum(b_level, 0)


@triton.jit
def share_of(b_logit, peak, temperature):
    """The probability of a token, relative to the likeliest."""
    return tl.exp2((b_logit - peak) * tl.minimum(1.4426950408889634 / temperature, 1e30))


@triton.jit
def mass_of(b_logit, peak, temperature):
    """The same as an integer, in units of 2^-40."""
    return (share_of(b_logit, peak, temperature) * (2.0**40)).to(tl.int64)


@triton.jit
def mass_as_float(mass):
    return mass.to(tl.float32) * (2.0**-40)


@triton.jit
def mass_limit(mass, top_p):
    """A token is kept when less mass than this comes before it; the likeliest has none before
    it.
    """
    limit = tl.maximum(top_p.to(tl.float64) * mass.to(tl.float64), 1.0).to(tl.int64)
    return tl.where(top_p < 1, limit, UNBOUNDED)


@triton.jit
def hull_of(b_counts, total, levels_a_unit, temperature, top_k, top_p):
    """First and last coarse bin that may hold an end, by the bounds that a bin's edges give for its
    mass.

    Near the top the sums from above are sharp, near the bottom the total less the sums from below.
    """
    b_bin = tl.arange(0, COARSE)
    width = LEVELS_PER_BIN / levels_a_unit * tl.minimum(1.4426950408889634 / temperature, 1e30)
    b_most = b_counts * tl.exp2(-b_bin * width) * (1 + _MARGIN)
    b_least = b_counts * tl.exp2(-(b_bin + 1) * width) * (1 - _MARGIN)
    b_least = tl.where(b_bin == COARSE - 1, 0.0, b_least)  # it holds all that is further down
    b_most_below = tl.cumsum(b_most, axis=0, reverse=True)
    b_least_below = tl.cumsum(b_least, axis=0, reverse=True)
    b_before = tl.maximum(tl.cumsum(b_least, axis=0) - b_least, total - b_most_below)
    b_after = tl.minimum(tl.cumsum(b_most, axis=0), total - (b_least_below - b_least))
    first, last, k_bin = undecided(b_counts, 0, b_before, b_after, total, top_k, top_p, COARSE)
    return first, tl.maximum(last, k_bin)


@triton.jit
def undecided(b_counts, num_over, b_before, b_after, total, top_k, top_p, SIZE: tl.constexpr):
    """The bins [first, last] that may hold the end of top_p or top_k, and the bin of the k-th
    token.

    b_before and b_after bound the mass above each bin from below, and that with the bin's own from
    above. All bins above `first` are kept. top_p is a share of the mass that top_k keeps, so the
    bin of the k-th token is undecided also when top_p ends far above it.
    """
    b_bin = tl.arange(0, SIZE)
    b_num_before = num_over + tl.cumsum(b_counts, axis=0) - b_counts
    k_bin = tl.max(tl.where((b_counts > 0) & (b_num_before < top_k), b_bin, 0), axis=0)
    least, most = total, total
    if top_k > 0:
        least = tl.sum(tl.where(b_bin == k_bin, b_before, 0.0), axis=0)
        most = tl.sum(tl.where(b_bin == k_bin, b_after, 0.0), axis=0)
    margin = total * _MARGIN
    kept_below = tl.where(top_p < 1, top_p * least - margin, float("inf"))
    cut_above = tl.where(top_p < 1, top_p * most + margin, float("inf"))
    k_end = tl.where(top_k > 0, k_bin, SIZE)
    is_kept = (b_after < kept_below) & (b_bin < k_end)
    is_cut = (b_before > cut_above) | (b_bin > k_end)
    first = tl.min(tl.where(is_kept, SIZE - 1, b_bin), axis=0)
    last = tl.maximum(tl.max(tl.where(is_cut, 0, b_bin), axis=0), first)
    return first, last, tl.where(top_k > 0, k_bin, first)
