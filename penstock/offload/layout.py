"""How the matrices of an expert are stored, and where each of their tensors is in its record.

    record  [ gate and up: codes, scales, ... | down: codes, scales, ... | padding to 4096 bytes )

A layout is made from a loaded stack, or from the index of converted files; it describes one expert
and holds no data (its tensors are on the meta device). All experts of a layer share it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.ops.cpu.memory import new_tensor
from penstock.ops.quantized import QuantizedRows, Scales
from penstock.ops.tiles import Fields, TiledRows
from penstock.ops.weight import Part, Weight, map_part, tensors_of

RECORD_ALIGNMENT = 4096  # required by O_DIRECT for offsets, lengths and memory
FIELD_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """How one matrix, or each matrix of a stack, is stored: unquantized, or in quantized parts."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]  # on the meta device; an unquantized matrix is one tensor
    is_quantized: bool

    @classmethod
    def of(cls, weight: Weight, *, is_stack: bool) -> StoredMatrix:
        """For a weight, or for each matrix of a stack."""

        def emptied(tensor: Tensor) -> Tensor:
            shape = tensor.shape[1:] if is_stack else tensor.shape
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        parts: tuple[Part, ...] = weight.parts or (weight.values.data,)
        return cls(
            tuple(weight.shape[1:] if is_stack else weight.shape),
            tuple(map_part(part, emptied) for part in parts),
            bool(weight.parts),
        )

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in tensors_of(part)]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """In memory, where unquantized values have the model's dtype."""
        return sum(
            part.numel() * dtype.itemsize if isinstance(part, Tensor) else part.num_bytes
            for part in self.parts
        )

    def fill(self, weight: Weight, tensors: Iterator[Tensor]) -> None:
        """Gives a weight these tensors, in our order: one matrix, or stacks of them."""
        parts = tuple(map_part(part, lambda _: next(tensors)) for part in self.parts)
        if self.is_quantized:
            weight.quantize(parts)
            return
        (values,) = parts
        assert isinstance(values, Tensor)
        weight.values = nn.Parameter(values, requires_grad=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "is_quantized": self.is_quantized,
            "parts": [_part_to_json(part) for part in self.parts],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> StoredMatrix:
        parts = tuple(_part_from_json(part) for part in given["parts"])
        return cls(tuple(given["shape"]), parts, given["is_quantized"])


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of an expert: its position in the record."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_plain: bool  # unquantized: a slot holds it in the model's dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ExpertLayout:
    """The layout of an expert's two matrices and of its record."""

    def __init__(self, gate_up: StoredMatrix, down: StoredMatrix) -> None:
        self.gate_up, self.down = gate_up, down
        self.fields: list[Field] = []
        end = 0
        for part in (*gate_up.parts, *down.parts):
            for tensor in tensors_of(part):
                start = -(-end // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
                shape, is_plain = tuple(tensor.shape), isinstance(part, Tensor)
                self.fields.append(Field(start, tensor.dtype, shape, is_plain))
                end = start + self.fields[-1].num_bytes
        self.record_bytes = -(-end // RECORD_ALIGNMENT) * RECORD_ALIGNMENT

    @classmethod
    def of(cls, gate_up: Weight, down: Weight) -> ExpertLayout:
        """From stacks."""
        return cls(*(StoredMatrix.of(weight, is_stack=True) for weight in (gate_up, down)))

    @property
    def key(self) -> str:
        """Layers whose layouts have the same key can share slots."""
        return json.dumps(self.to_json(), sort_keys=True)

    def views(self, record: Tensor) -> list[Tensor]:  # [record_bytes] uint8
        """Views of the expert's tensors in a record."""
        return [
            record[field.offset : field.offset + field.num_bytes]
            .view(field.dtype)
            .view(field.shape)
            for field in self.fields
        ]

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of an expert on a device, where unquantized values have the model's dtype."""
        return sum(self._field_bytes(dtype))

    def new_slots(
        self, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Weight, Weight, list[Tensor]]:
        """Stacks of gate and up, and of down, and their tensors in field order."""
        tensors = [
            new_tensor(
                (num_slots, *field.shape), dtype if field.is_plain else field.dtype, device
            ).zero_()  # a kernel may load values that it does not use
            for field in self.fields
        ]
        return *self.stacks_of(tensors, dtype), tensors

    def bytes_in(self, num_slots: int, dtype: torch.dtype) -> int:
        """The bytes that `slots_in` needs."""
        return sum(_aligned(num_slots * size) for size in self._field_bytes(dtype))

    def slots_in(
        self, memory: Tensor, num_slots: int, dtype: torch.dtype
    ) -> tuple[Weight, Weight, list[Tensor]]:
        """Like `new_slots`, in existing uint8 memory, which is not cleared."""
        tensors, end = [], 0
        for field, size in zip(self.fields, self._field_bytes(dtype), strict=True):
            own = memory[end : end + num_slots * size]
            own = own.view(dtype if field.is_plain else field.dtype)
            tensors.append(own.view(num_slots, *field.shape))
            end += _aligned(num_slots * size)
        return *self.stacks_of(tensors, dtype), tensors

    def _field_bytes(self, dtype: torch.dtype) -> list[int]:
        """Bytes per slot."""
        return [
            math.prod(field.shape) * (dtype if field.is_plain else field.dtype).itemsize
            for field in self.fields
        ]

    def stacks_of(self, tensors: list[Tensor], dtype: torch.dtype) -> tuple[Weight, Weight]:
        """Gate and up, and down, from these tensors."""
        rest, weights = iter(tensors), []
        for matrix in (self.gate_up, self.down):
            shape = (len(tensors[0]), *matrix.shape)
            weight = Weight(torch.empty(shape, dtype=dtype, device="meta"))
            matrix.fill(weight, rest)
            weights.append(weight)
        return weights[0], weights[1]

    def to_json(self) -> dict[str, Any]:
        return {"gate_up": self.gate_up.to_json(), "down": self.down.to_json()}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> ExpertLayout:
        return cls(*(StoredMatrix.from_json(given[name]) for name in ("gate_up", "down")))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // FIELD_ALIGNMENT) * FIELD_ALIGNMENT


def stack_tensors(weights: Sequence[Weight]) -> list[Tensor]:
    """All tensors of loaded stacks, in the field order of their layout."""
    return [
        tensor
        for weight in weights
        for part in (weight.parts or (weight.values.data,))
        for tensor in tensors_of(part)
    ]


def _part_to_json(part: Part) -> dict[str, Any]:
    if isinstance(part, Tensor):
        return {"kind": "plain", "values": _tensor_to_json(part)}
    if isinstance(part, QuantizedRows):
        return {
            "kind": "rows",
            "num_columns": part.num_columns,
            "bits": part.bits,
            "group": part.group,
            "low": _tensor_to_json(part.low),
            "high": _tensor_to_json(part.high),
            "scales": _scales_to_json(part.scales),
            "offsets": _scales_to_json(part.offsets),
            "are_zeros": part.are_zeros,
            "levels": None
            if part.levels is None
            else base64.b64encode(part.levels.cpu().numpy().tobytes()).decode(),
            "bias": part.bias,
            "columns": _tensor_to_json(part.columns),
        }
    numbers = ("num_rows", "num_columns", "bits", "is_float8", "zero", "group")
    tensors = ("codes", "records", "columns", "block_scales")
    return {
        "kind": "tiles",
        **{name: getattr(part, name) for name in numbers},
        **{name: _tensor_to_json(getattr(part, name)) for name in tensors},
        "types": [None if dtype is None else _name_of(dtype) for dtype in part.fields.types],
        "are_zeros": part.fields.are_zeros,
    }


def _part_from_json(given: Mapping[str, Any]) -> Part:
    if given["kind"] == "plain":
        return _tensor_from_json(given["values"])
    rest = {name: value for name, value in given.items() if name != "kind"}
    for name in ("values", "low", "high", "codes", "records", "columns", "block_scales"):
        if rest.get(name) is not None:
            rest[name] = _tensor_from_json(rest[name])
    if given["kind"] == "rows":
        for name in ("scales", "offsets"):
            rest[name] = None if rest[name] is None else _scales_from_json(rest[name])
        if rest["levels"] is not None:
            raw = bytearray(base64.b64decode(rest["levels"]))
            rest["levels"] = torch.frombuffer(raw, dtype=torch.float32)
        return QuantizedRows(**rest)
    types: list[Any] = [
        None if name is None else getattr(torch, name) for name in rest.pop("types")
    ]
    coarse, coarse_offset, scale, offset = types
    fields = Fields(coarse, coarse_offset, scale, offset, rest.pop("are_zeros"))
    return TiledRows(fields=fields, **rest)


def _tensor_to_json(tensor: Tensor | None) -> dict[str, Any] | None:
    if tensor is None:
        return None
    return {"dtype": _name_of(tensor.dtype), "shape": list(tensor.shape)}


def _tensor_from_json(given: Mapping[str, Any]) -> Tensor:
    return torch.empty(given["shape"], dtype=getattr(torch, given["dtype"]), device="meta")


def _scales_to_json(scales: Scales | None) -> dict[str, Any] | None:
    if scales is None:
        return None
    fine, coarse = _tensor_to_json(scales.fine), _tensor_to_json(scales.coarse)
    return {"fine": fine, "coarse": coarse, "repeat": scales.repeat}


def _scales_from_json(given: Mapping[str, Any]) -> Scales:
    coarse = None if given["coarse"] is None else _tensor_from_json(given["coarse"])
    return Scales(_tensor_from_json(given["fine"]), coarse, given["repeat"])


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
