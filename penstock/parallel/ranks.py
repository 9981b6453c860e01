"""The place of a process among those that run one model, and what they exchange in a step.

All ranks launch the same step on their parts of the weights. After a layer's last product each has
a part of a sum; one all-reduce adds the parts. Only rank 0 adds the residual and the bias before,
so that these are counted once. Rank 0 chooses tokens; the others receive them.

Nothing here waits for the device or reads a tensor on the host: on a GPU a CUDA graph captures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.parallel.share import equal_part, shared_part, uneven_part


class Links(Protocol):
    """Collectives in place, on tensors of one device. `links.py` has those of torch."""

    def add(self, values: Tensor) -> None:
        """Sums over all ranks; the result is the same, bit for bit, on each."""

    def maximize(self, values: Tensor) -> None: ...

    def gather(self, values: Tensor, out: Tensor) -> None:  # [...], [ranks, ...]
        ...

    def send_all(self, values: Tensor) -> None:
        """Those of rank 0."""


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int = 0
    size: int = 1
    links: Links | None = None  # None: alone, or a model that only states its shapes
    whole_experts: bool = False  # a rank has some of the experts, not a slice of each

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def decides(self) -> bool:
        """Whether it chooses tokens, and adds what must be counted once."""
        return self.rank == 0

    def part(self, count: int, name: str) -> range:
        return equal_part(count, self.rank, self.size, name)

    def shared_part(self, count: int, name: str) -> range:
        return shared_part(count, self.rank, self.size, name)

    def uneven_part(self, count: int) -> range:
        return uneven_part(count, self.rank, self.size)

    def add(self, values: Tensor, *, deterministic: bool = False) -> Tensor:
        """The sum over all ranks, in place. An all-reduce of several ranks may add in an order that
        depends on the place in the tensor; `deterministic` adds in the order of ranks."""
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
        """The columns of all ranks. A last rank with fewer fills them up, to be cut off here."""
        if self.links is None:
            return own
        width = -(-num_columns // self.size)
        padded = own
        if own.shape[-1] < width:
            padded = torch.nn.functional.pad(own, (0, width - own.shape[-1]))
        joined = self._gathered(padded.contiguous()).movedim(0, -2).flatten(-2)
        return joined[..., :num_columns].contiguous()

    def likeliest(self, own: Tensor, first: int) -> Tensor:  # [L, own] float32 -> [L] int64
        """The column of the largest value over all ranks, whose own columns start at `first`; of
        equal ones the first. Eight bytes a row travel instead of a row of logits."""
        if self.links is None:
            return own.argmax(-1)
        if own.shape[-1]:
            values, columns = own.max(-1)
            bits = values.view(torch.int32).long()
            ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)  # as their floats are
            keys = (ordered << 32) + (0xFFFFFFFF - (columns + first))
        else:
            shape = own.shape[:-1]
            keys = torch.full(shape, torch.iinfo(torch.int64).min, device=own.device)
        self.links.maximize(keys)
        return 0xFFFFFFFF - (keys & 0xFFFFFFFF)

    def of_rank_0(self, values: Tensor) -> Tensor:
        """In place: those of rank 0, whatever others hold."""
        if self.links is not None:
            self.links.send_all(values)
        return values

    def least(self, number: int, device: torch.device) -> int:
        """Waits: for the start of an engine, whose ranks must size their memory alike."""
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
