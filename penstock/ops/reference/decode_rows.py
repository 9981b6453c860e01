"""Prepares a decode step: from row numbers and positions to everything one token per row needs.

The last token and the pages of a row stay in tables on the device; the host sends four integers per
row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode_rows(
    packed: Tensor,  # [4, R] int64  row of the tables, position, state slot, initial slot
    last_token: Tensor,  # [rows] int64
    page_table: Tensor,  # [rows, P] int32
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token_ids [R], kv_index [R], context_lens [R], all int64, and row_pages [R, P] int32.

    Pages that the row has not reached are zero in `row_pages`. The slots are passed through by the
    caller.
    """
    rows, positions = packed[0], packed[1]
    pages = page_table[rows]  # [R, P]
    current = (positions // page_size)[:, None]  # [R, 1]
    kv_index = pages.gather(1, current)[:, 0].long() * page_size + positions % page_size
    is_reached = torch.arange(pages.shape[1], device=pages.device) <= current
    return last_token[rows], kv_index, positions + 1, torch.where(is_reached, pages, 0)
