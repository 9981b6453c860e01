# mypy: disable-error-code="no-untyped-def"
"""The start and the end of a decode step, each in one launch: small integer kernels.

They do not decide which rows run; a padding row has a row number, length and pages like any other,
but gains no token, so programs never write the same entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.reference.decode_rows import AcceptedDrafts, PlacedDrafts
from penstock.ops.triton.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_previous,
)
from penstock.ops.tuning import Tile

_TILE: Tile = {"BLOCK": 1024, "num_warps": 4}
_ADVANCE_TILE: Tile = {"BLOCK": 128, "num_warps": 4}


def decode_rows(
    rows: Tensor,  # [R] int64  table rows
    last_token: Tensor,  # [rows] int64
    context_len: Tensor,  # [rows] int64  tokens of the row, including its last one
    page_table: Tensor,  # [rows, P] int32
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows, num_pages = len(rows), page_table.shape[1]
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    positions, kv_index, context_lens = (torch.empty_like(token_ids) for _ in range(3))
    row_pages = torch.empty(num_rows, num_pages, dtype=torch.int32, device=rows.device)
    if num_rows:
        decode_rows_kernel[(num_rows, cdiv(num_pages, _TILE["BLOCK"]))](
            rows,
            last_token,
            context_len,
            page_table,
            token_ids,
            positions,
            kv_index,
            context_lens,
            row_pages,
            num_pages,
            page_size,
            **_TILE,
            **launch_options(rows.device),
        )
    return token_ids, positions, kv_index, context_lens, row_pages


def advance_rows(
    rows: Tensor,  # [R] int64  table rows; a row that gains tokens occurs once
    num_new: Tensor,  # [R] int64  tokens that the row gains; 0 for a padding row
    token_ids: Tensor,  # [R] int64  the last one of these
    last_token: Tensor,  # [rows] int64  written
    context_len: Tensor,  # [rows] int64  written
) -> None:
    if len(rows):
        advance_rows_kernel[(cdiv(len(rows), _ADVANCE_TILE["BLOCK"]),)](
            rows,
            num_new,
            token_ids,
            last_token,
            context_len,
            len(rows),
            **_ADVANCE_TILE,
            **launch_options(rows.device),
        )


@triton.jit(do_not_specialize=["num_pages"], do_not_specialize_on_alignment=["p_rows"])
def decode_rows_kernel(
    p_rows,  # [R]
    p_last_token,  # [rows]
    p_context_len,  # [rows]
    p_page_table,  # [rows, P]
    p_token_ids,  # [R]
    p_positions,  # [R]
    p_kv_index,  # [R]
    p_context_lens,  # [R]
    p_row_pages,  # [R, P]
    num_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    row = tl.load(p_rows + i_row)
    context_len = tl.load(p_context_len + row)
    position = context_len - 1
    current = position // PAGE_SIZE
    page = i_tile * BLOCK + tl.arange(0, BLOCK)
    b_pages = tl.load(
        p_page_table + row * num_pages + page, mask=(page <= current) & (page < num_pages), other=0
    )
    tl.store(p_row_pages + i_row * num_pages + page, b_pages, mask=page < num_pages)
    if i_tile == 0:
        last_page = tl.load(p_page_table + row * num_pages + current).to(tl.int64)
        tl.store(p_token_ids + i_row, tl.load(p_last_token + row))
        tl.store(p_positions + i_row, position)
        tl.store(p_kv_index + i_row, last_page * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(p_context_lens + i_row, context_len)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["p_rows", "p_num_new", "p_token_ids"],
)
def advance_rows_kernel(
    p_rows,  # [R]
    p_num_new,  # [R]
    p_token_ids,  # [R]
    p_last_token,  # [rows]
    p_context_len,  # [rows]
    num_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_new = tl.load(p_num_new + i_row, mask=i_row < num_rows, other=0)
    gains = num_new > 0
    row = tl.load(p_rows + i_row, mask=gains, other=0)
    token_id = tl.load(p_token_ids + i_row, mask=gains, other=0)
    context_len = tl.load(p_context_len + row, mask=gains, other=0)
    tl.store(p_last_token + row, token_id, mask=gains)
    tl.store(p_context_len + row, context_len + num_new, mask=gains)


def accept_drafts(
    rows: Tensor,  # [R] int64  table rows; a row that gains tokens occurs once
    num_tokens: Tensor,  # [R] int64  tokens to sample: 1 plus its drafts; 0: padding
    sampled: Tensor,  # [L] int64  the model's tokens after each of them, row by row
    drafts: Tensor,  # [rows, n] int64
    last_token: Tensor,  # [rows] int64  written
    context_len: Tensor,  # [rows] int64  written
    num_accepted: Tensor,  # [rows] int64  written: entries of the journal to replay
    forced: Tensor | None = None,  # [rows] int64  drafts to accept, right or not; negative: compare
    width: int = 0,  # positions per row in `sampled`; 0: those that it samples
) -> AcceptedDrafts:
    last = torch.empty(2, len(rows), dtype=torch.int64, device=rows.device)
    for_host = torch.empty(len(rows), 2 + drafts.shape[1], dtype=torch.int64, device=rows.device)
    if len(rows):
        accept_drafts_kernel[(len(rows),)](
            rows,
            num_tokens,
            sampled,
            drafts,
            last_token,
            context_len,
            num_accepted,
            forced,
            for_host,
            last,
            len(rows),
            drafts.shape[1],
            width,
            BLOCK_ROWS=next_power_of_2(len(rows)),
            BLOCK_N=next_power_of_2(drafts.shape[1] + 1),
            num_warps=1,
            **launch_options(rows.device),
        )
    return AcceptedDrafts(for_host, *last.unbind())


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["p_rows", "p_num_tokens", "p_sampled"],
)
def accept_drafts_kernel(
    p_rows,  # [R]
    p_num_tokens,  # [R]
    p_sampled,  # [L]
    p_drafts,  # [rows, n]
    p_last_token,  # [rows]
    p_context_len,  # [rows]
    p_num_accepted,  # [rows]
    p_forced,  # [rows], or None
    p_told,  # [R, 2 + n]
    p_last,  # [2, R]
    num_rows,
    NUM_DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row = tl.program_id(0)
    if WIDTH:
        first = i_row * WIDTH
    else:
        others = tl.arange(0, BLOCK_ROWS)
        is_before = (others < i_row) & (others < num_rows)
        first = tl.sum(tl.load(p_num_tokens + others, mask=is_before, other=0), axis=0)
    num_tokens = tl.load(p_num_tokens + i_row)
    row = tl.load(p_rows + i_row)
    place = tl.arange(0, BLOCK_N)
    said = tl.load(p_sampled + first + place, mask=place < num_tokens, other=0)
    is_draft = place < num_tokens - 1
    draft = tl.load(p_drafts + row * NUM_DRAFTS + place, mask=is_draft, other=0)
    # The first position whose draft is wrong, or which has none.
    num_right = tl.min(tl.where(is_draft & (said == draft), BLOCK_N, place), axis=0).to(tl.int64)
    if p_forced is not None:
        wanted = tl.minimum(tl.load(p_forced + row), num_tokens - 1)
        num_right = tl.where(wanted >= 0, wanted, num_right)
    last = tl.sum(tl.where(place == num_right, said, 0), axis=0)
    is_used = num_tokens > 0
    num_right = tl.where(is_used, num_right, 0)
    context_len = tl.load(p_context_len + row)
    p_to = p_told + i_row * (2 + NUM_DRAFTS)
    tl.store(p_to, tl.where(is_used, num_right + 1, 0))
    tl.store(p_to + 1 + place, said, mask=place <= NUM_DRAFTS)
    tl.store(p_last + i_row, first + num_right)
    tl.store(p_last + num_rows + i_row, context_len + num_right)
    tl.store(p_last_token + row, last, mask=is_used)
    tl.store(p_num_accepted + row, num_right, mask=is_used)
    tl.store(p_context_len + row, context_len + num_right + 1, mask=is_used)


def place_drafts(
    rows: Tensor,  # [R] int64  table rows
    num_tokens: Tensor,  # [R] int64  positions that the row uses; 0: padding
    width: int,  # W
    context_len: Tensor,  # [rows] int64  tokens of the row, including its last one
    num_accepted: Tensor,  # [rows] int64
    page_table: Tensor,  # [rows, P] int32
    page_size: int,
) -> PlacedDrafts:
    num_rows, num_pages = len(rows), page_table.shape[1]
    num_places = num_rows * width
    numbers = torch.empty(4, num_places, dtype=torch.int64, device=rows.device)
    by_place = torch.empty(3, width, num_rows, dtype=torch.int64, device=rows.device)
    of_rows = torch.empty(2, num_rows, dtype=torch.int64, device=rows.device)
    row_pages = torch.empty(num_places, num_pages, dtype=torch.int32, device=rows.device)
    if num_rows:
        place_drafts_kernel[(num_places, cdiv(num_pages, _TILE["BLOCK"]))](
            rows,
            num_tokens,
            context_len,
            num_accepted,
            page_table,
            numbers,
            by_place,
            of_rows,
            row_pages,
            num_rows,
            num_pages,
            page_size,
            width,
            **_TILE,
            **launch_options(rows.device),
        )
    of_places, positions, kv_index, context_lens = numbers.unbind()
    row_lens, accepted = of_rows.unbind()
    return PlacedDrafts(
        of_places, positions, kv_index, context_lens, row_pages, by_place, row_lens, accepted
    )


@triton.jit(
    do_not_specialize=["num_rows", "num_pages"],
    do_not_specialize_on_alignment=["p_rows", "p_num_tokens"],
)
def place_drafts_kernel(
    p_rows,  # [R]
    p_num_tokens,  # [R]
    p_context_len,  # [rows]
    p_num_accepted,  # [rows]
    p_page_table,  # [rows, P]
    p_numbers,  # [4, R * W]
    p_by_place,  # [3, W, R]
    p_of_rows,  # [2, R]
    p_row_pages,  # [R * W, P]
    num_rows,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_place = tl.program_id(0).to(tl.int64)
    i_row, place = i_place // WIDTH, i_place % WIDTH
    row = tl.load(p_rows + i_row)
    context_len = tl.load(p_context_len + row)
    num_used = tl.maximum(tl.load(p_num_tokens + i_row), 1)
    last_page = (context_len + num_used - 2) // PAGE_SIZE
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_pages = tl.load(
        p_page_table + row * num_pages + page,
        mask=(page <= last_page) & (page < num_pages),
        other=0,
    )
    tl.store(p_row_pages + i_place * num_pages + page, b_pages, mask=page < num_pages)
    if tl.program_id(1) == 0:
        is_used = place < num_used
        position = tl.where(is_used, context_len - 1 + place, 0)
        own_page = tl.load(p_page_table + row * num_pages + position // PAGE_SIZE).to(tl.int64)
        kv_index = tl.where(is_used, own_page * PAGE_SIZE + position % PAGE_SIZE, 0)
        num_places = tl.num_programs(0)
        p_to = p_numbers + i_place
        tl.store(p_to, row)
        tl.store(p_to + num_places, position)
        tl.store(p_to + 2 * num_places, kv_index)
        tl.store(p_to + 3 * num_places, position + 1)
        p_to = p_by_place + place * num_rows + i_row
        tl.store(p_to, position)
        tl.store(p_to + num_places, kv_index)
        tl.store(p_to + 2 * num_places, position + 1)
        if place == 0:
            tl.store(p_of_rows + i_row, context_len + WIDTH - 1)
            tl.store(p_of_rows + num_rows + i_row, tl.load(p_num_accepted + row))


def draft_tokens(
    rows: Tensor,  # [R] int64  table rows
    given: Tensor,  # [W - 1, R] int64  the host's drafts; negative: the table's
    last_token: Tensor,  # [rows] int64
    drafts: Tensor,  # [rows, n] int64  written if the host has drafts
) -> Tensor:  # [R * W] int64  a row's last token, and its drafts
    num_rows, width = len(rows), 1 + len(given)
    token_ids = torch.empty(num_rows * width, dtype=torch.int64, device=rows.device)
    if num_rows:
        draft_tokens_kernel[(cdiv(num_rows, _ADVANCE_TILE["BLOCK"]), width)](
            rows,
            given,
            last_token,
            drafts,
            token_ids,
            num_rows,
            drafts.shape[1],
            width,
            **_ADVANCE_TILE,
            **launch_options(rows.device),
        )
    return token_ids


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["p_rows", "p_given"])
def draft_tokens_kernel(
    p_rows,  # [R]
    p_given,  # [W - 1, R]
    p_last_token,  # [rows]
    p_drafts,  # [rows, n]
    p_token_ids,  # [R * W]
    num_rows,
    NUM_DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    i_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(1)
    is_row = i_row < num_rows
    row = tl.load(p_rows + i_row, mask=is_row, other=0)
    if place == 0:
        token_id = tl.load(p_last_token + row, mask=is_row, other=0)
    else:
        p_draft = p_drafts + row * NUM_DRAFTS + place - 1
        given = tl.load(p_given + (place - 1) * num_rows + i_row, mask=is_row, other=-1)
        token_id = tl.where(given >= 0, given, tl.load(p_draft, mask=is_row, other=0))
        tl.store(p_draft, given, mask=is_row & (given >= 0))
    tl.store(p_token_ids + i_row * WIDTH + place, token_id, mask=is_row)
