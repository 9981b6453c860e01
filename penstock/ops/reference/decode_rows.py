"""The start and the end of a decode step: from row numbers to the inputs of a step with one token
per row, and from the sampled tokens to the start of the next step.

A row's state between steps (its last token, its length, its pages) stays in tables on the device;
the host sends four integers per row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PlacedDrafts(NamedTuple):
    """The positions of rows with W tokens each: the row's last token, and drafts.

    An unused position has position 0, and its key and value go to page 0, the padding page. Its
    result is never used.
    """

    rows: Tensor  # [R * W] int64  table row of each position
    positions: Tensor  # [R * W] int64
    kv_index: Tensor  # [R * W] int64
    context_lens: Tensor  # [R * W] int64  tokens visible at each position
    row_pages: Tensor  # [R * W, P] int32  zero after the pages that the row uses
    by_place: Tensor  # [3, W, R] int64  positions, kv_index and context_lens, by position
    row_lens: Tensor  # [R] int64  tokens of the row, if every position were used
    num_accepted: Tensor  # [R] int64


class AcceptedDrafts(NamedTuple):
    """What rows gained in a step with drafts: accepted drafts, and one more token."""

    # [R, 2 + n] int64  the number of these tokens, 0: padding; and what was sampled, for the host
    for_host: Tensor
    last_places: Tensor  # [R] int64  of the last of them among the sampled; of padding, its first
    last_lens: Tensor  # [R] int64  tokens of the row when it was sampled

    @property
    def num_new(self) -> Tensor:  # [R]
        return self.for_host[:, 0]


def decode_rows(
    rows: Tensor,  # [R] int64  table rows
    last_token: Tensor,  # [rows] int64
    context_len: Tensor,  # [rows] int64  tokens of the row, including its last one
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
    rows: Tensor,  # [R] int64  table rows; a row that gains tokens occurs once
    num_new: Tensor,  # [R] int64  tokens that the row gains; 0 for a padding row
    token_ids: Tensor,  # [R] int64  the last one of these
    last_token: Tensor,  # [rows] int64  written
    context_len: Tensor,  # [rows] int64  written
) -> None:
    kept = torch.where(num_new > 0, token_ids, last_token[rows])
    last_token.index_copy_(0, rows, kept)
    context_len.index_add_(0, rows, num_new)


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
    """A draft is accepted if the model samples the same token at its position, and all drafts
    before it are accepted. Benchmarks force acceptance, which random weights would never reach.
    """
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
    num_before = (num_new - 1).clamp(min=0)
    for_host = torch.cat(
        (num_new[:, None], torch.where(place < num_tokens[:, None], said, 0)), dim=1
    )
    accepted = AcceptedDrafts(for_host, firsts + num_before, context_len[rows] + num_before)
    last = said.gather(1, num_right[:, None])[:, 0]
    last_token.index_copy_(0, rows, torch.where(is_used, last, last_token[rows]))
    num_accepted.index_copy_(0, rows, torch.where(is_used, num_right, num_accepted[rows]))
    context_len.index_add_(0, rows, num_new)
    return accepted


def place_drafts(
    rows: Tensor,  # [R] int64  table rows
    num_tokens: Tensor,  # [R] int64  positions that the row uses; 0: padding
    width: int,  # W
    context_len: Tensor,  # [rows] int64  tokens of the row, including its last one
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
    rows: Tensor,  # [R] int64  table rows
    given: Tensor,  # [W - 1, R] int64  the host's drafts; negative: the table's
    last_token: Tensor,  # [rows] int64
    drafts: Tensor,  # [rows, n] int64  written if the host has drafts
) -> Tensor:  # [R * W] int64  a row's last token, and its drafts
    num_drafts = len(given)
    known = drafts[rows, :num_drafts]  # [R, W - 1]
    known = torch.where(given.t() >= 0, given.t(), known)
    drafts[rows, :num_drafts] = known
    return torch.cat((last_token[rows][:, None], known), dim=1).flatten()
