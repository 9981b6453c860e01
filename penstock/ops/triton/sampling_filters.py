# mypy: disable-error-code="no-untyped-def"
"""Draws among the tokens that top_k, top_p and min_p keep, in five launches and without a sort.

min_p is a question to one token alone. top_k and top_p keep a prefix of the row in order, so where
it ends must be found. A row's values are cut into levels between its largest and its smallest:

    peak     the largest and the smallest value
    tally    how many tokens each of 128 coarse bins of levels holds, and the mass of the whole row
    refine   which coarse bins may hold the end of a prefix; when those hold more tokens than can be
    listed,
             count and mass of 2,048 fine bins in their place
    collect  draws from the tokens that are surely kept; lists the few that are not decided
    finish   ranks the listed tokens against each other, draws from those that are kept, merges

A bin is decided only with a margin, so rounding decides nothing: `finish` compares exact sums. The
mass of a token, exp((logit - largest) / temperature), is an integer multiple of 2^-40. The sum of a
million of them fits 63 bits, is the same in any order, and is within 2^-20 of the real one, of a
total that is 1 or more: the reference's running sum in float32 is no nearer.

Equal values at the end of a prefix are kept lower ids first, as the reference does. Order is that
of the logits: values that differ there and no longer after the division by the temperature are not
taken as equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.gumbel import HIGHEST, LOWEST, noise_key_of, order_of, perturbed, value_of
from penstock.ops.triton.launch import (
    CompileCase,
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.triton.sampling_finish import finish_kernel
from penstock.ops.triton.sampling_levels import (
    COARSE,
    DRAWN,
    END,
    FINE,
    FLOOR,
    LAST,
    LEVELS,
    LEVELS_PER_BIN,
    MASS_ABOVE,
    MASS_BETWEEN,
    MAX_LISTED,
    NUM_ABOVE,
    NUM_BETWEEN,
    NUM_IN_HULL,
    NUM_LISTED,
    NUM_OVER_HULL,
    NUM_PARTS,
    OVER_HULL,
    PEAK,
    PLAN_SIZE,
    SETTINGS,
    SHIFT,
    START,
    TOTAL,
    filters_of,
    hull_of,
    is_cut_short,
    leave,
    left,
    level_of,
    load_logits,
    mass_as_float,
    mass_of,
    share_of,
    undecided,
)
from penstock.ops.triton.tuning import Tile

_FINISH: Tile = {"BLOCK": 2048, "num_warps": 8}
# For `refine` and `collect`: seldom taken branches would take the registers of half the programs of
# an SM.
_LEAN = {"maxnreg": 128}


def draw_filtered(
    logits: Tensor,  # [L, vocab] float32
    temperature: Tensor,  # [L]
    top_k: Tensor,  # [L] int64
    top_p: Tensor,  # [L]
    min_p: Tensor,  # [L]
    seeds: Tensor,  # [L] int64
    positions: Tensor,  # [L] int64
    token_ids: Tensor,  # [L] int64, written
    tile: Tile,
) -> None:
    num_rows, vocab = logits.shape
    num_chunks = cdiv(vocab, tile["CHUNK"])
    max_chunks = next_power_of_2(num_chunks)
    device = logits.device
    parts = torch.empty(num_rows, NUM_PARTS.value, num_chunks, dtype=torch.int64, device=device)
    plan = torch.empty(num_rows, PLAN_SIZE.value, dtype=torch.int32, device=device)
    scale = torch.empty(num_rows, 2, dtype=torch.float32, device=device)
    counts = torch.empty(num_rows, COARSE.value + FINE.value, dtype=torch.int32, device=device)
    masses = torch.empty(num_rows, FINE.value, dtype=torch.int64, device=device)
    listed = torch.empty(num_rows, MAX_LISTED.value, dtype=torch.int64, device=device)

    grid, options = (num_rows, num_chunks), launch_options(device)
    row, cut, draw = (
        (logits, vocab, logits.stride(0)),
        (temperature, top_k, top_p),
        (min_p, seeds, positions),
    )
    found, bins = (parts, scale, plan), (counts, masses)
    chunked = {"MAX_CHUNKS": max_chunks, **tile, **options}
    _peak_kernel[grid](*row, parts, plan, *bins, **tile, **options)
    _tally_kernel[grid](*row, *cut, parts, scale, counts, **chunked)
    _refine_kernel[grid](*row, *cut, *found, *bins, **chunked, **_LEAN)
    _collect_kernel[grid](*row, *cut, *draw, *found, *bins, listed, **chunked, **_LEAN)
    last = {"MAX_CHUNKS": max_chunks, **_FINISH, **options}
    finish_kernel[(num_rows,)](*row, *cut, *draw, *found, listed, token_ids, num_chunks, **last)


@triton.jit
def _peak_kernel(
    p_logits,  # [L, vocab]
    vocab,
    logits_stride,
    p_parts,  # [L, NUM_PARTS, chunks] int64
    p_plan,  # [L, PLAN_SIZE] int32
    p_counts,  # [L, COARSE + FINE] int32
    p_masses,  # [L, FINE] int64
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_highest = tl.full([BLOCK], LOWEST, tl.int64)
    b_lowest = tl.full([BLOCK], HIGHEST, tl.int64)
    for start in range(i_chunk * CHUNK, (i_chunk + 1) * CHUNK, BLOCK):
        b_token = start + tl.arange(0, BLOCK)
        is_inside = b_token < vocab
        b_logit = tl.load(
            p_logits + i_row * logits_stride + b_token, mask=is_inside, other=float("-inf")
        )
        b_order = order_of(b_logit, b_token)
        b_highest = tl.maximum(b_highest, tl.where(is_inside, b_order, LOWEST))
        b_lowest = tl.minimum(b_lowest, tl.where(b_logit > float("-inf"), b_order, HIGHEST))
    leave(p_parts, i_row, PEAK, tl.max(b_highest, axis=0))
    leave(p_parts, i_row, FLOOR, tl.min(b_lowest, axis=0))
    if i_chunk == 0:  # what later kernels add to
        fine = tl.arange(0, FINE)
        p_row_counts = p_counts + i_row * (COARSE + FINE)
        tl.store(p_row_counts + tl.arange(0, COARSE), tl.zeros([COARSE], tl.int32))
        tl.store(p_row_counts + COARSE + fine, tl.zeros([FINE], tl.int32))
        tl.store(p_masses + i_row * FINE + fine, tl.zeros([FINE], tl.int64))
        tl.store(p_plan + i_row * PLAN_SIZE + NUM_LISTED, 0)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def _tally_kernel(
    p_logits,  # [L, vocab]
    vocab,
    logits_stride,
    p_temperature,  # [L]
    p_top_k,  # [L]
    p_top_p,  # [L]
    p_parts,  # [L, NUM_PARTS, chunks]
    p_scale,  # [L, 2]  largest value, levels a unit
    p_counts,  # [L, COARSE + FINE]
    MAX_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    temperature, top_k, top_p = filters_of(i_row, vocab, p_temperature, p_top_k, p_top_p)
    peak = value_of(tl.max(left(p_parts, i_row, PEAK, num_chunks, LOWEST, MAX_CHUNKS), axis=0))
    b_floors = left(p_parts, i_row, FLOOR, num_chunks, HIGHEST, MAX_CHUNKS)
    lowest = value_of(tl.min(b_floors, axis=0))
    # Not every chunk has an outlier: a few tokens far below the others must not widen the bins of
    # all.
    usual = value_of(tl.max(tl.where(b_floors == HIGHEST, LOWEST, b_floors), axis=0))
    bin_width = tl.maximum(tl.minimum(peak - lowest, 2 * (peak - usual)) / COARSE, 1e-30)
    levels_a_unit = LEVELS_PER_BIN / bin_width
    if i_chunk == 0:
        tl.store(p_scale + i_row * 2, peak)
        tl.store(p_scale + i_row * 2 + 1, levels_a_unit)
    if not is_cut_short(temperature, top_k, top_p):
        return
    b_counts = tl.zeros([COARSE], tl.int32)
    b_total = tl.zeros([BLOCK], tl.int64)
    for start in range(i_chunk * CHUNK, (i_chunk + 1) * CHUNK, BLOCK):
        b_token = start + tl.arange(0, BLOCK)
        b_logit = load_logits(p_logits + i_row * logits_stride, b_token, vocab)
        is_possible = b_logit > float("-inf")
        b_bin = level_of(b_logit, peak, levels_a_unit) // LEVELS_PER_BIN
        b_counts += tl.histogram(b_bin, COARSE, mask=is_possible)
        b_total += tl.where(is_possible, mass_of(b_logit, peak, temperature), 0)
    p_bins = p_counts + i_row * (COARSE + FINE) + tl.arange(0, COARSE)
    tl.atomic_add(p_bins, b_counts, mask=b_counts > 0, sem="relaxed")
    leave(p_parts, i_row, TOTAL, tl.sum(b_total, axis=0))


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def _refine_kernel(
    p_logits,  # [L, vocab]
    vocab,
    logits_stride,
    p_temperature,  # [L]
    p_top_k,  # [L]
    p_top_p,  # [L]
    p_parts,  # [L, NUM_PARTS, chunks]
    p_scale,  # [L, 2]
    p_plan,  # [L, PLAN_SIZE]
    p_counts,  # [L, COARSE + FINE]
    p_masses,  # [L, FINE]
    MAX_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p = filters_of(i_row, vocab, p_temperature, p_top_k, p_top_p)
    if not is_cut_short(temperature, top_k, top_p):
        return
    peak, levels_a_unit = tl.load(p_scale + i_row * 2), tl.load(p_scale + i_row * 2 + 1)
    total = tl.sum(left(p_parts, i_row, TOTAL, tl.num_programs(1), 0, MAX_CHUNKS), axis=0)
    p_bins = p_counts + i_row * (COARSE + FINE)
    b_counts = tl.load(p_bins + tl.arange(0, COARSE))
    first, end = hull_of(b_counts, mass_as_float(total), levels_a_unit, temperature, top_k, top_p)
    b_bin = tl.arange(0, COARSE)
    num_over_hull = tl.sum(tl.where(b_bin < first, b_counts, 0), axis=0)
    num_in_hull = tl.sum(tl.where(b_bin <= end, b_counts, 0), axis=0) - num_over_hull
    hull_start, hull_stop = first * LEVELS_PER_BIN, (end + 1) * LEVELS_PER_BIN
    shift = 0
    for exponent in tl.static_range(7):  # the least for which the hull has FINE bins or fewer
        shift += (end - first + 1 > (1 << exponent)).to(tl.int32)
    if i_chunk == 0:
        p_row_plan = p_plan + i_row * PLAN_SIZE
        tl.store(p_row_plan + START, hull_start)
        tl.store(p_row_plan + SHIFT, shift)
        tl.store(p_row_plan + END, (hull_stop - hull_start - 1) >> shift)
        tl.store(p_row_plan + NUM_IN_HULL, num_in_hull)
        tl.store(p_row_plan + NUM_OVER_HULL, num_over_hull)
    if num_in_hull <= MAX_LISTED:
        return
    over = tl.full([], 0, tl.int64)
    for start in range(i_chunk * CHUNK, (i_chunk + 1) * CHUNK, BLOCK):
        b_token = start + tl.arange(0, BLOCK)
        b_logit = load_logits(p_logits + i_row * logits_stride, b_token, vocab)
        is_possible = b_logit > float("-inf")
        b_level = level_of(b_logit, peak, levels_a_unit)
        b_mass = mass_of(b_logit, peak, temperature)
        over += tl.sum(tl.where(is_possible & (b_level < hull_start), b_mass, 0), axis=0)
        is_inside = is_possible & (b_level >= hull_start) & (b_level < hull_stop)
        b_fine = (b_level - hull_start) >> shift
        tl.atomic_add(
            p_bins + COARSE + b_fine, is_inside.to(tl.int32), mask=is_inside, sem="relaxed"
        )
        tl.atomic_add(p_masses + i_row * FINE + b_fine, b_mass, mask=is_inside, sem="relaxed")
    leave(p_parts, i_row, OVER_HULL, over)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def _collect_kernel(
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
    p_counts,  # [L, COARSE + FINE]
    p_masses,  # [L, FINE]
    p_listed,  # [L, MAX_LISTED] int64
    MAX_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p = filters_of(i_row, vocab, p_temperature, p_top_k, p_top_p)
    if temperature <= 0:
        return
    peak, levels_a_unit = tl.load(p_scale + i_row * 2), tl.load(p_scale + i_row * 2 + 1)
    min_p = tl.load(p_min_p + i_row)
    noise_key = noise_key_of(tl.load(p_seeds + i_row), tl.load(p_positions + i_row))
    p_row_plan = p_plan + i_row * PLAN_SIZE
    # A row that is not cut short has every level above its hull, and none to look at.
    hull_start, shift, first, last, k_bin, reach = LEVELS, 0, 0, 0, 0, -LEVELS
    if is_cut_short(temperature, top_k, top_p):
        hull_start, shift = tl.load(p_row_plan + START), tl.load(p_row_plan + SHIFT)
        last = tl.load(p_row_plan + END)
        k_bin = last
        if tl.load(p_row_plan + NUM_IN_HULL) > MAX_LISTED:
            total = tl.sum(left(p_parts, i_row, TOTAL, tl.num_programs(1), 0, MAX_CHUNKS), axis=0)
            over = tl.sum(
                left(p_parts, i_row, OVER_HULL, tl.num_programs(1), 0, MAX_CHUNKS), axis=0
            )
            b_counts = tl.load(p_counts + i_row * (COARSE + FINE) + COARSE + tl.arange(0, FINE))
            b_masses = mass_as_float(tl.load(p_masses + i_row * FINE + tl.arange(0, FINE)))
            b_after = mass_as_float(over) + tl.cumsum(b_masses, axis=0)
            num_over = tl.load(p_row_plan + NUM_OVER_HULL)
            first, last, k_bin = undecided(
                b_counts,
                num_over,
                b_after - b_masses,
                b_after,
                mass_as_float(total),
                top_k,
                top_p,
                FINE,
            )
        reach = tl.maximum(last, k_bin) + 1
        if i_chunk == 0:
            tl.store(p_row_plan + LAST, last)

    drawn = tl.full([], LOWEST, tl.int64)
    num_above, mass_above = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    num_between, mass_between = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for start in range(i_chunk * CHUNK, (i_chunk + 1) * CHUNK, BLOCK):
        b_token = start + tl.arange(0, BLOCK)
        b_logit = load_logits(p_logits + i_row * logits_stride, b_token, vocab)
        is_possible = b_logit > float("-inf")
        b_bin = (level_of(b_logit, peak, levels_a_unit) - hull_start) >> shift
        is_above = is_possible & (b_bin < first)
        # Sums within the branches: in most tiles of most rows there is nothing to keep and nothing
        # to list.
        if tl.max(is_above.to(tl.int32), axis=0) > 0:
            is_kept = is_above & (share_of(b_logit, peak, temperature) >= min_p)
            b_score = perturbed(b_logit, b_token, temperature, noise_key)
            b_drawn = tl.where(is_kept, order_of(b_score, b_token), LOWEST)
            drawn = tl.maximum(drawn, tl.max(b_drawn, axis=0))
        if tl.max((is_possible & (b_bin < reach)).to(tl.int32), axis=0) > 0:
            b_mass = mass_of(b_logit, peak, temperature)
            num_above += tl.sum(is_above.to(tl.int32), axis=0)
            mass_above += tl.sum(tl.where(is_above, b_mass, 0), axis=0)
            if k_bin > last:
                is_between = is_possible & (b_bin > last) & (b_bin < k_bin)
                num_between += tl.sum(is_between.to(tl.int32), axis=0)
                mass_between += tl.sum(tl.where(is_between, b_mass, 0), axis=0)
            is_open = is_possible & (((b_bin >= first) & (b_bin <= last)) | (b_bin == k_bin))
            num_open = tl.sum(is_open.to(tl.int32), axis=0)
            slot = tl.atomic_add(p_row_plan + NUM_LISTED, num_open, sem="relaxed")
            b_slot = slot + tl.cumsum(is_open.to(tl.int32), axis=0) - 1
            p_slots = p_listed + i_row * MAX_LISTED + b_slot
            tl.store(p_slots, order_of(b_logit, b_token), mask=is_open & (b_slot < MAX_LISTED))
    leave(p_parts, i_row, DRAWN, drawn)
    leave(p_parts, i_row, NUM_ABOVE, num_above)
    leave(p_parts, i_row, MASS_ABOVE, mass_above)
    leave(p_parts, i_row, NUM_BETWEEN, num_between)
    leave(p_parts, i_row, MASS_BETWEEN, mass_between)


def filter_compile_cases(tile: Tile, options: dict[str, int]) -> list[CompileCase]:
    types = dict.fromkeys(("p_logits", "p_temperature", "p_top_p", "p_min_p", "p_scale"), "*fp32")
    types |= dict.fromkeys(("p_top_k", "p_seeds", "p_positions", "p_parts", "p_masses"), "*i64")
    types |= dict.fromkeys(("p_listed", "p_token_ids"), "*i64")
    types |= dict.fromkeys(("p_plan", "p_counts"), "*i32")
    types |= dict.fromkeys(("vocab", "logits_stride", "num_chunks"), "i32")
    cases: list[CompileCase] = []
    for kernel in (_peak_kernel, _tally_kernel, _refine_kernel, _collect_kernel, finish_kernel):
        block = _FINISH if kernel is finish_kernel else {**tile, **options}
        constexprs = {"MAX_CHUNKS": 128, "PDL": False, **block}
        signature = {name: types[name] for name in kernel.arg_names if name in types}
        constexprs = {name: constexprs[name] for name in kernel.arg_names if name in constexprs}
        lean = _LEAN if kernel in (_refine_kernel, _collect_kernel) else {}
        cases.append(
            (
                kernel,
                signature,
                constexprs,
                {"num_warps": block["num_warps"], "num_stages": 1, **lean},
            )
        )
    return cases
