"""The head and the tail of a decode step: from row numbers to all that a step of one token a row
needs, and from the sampled tokens to where the next step starts.

What a row keeps between steps (its last token, how many tokens it has, its pages) stays in tables
on the device; the host sends four integers a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PlacedDrafts(NamedTuple):
    """Where the tokens of rows are that have W places each: the row's last token, and drafts.

    A place that a row does not use has position 0, and key and value of page 0, which belongs to
    nobody. What is computed there is never taken.
    """

    rows: Tensor  # [R * W] int64  of the tables, of each place
    positions: Tensor  # [R * W] int64
    kv_index: Tensor  # [R * W] int64
    context_lens: Tensor  # [R * W] int64  tokens that each place sees
    row_pages: Tensor  # [R * W, P] int32  zero behind what the row uses
    by_place: Tensor  # [3, W, R] int64  positions, kv_index and context_lens, place after place
    row_lens: Tensor  # [R] int64  tokens of the row, if every place were used
    num_accepted: Tensor  # [R] int64


def decode_rows(
    rows: Tensor,  # [R] int64  of the tables
    last_token: Tensor,  # [rows] int64
    context_len: Tensor,  # [rows] int64  tokens of the row, its last one included
    page_table: Tensor,  # [rows, P] int32
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """token_ids, positions, kv_index, context_lens, each [R] int64, and row_pages [R, P] int32.

    Pages that the row has not reached are zero in `row_pages`.
    """
    context_lens = context_len[rows]
    positions = context_lens - 1
    pages = page_table[rows]  # [R, P]
    current = (positions // page_size)[:, None]  # [R, 1]
    kv_index = pages.gather(1, current)[:, 0].long() * page_size + positions % page_size
    is_reached = torch.arange(pages.shape[1], device=pages.device) <= current
    row_pages = torch.where(is_reached, pages, 0)
    return last_token[rows], positions, kv_index, context_lens, row_pages


def advance_rows(
    rows: Tensor,  # [R] int64  of the tables; a row that gains tokens occurs once
    num_new: Tensor,  # [R] int64  tokens that the row gains; 0 in a row that pads the step
    token_ids: Tensor,  # [R] int64  the last one of these
    last_token: Tensor,  # [rows] int64  written
    context_len: Tensor,  # [rows] int64  written
) -> None:
    kept = torch.where(num_new > 0, token_ids, last_token[rows])
    last_token.index_copy_(0, rows, kept)
    context_len.index_add_(0, rows, num_new)


def accept_drafts(
    rows: Tensor,  # [R] int64  of the tables; a row that gains tokens occurs once
    num_tokens: Tensor,  # [R] int64  that the row samples: 1, and its drafts; 0: it pads the step
    sampled: Tensor,  # [L] int64  what the model says behind each of them, row after row
    drafts: Tensor,  # [rows, n] int64
    last_token: Tensor,  # [rows] int64  written
    context_len: Tensor,  # [rows] int64  written
    num_accepted: Tensor,  # [rows] int64  written: entries of the journal to replay
    forced: Tensor | None = None,  # [rows] int64  drafts to take, right or not; below 0: compare
    width: int = 0,  # places that `sampled` has for every row; 0: those that it samples
) -> Tensor:  # [R] int64  tokens that each row gains: drafts that were right, and one more
    """A draft is right if the model says the same at its place, and all drafts before it are.
    Measurements force what random weights would never accept."""
    num_drafts = drafts.shape[1]
    place = torch.arange(num_drafts + 1, device=rows.device)
    firsts = num_tokens.cumsum(0) - num_tokens
    if width:
        firsts = width * torch.arange(len(rows), device=rows.device)
    said = sampled[(firsts[:, None] + place).clamp(max=len(sampled) - 1)]  # [R, n + 1]
    is_right = (said[:, :-1] == drafts[rows]) & (place[:-1] < num_tokens[:, None] - 1)
    num_right = is_right.cumprod(1).sum(1)
    if forced is not None:
        wanted = forced[rows].minimum((num_tokens - 1).clamp(min=0))
        num_right = torch.where(wanted >= 0, wanted, num_right)
    is_used = num_tokens > 0
    num_new = torch.where(is_used, num_right + 1, 0)
    last = said.gather(1, num_right[:, None])[:, 0]
    last_token.index_copy_(0, rows, torch.where(is_used, last, last_token[rows]))
    num_accepted.index_copy_(0, rows, torch.where(is_used, num_right, num_accepted[rows]))
    context_len.index_add_(0, rows, num_new)
    return num_new


def place_drafts(
    rows: Tensor,  # [R] int64  of the tables
    num_tokens: Tensor,  # [R] int64  places that the row uses; 0: it pads the step
    width: int,  # W
    context_len: Tensor,  # [rows] int64  tokens of the row, its last one included
    num_accepted: Tensor,  # [rows] int64
    page_table: Tensor,  # [rows, P] int32
    page_size: int,
) -> PlacedDrafts:
    lens, num_used = context_len[rows], num_tokens.clamp(min=1)
    place = torch.arange(width, device=rows.device)
    is_used = place < num_used[:, None]  # [R, W]
    positions = torch.where(is_used, lens[:, None] - 1 + place, 0)
    last_page = (lens + num_used - 2) // page_size
    pages = page_table[rows]  # [R, P]
    is_reached = torch.arange(pages.shape[1], device=pages.device) <= last_page[:, None]
    row_pages = torch.where(is_reached, pages, 0)
    page = row_pages.gather(1, positions // page_size).long()
    kv_index = torch.where(is_used, page * page_size + positions % page_size, 0)
    numbers = torch.stack((positions, kv_index, positions + 1))  # [3, R, W]
    return PlacedDrafts(
        rows=rows.repeat_interleave(width),
        positions=positions.flatten(),
        kv_index=kv_index.flatten(),
        context_lens=positions.flatten() + 1,
        row_pages=row_pages.repeat_interleave(width, dim=0),
        by_place=numbers.transpose(1, 2).contiguous(),
        row_lens=lens + width - 1,
        num_accepted=num_accepted[rows],
    )


def draft_tokens(
    rows: Tensor,  # [R] int64  of the tables
    given: Tensor,  # [W - 1, R] int64  drafts of the host; below 0: the table's
    last_token: Tensor,  # [rows] int64
    drafts: Tensor,  # [rows, n] int64  written where the host has drafts
) -> Tensor:  # [R * W] int64  a row's last token, and its drafts
    num_drafts = len(given)
    known = drafts[rows, :num_drafts]  # [R, W - 1]
    known = torch.where(given.t() >= 0, given.t(), known)
    drafts[rows, :num_drafts] = known
    return torch.cat((last_token[rows][:, None], known), dim=1).flatten()
