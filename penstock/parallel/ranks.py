"""The rank of a process among those that run one model, and what they exchange in a step.

All ranks launch the same step on their shards of the weights. After a layer's last GEMM each has a
partial sum; one all-reduce adds them. Only rank 0 adds the residual and the bias first, so that
these are counted once. Rank 0 samples tokens; the others receive them.

Nothing here waits for the device or reads a tensor on the host: on a GPU a CUDA graph captures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.parallel.share import equal_part, shared_part, uneven_part


class Links(Protocol):
    """In-place collectives on tensors of one device. `links.py` implements them with torch."""

    def add(self, values: Tensor) -> None:
        """Sums over all ranks; the result is the same, bit for bit, on each."""

    def maximize(self, values: Tensor) -> None: ...

    def gather(self, values: Tensor, out: Tensor) -> None:  # [...], [ranks, ...]
        ...

    def send_all(self, values: Tensor) -> None:
        """Broadcasts the values of rank 0."""


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int = 0
    size: int = 1
    links: Links | None = None  # None: a single rank, or a model on meta
    whole_experts: bool = False  # a rank has whole experts, not a slice of each

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def decides(self) -> bool:
        """Whether this rank samples tokens, and adds what must be counted once."""
        return self.rank == 0

    def part(self, count: int, name: str) -> range:
        return equal_part(count, self.rank, self.size, name)

    def shared_part(self, count: int, name: str) -> range:
        return shared_part(count, self.rank, self.size, name)

    def uneven_part(self, count: int) -> range:
        return uneven_part(count, self.rank, self.size)

    def add(self, values: Tensor, *, deterministic: bool = False) -> Tensor:
        """The sum over all ranks, in place. An all-reduce may add in an order that depends on the
        position in the tensor; `deterministic` adds in rank order.
        """
        if self.links is None:
            return values
        if not deterministic or self.size == 2:
            self.links.add(values)
            return values
        total, *others = self._gathered(values)
        for other in others:
            total = total + other
        return values.copy_(total)

    def join_columns(self, own: Tensor, num_columns: int) -> Tensor:  # [L, own] -> [L, columns]
        """Gathers the columns of all ranks. A shorter last part is padded, and the padding removed
        here.
        """
        if self.links is None:
            return own
        width = -(-num_columns // self.size)
        padded = own
        if own.shape[-1] < width:
            padded = torch.nn.functional.pad(own, (0, width - own.shape[-1]))
        joined = self._gathered(padded.contiguous()).movedim(0, -2).flatten(-2)
        return joined[..., :num_columns].contiguous()

    def likeliest(self, own: Tensor, first: int) -> Tensor:  # [L, own] float32 -> [L] int64
        """The argmax over all ranks, whose own columns start at `first`; the first one of equal
        values. Sends eight bytes per row instead of a row of logits.
        """
        if self.links is None:
            return own.argmax(-1)
        if own.shape[-1]:
            values, columns = own.max(-1)
            bits = values.view(torch.int32).long()
            ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)  # ordered like the floats
            keys = (ordered << 32) + (0xFFFFFFFF - (columns + first))
        else:
            shape = own.shape[:-1]
            keys = torch.full(shape, torch.iinfo(torch.int64).min, device=own.device)
        self.links.maximize(keys)
        return 0xFFFFFFFF - (keys & 0xFFFFFFFF)

    def of_rank_0(self, values: Tensor) -> Tensor:
        """In place: replaces the values with those of rank 0."""
        if self.links is not None:
            self.links.send_all(values)
        return values

    def least(self, number: int, device: torch.device) -> int:
        """The minimum over ranks. Waits: used at start, when ranks must size their memory alike."""
        return -self.most(-number, device)

    def most(self, number: int, device: torch.device) -> int:
        if self.links is None:
            return number
        found = torch.tensor([number], device=device)
        self.links.maximize(found)
        return int(found.item())

    def _gathered(self, values: Tensor) -> Tensor:  # [...] -> [ranks, ...]
        assert self.links is not None
        out = values.new_empty(self.size, *values.shape)
        self.links.gather(values, out)
        return out


ALONE = Ranks()
