"""The inputs of a pass over packed prompts with torch's attention: lengths stay on the host."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Pack(NamedTuple):
    """Prompts end to end: T tokens of R prompts."""

    slots: Tensor  # [T]
    positions: Tensor  # [T]
    lasts: Tensor  # [R]  where the last token of each prompt is
    lengths: list[int]


def pack_prompts(lengths: list[int], slots: list[int], device: torch.device) -> Pack:
    """In one copy to the device."""
    ends = list(accumulate(lengths))
    per_token = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = torch.cat([per_token, positions, torch.tensor(ends) - 1]).to(device)
    per_token, positions, lasts = packed.split((ends[-1], ends[-1], len(lengths)))
    return Pack(per_token, positions, lasts, lengths)
