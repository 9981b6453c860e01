"""The head of a decode step: from row numbers and positions to all that a step of one token a row
needs.

What a row keeps between steps (its last token, its pages) stays in tables on the device; the host
sends four integers a row.
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
