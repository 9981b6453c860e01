"""The head and the tail of a decode step: from row numbers to all that a step of one token a row
needs, and from the sampled tokens to where the next step starts.

What a row keeps between steps (its last token, how many tokens it has, its pages) stays in tables
on the device; the host sends four integers a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
) -> Tensor:  # [R] int64  tokens that each row gains: drafts that were right, and one more
    """A draft is right if the model says the same at its place, and all drafts before it are."""
    num_drafts = drafts.shape[1]
    place = torch.arange(num_drafts + 1, device=rows.device)
    firsts = num_tokens.cumsum(0) - num_tokens
    said = sampled[(firsts[:, None] + place).clamp(max=len(sampled) - 1)]  # [R, n + 1]
    is_right = (said[:, :-1] == drafts[rows]) & (place[:-1] < num_tokens[:, None] - 1)
    num_right = is_right.cumprod(1).sum(1)
    is_used = num_tokens > 0
    num_new = torch.where(is_used, num_right + 1, 0)
    last = said.gather(1, num_right[:, None])[:, 0]
    last_token.index_copy_(0, rows, torch.where(is_used, last, last_token[rows]))
    num_accepted.index_copy_(0, rows, torch.where(is_used, num_right, num_accepted[rows]))
    context_len.index_add_(0, rows, num_new)
    return num_new
