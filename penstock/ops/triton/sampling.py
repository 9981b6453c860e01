# mypy: disable-error-code="no-untyped-def"
"""From logits to the next token. No softmax is materialized and nothing is sorted.

Without filters, every program samples from its chunk of a row, and a second launch merges the
chunks. `sampling_filters` handles filters. Only maxima and integer sums cross programs, so a row
samples the same token whatever its batch and however the row is divided.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton import launch
from penstock.ops.triton.gumbel import LOWEST, noise_key_of, order_of, perturbed, token_of
from penstock.ops.triton.launch import let_next_start, wait_for_previous
from penstock.ops.triton.sampling_filters import SETTINGS, draw_filtered
from penstock.ops.tuning import Tile, choose


def sample(
    logits: Tensor,  # [L, vocab] float32
    temperature: Tensor,  # [L]  0: greedy
    top_k: Tensor,  # [L] int64  0: all tokens
    top_p: Tensor,  # [L]
    min_p: Tensor,  # [L]
    seeds: Tensor,  # [L] int64
    positions: Tensor,  # [L] int64  of the sampled token
    filtered: bool,  # whether any row uses top_k, top_p or min_p
) -> Tensor:  # [L] int64
    num_rows, vocab = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return token_ids
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    name = "sample_filtered" if filtered else "sample_plain"
    tile = choose(name, (vocab,), num_rows, rule(num_rows, filtered), logits.device)
    if filtered:
        settings = (temperature, top_k, top_p, min_p, seeds, positions)
        draw_filtered(logits, settings, token_ids, tile)
        return token_ids
    _merge_chunks(draw_kernel, logits, (temperature, seeds, positions), token_ids, tile)
    return token_ids


def likeliest(
    logits: Tensor,  # [L, vocab]
    rows: Tensor | None = None,  # [L] int64
    table: Tensor | None = None,  # [rows] int64  written at `rows`, if given
) -> Tensor:  # [L] int64
    num_rows = len(logits)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return token_ids
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tile = rule(num_rows, False)
    _merge_chunks(likeliest_kernel, logits, (), token_ids, tile, rows, table)
    return token_ids


def _merge_chunks(
    kernel: Any,
    logits: Tensor,  # [L, vocab]
    settings: tuple[Tensor, ...],  # [L] each
    token_ids: Tensor,  # [L] int64  written
    tile: Tile,
    rows: Tensor | None = None,  # [L] int64
    table: Tensor | None = None,  # [rows] int64  written at `rows`
) -> None:
    """One program of `kernel` finds the best token of a chunk, the second launch that of a row."""
    num_rows, vocab = logits.shape
    num_chunks, options = launch.cdiv(vocab, tile["CHUNK"]), launch.launch_options(logits.device)
    best = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    kernel[best.shape](logits, vocab, logits.stride(0), *settings, best, **tile, **options)
    options |= {"MAX_CHUNKS": launch.next_power_of_2(num_chunks), "num_warps": 1}
    stride = 0 if table is None else table.stride(0)
    merge_kernel[(num_rows,)](best, token_ids, rows, table, num_chunks, stride, **options)


def rule(num_rows: int, filtered: bool) -> Tile:
    """Few rows need short chunks to reach every SM. A filtered row also has few chunks, because
    every program reads the counts of all of them.
    """
    if filtered:
        chunk = 4096 if num_rows <= 4 else 8192 if num_rows <= 32 else 16384
    else:
        chunk = 2048 if num_rows <= 4 else 8192
    return {"CHUNK": chunk, "BLOCK": 2048, "num_warps": 4}


def candidates(kernel: str, shape: tuple[int, ...], num_tokens: int) -> list[Tile]:
    """Tiles worth measuring for `sample_plain` and `sample_filtered`."""
    return [
        {"CHUNK": chunk, "BLOCK": block, "num_warps": block // 512 * warps}
        for chunk in (
            (2048, 4096, 8192, 16384) if "filtered" in kernel else (1024, 2048, 4096, 8192)
        )
        for block in (1024, 2048)
        for warps in (1, 2)
        if block <= chunk
    ]


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def draw_kernel(
    p_logits,  # [L, vocab]
    vocab,
    logits_stride,
    p_temperature,  # [L]
    p_seeds,  # [L]
    p_positions,  # [L]
    p_best,  # [L, chunks] int64
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(p_temperature + i_row)
    noise_key = noise_key_of(tl.load(p_seeds + i_row), tl.load(p_positions + i_row))
    b_best = tl.full([BLOCK], LOWEST, tl.int64)
    for start in range(i_chunk * CHUNK, (i_chunk + 1) * CHUNK, BLOCK):
        b_token = start + tl.arange(0, BLOCK)
        is_inside = b_token < vocab
        b_score = tl.load(
            p_logits + i_row * logits_stride + b_token, mask=is_inside, other=float("-inf")
        )
        if temperature > 0:
            b_score = perturbed(b_score, b_token, temperature, noise_key)
        b_best = tl.maximum(b_best, tl.where(is_inside, order_of(b_score, b_token), LOWEST))
    tl.store(p_best + i_row * tl.num_programs(1) + i_chunk, tl.max(b_best, axis=0))


@triton.jit
def likeliest_kernel(
    p_logits,  # [L, vocab]
    vocab,
    logits_stride,
    p_best,  # [L, chunks] int64
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_best = tl.full([BLOCK], LOWEST, tl.int64)
    for start in range(i_chunk * CHUNK, (i_chunk + 1) * CHUNK, BLOCK):
        b_token = start + tl.arange(0, BLOCK)
        is_inside = b_token < vocab
        b_logit = tl.load(
            p_logits + i_row * logits_stride + b_token, mask=is_inside, other=float("-inf")
        )
        b_order = order_of(b_logit.to(tl.float32), b_token)
        b_best = tl.maximum(b_best, tl.where(is_inside, b_order, LOWEST))
    tl.store(p_best + i_row * tl.num_programs(1) + i_chunk, tl.max(b_best, axis=0))


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["p_rows", "p_table"]
)
def merge_kernel(
    p_best,  # [L, chunks]
    p_token_ids,  # [L]
    p_rows,  # [L], or None
    p_table,  # [rows], or None
    num_chunks,
    table_stride,
    MAX_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, MAX_CHUNKS)
    b_best = tl.load(p_best + i_row * num_chunks + chunk, mask=chunk < num_chunks, other=LOWEST)
    token_id = token_of(tl.max(b_best, axis=0))
    tl.store(p_token_ids + i_row, token_id)
    if p_table is not None:
        tl.store(p_table + tl.load(p_rows + i_row) * table_stride, token_id)
