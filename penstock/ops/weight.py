"""The weight of a GEMM: its values, and their storage format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.ops.cpu.few_tokens import shortened
from penstock.ops.cpu.memory import new_tensor, release
from penstock.ops.dispatch import op
from penstock.ops.quantized import QuantizedRows
from penstock.ops.reference import gather
from penstock.ops.reference.packed import pack
from penstock.ops.tiles import STEP, TILE_ROWS, TiledRows

Part = QuantizedRows | TiledRows | Tensor  # rows of a weight with one storage format
NARROWED_ROWS = 4096  # at a time

take_rows = op(gather.take_rows)  # here: `Weight.rows` needs it, and the other ops this file


def tensors_of(part: Part) -> list[Tensor]:
    """Everything that differs between the matrices of a stack."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, QuantizedRows):
        return part.own_tensors()
    found = (part.codes, part.records, part.columns, part.block_scales)
    return [tensor for tensor in found if tensor is not None]


def map_part(part: Part, change: Callable[[Tensor], Tensor]) -> Part:
    """The same with these tensors changed, in the order of `tensors_of`."""
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, QuantizedRows):
        return part.mapped(change)
    names = ("codes", "records", "columns", "block_scales")
    changed = {
        name: change(tensor) for name in names if (tensor := getattr(part, name)) is not None
    }
    return replace(part, **changed)  # type: ignore[arg-type]


class Weight(nn.Module):
    """A matrix [N, K], or one per expert [E, N, K]. Ops take it whole; it knows its storage format.

    It is a module so that the parameters, memory and checkpoint of a model include it. A quantized
    one has `parts`, its rows in order; `values` then has a shape and a dtype, but no memory.
    """

    values: nn.Parameter
    parts: tuple[Part, ...] = ()
    share: Any = None  # the rank's part of it (`parallel/share.py`); None: all
    num_plain_rows = 0  # last rows that are never quantized: few, and sensitive
    is_with_experts = False  # a shared expert's: same format as experts, for the same kernels
    short: Tensor | None = None  # the same values in bf16, for CPU GEMMs of a few tokens

    def __init__(self, values: Tensor, *, can_quantize: bool = True) -> None:
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=False)
        self.can_quantize = can_quantize  # False: an op reads its values

    def allocate(self, device: torch.device) -> None:
        """Allocates memory for its values, if it was created without."""
        if self.values.is_meta and device.type != "meta":
            values = new_tensor(tuple(self.shape), self.values.dtype, device)
            self.values = nn.Parameter(values, requires_grad=False)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def is_dense(self) -> bool:
        return self.values.dim() == 2 and not self.is_with_experts

    @property
    def num_bytes(self) -> int:
        if not self.parts:
            return self.values.numel() * self.values.element_size()
        return sum(
            part.nbytes if isinstance(part, Tensor) else part.num_bytes for part in self.parts
        )

    @property
    def kinds(self) -> tuple[object, ...]:
        """The formats of its parts: weights with equal formats and shapes use the same kernels."""
        return tuple(
            (part.dtype if isinstance(part, Tensor) else part.kind, part.shape)
            for part in self.parts
        )

    def quantize(self, parts: tuple[Part, ...]) -> None:
        """Replaces the values with these parts."""
        assert self.can_quantize
        assert sum(part.shape[-2] for part in parts) == self.shape[-2]
        self.parts = parts
        self.values = nn.Parameter(
            torch.empty_like(self.values, device="meta"), requires_grad=False
        )

    def copy(self) -> Weight:
        """A copy in its own memory."""
        own = Weight(self.values.data.clone(), can_quantize=self.can_quantize)
        own.parts = tuple(map_part(part, torch.clone) for part in self.parts)
        return own

    def take(self, other: Weight) -> None:
        """Takes over the other one's content, sharing its memory."""
        self.parts, self.values = other.parts, other.values

    def dequantize(self) -> Tensor:  # [N, K] or [E, N, K]
        """All values: float32 for a quantized weight, otherwise unchanged."""
        if not self.parts:
            return self.values
        plain = (
            part.float() if isinstance(part, Tensor) else part.dequantize() for part in self.parts
        )
        return torch.cat(list(plain), dim=-2)

    def select(self, expert: int) -> tuple[Part, ...]:
        """The parts of one matrix of a quantized stack."""
        chosen = []
        for part in self.parts:
            assert not isinstance(part, TiledRows), "kernels choose among experts themselves"
            chosen.append(part[expert] if isinstance(part, Tensor) else part.select(expert))
        return tuple(chosen)

    def rows(self, ids: Tensor) -> Tensor:  # [T] -> [T, K]
        """The embedding rows of these tokens."""
        if not self.parts:
            return take_rows(ids, self.values)
        (part,) = self.parts
        if isinstance(part, Tensor):
            return take_rows(ids, part).to(self.values.dtype)
        if isinstance(part, TiledRows):
            from penstock.ops.cuda.quantized import expand  # where there is a GPU

            return expand(part, self.values.dtype, ids)
        return part.rows(ids).to(self.values.dtype)

    def first_rows(self, count: int) -> Weight:
        """A weight of the first `count` rows, in the same memory; itself if there are no more, or
        if they cannot be separated.
        """
        if count >= self.shape[0] or len(self.parts) > 1:
            return self
        if not self.parts:
            return Weight(self.values[:count])
        (part,) = self.parts
        first = Weight(self.values[:count])
        if isinstance(part, Tensor):
            first.parts = (part[:count],)
            return first
        if not isinstance(part, TiledRows) or part.columns is not None or count % STEP:
            return self
        scales = part.block_scales
        first.parts = (
            replace(
                part,
                num_rows=count,
                codes=part.codes[: count // TILE_ROWS],
                records=part.records[: count // TILE_ROWS],
                block_scales=None if scales is None else scales[: count // STEP],
            ),
        )
        return first

    def pack(self) -> None:
        """Repacks the matrix for GEMMs on this CPU, if that is faster."""
        if not self.parts:
            self.values = nn.Parameter(pack(self.values), requires_grad=False)

    def shorten(self) -> None:
        """Keeps a bf16 copy of its values, if that is exact: half the bytes to read."""
        if not self.parts:
            self.short = shortened(self.values)

    def narrow(self) -> None:
        """Replaces its values with bf16, if that is exact: half the memory. CPU only."""
        if self.parts or not self.can_quantize or self.values.dtype != torch.float32:
            return
        wide = self.values.data.split(NARROWED_ROWS)
        if not all(torch.equal(piece, piece.bfloat16().float()) for piece in wide):
            return
        narrow = new_tensor(tuple(self.shape), torch.bfloat16, self.values.device)
        for piece, own in zip(wide, narrow.split(NARROWED_ROWS)):
            own.copy_(piece)
            release(piece)  # both are never in memory as a whole
        self.quantize((narrow,))


@contextmanager
def deferred_weights() -> Iterator[None]:
    """Weights created in this context have no memory until `Weight.allocate`: those that stay
    quantized never need it.
    """
    token = _are_deferred.set(True)
    try:
        yield
    finally:
        _are_deferred.reset(token)


_are_deferred: ContextVar[bool] = ContextVar("are_deferred", default=False)


def are_deferred() -> bool:
    return _are_deferred.get()


def bytes_of(model: nn.Module) -> int:
    """Memory of the weights of a model."""
    parts = sum(
        module.num_bytes
        for module in model.modules()
        if isinstance(module, Weight) and module.parts
    )
    plain = (p for p in model.parameters() if not p.is_meta)
    return parts + sum(parameter.numel() * parameter.element_size() for parameter in plain)
