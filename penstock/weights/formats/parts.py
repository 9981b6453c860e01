"""Shared by the packed formats: finds the parts of a weight, checks them and reads the requested
rows.

A format lists the suffixes of its parts and how they form a `StoredTensor`. Everything in the
header (presence, dtype, shape) is checked before any data is read.
"""

from __future__ import annotations

import functools
import math
import re
import re._parser as re_parser
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.reading import read_size, unusable
from penstock.weights.stored import ReadCodes, StoredTensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INT32 = (torch.int32, torch.uint32)
BYTES = (torch.uint8, torch.int8)
MAX_REPEATS = 3  # in a pattern for names, which are short
CODES = "codes"  # the role of the part with one code per element

# Parts for activations and the KV cache, which stay in the model's dtype.
UNUSED = frozenset(
    f"{what}_{kind}"
    for what in ("input", "activation", "output", "q", "k", "v", "kv")
    for kind in ("scale", "zero_point", "global_scale")
)


@dataclass(frozen=True, slots=True)
class Format:
    """The suffixes of a weight's parts, and how to combine them."""

    endings: Mapping[
        str, tuple[str, str]
    ]  # suffix of a part -> (suffix of its weight, role of the part)
    open: Callable[[Parts], StoredTensor]


@dataclass(frozen=True, slots=True)
class Parts:
    """The stored tensors that make one weight, by their role."""

    name: str  # of the weight
    by_role: dict[str, StoredTensor]

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def __contains__(self, role: str) -> bool:
        return role in self.by_role

    def take(
        self,
        role: str,
        dtypes: Collection[torch.dtype],
        shape: tuple[int | None, ...] | None = None,
    ) -> StoredTensor:
        """The part with a role, checked for dtype and shape (None: any size)."""
        part = self.by_role.get(role)
        if part is None:
            present = ", ".join(sorted(part.name for part in self.by_role.values()))
            raise CheckpointError(f"{self.name} lacks its {role} (there is {present})")
        if part.dtype not in dtypes:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(
                f"{part.name} is {str(part.dtype).removeprefix('torch.')}, expected {expected}"
            )
        is_right = shape is None or (
            len(part.shape) == len(shape)
            and all(wanted in (None, size) for size, wanted in zip(part.shape, shape))
        )
        if not is_right:
            raise wrong_shape(part, shape or ())
        if role == CODES and len(part.shape) not in (2, 3):
            raise CheckpointError(
                f"{part.name} is {list(part.shape)}, expected two dimensions or three"
            )
        if 0 in part.shape:
            raise CheckpointError(f"{part.name} is {list(part.shape)}, which has no elements")
        return part

    def make(self, shape: tuple[int, ...], scheme: str, read_codes: ReadCodes) -> StoredTensor:
        return StoredTensor(
            self.name,
            shape,
            torch.float32,
            read=lambda rows: read_codes(rows).dequantize(),
            scheme=scheme,
            stored_bytes=sum(part.num_bytes for part in self.by_role.values()),
            read_codes=read_codes,
        )


def wrong_shape(part: StoredTensor, expected: tuple[int | None, ...]) -> CheckpointError:
    sizes = ", ".join("any" if size is None else str(size) for size in expected)
    return CheckpointError(f"{part.name} is {list(part.shape)}, expected [{sizes}]")


@dataclass(frozen=True, slots=True)
class Grid:
    """One stored number for each block of a weight [N, K] or [E, N, K]."""

    part: StoredTensor
    shape: tuple[int, ...]  # of the weight
    block: tuple[int, int]

    @classmethod
    def of(
        cls,
        parts: Parts,
        role: str,
        shape: tuple[int, ...],
        block: tuple[int, int],
        dtypes: Collection[torch.dtype] = FLOATS,
    ) -> Grid:
        grid = cls(parts.take(role, dtypes), shape, block)
        # One number per tensor is stored as [], [1] or [1, 1]; one per row as [N] or [N, 1].
        if _without_ones(grid.part.shape) != _without_ones(grid.stored_shape):
            raise wrong_shape(grid.part, grid.stored_shape)
        return grid

    @property
    def stored_shape(self) -> tuple[int, ...]:
        *stack, num_rows, num_columns = self.shape
        return (*stack, math.ceil(num_rows / self.block[0]), math.ceil(num_columns / self.block[1]))

    def read(self, rows: slice | None) -> tuple[Tensor, tuple[int, int]]:
        """The numbers for these rows, and the block that each one applies to."""
        if rows is None or len(self.shape) > 2:
            return self._load(rows), self.block
        first, end = bounds(rows, self.shape[0])
        height = self.block[0]
        values = self._load(slice(first // height, math.ceil(end / height)))
        if first % height == 0:
            return values, self.block
        return values[torch.arange(first, end) // height - first // height], (1, self.block[1])

    def _load(self, rows: slice | None) -> Tensor:
        if self.part.shape == self.stored_shape:
            return self.part.load(rows)
        whole = self.part.load().reshape(self.stored_shape)
        return whole if rows is None else whole[rows]


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def bounds(rows: slice | None, num_rows: int) -> tuple[int, int]:
    first, end, step = (rows or slice(None)).indices(num_rows)
    assert step == 1, "rows are read contiguously"
    return first, max(first, end)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:  # [..., words] -> [..., count] uint8
    """Unpacks codes from a little-endian bit stream, lowest bits first."""
    num_bytes = packed.shape[-1] * packed.itemsize
    stream = packed.contiguous().flatten().view(torch.uint8).view(*packed.shape[:-1], num_bytes)
    if bits == 8:
        return stream[..., :count].contiguous()
    if bits in (1, 2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes = (stream.unsqueeze(-1) >> shifts).flatten(-2)
        return codes[..., :count].bitwise_and_(2**bits - 1)
    begins = torch.arange(count) * bits
    wide = torch.nn.functional.pad(stream, (0, 1)).short()
    pairs = wide[..., begins // 8] | (wide[..., begins // 8 + 1] << 8)
    return ((pairs >> (begins % 8).short()) & (2**bits - 1)).to(torch.uint8)


def read_values(part: StoredTensor, rows: slice | None, columns: slice | None) -> Tensor:
    """Codes stored as one number each."""
    return part.load(rows) if columns is None else part.load_part((rows or slice(None), columns))


def read_packed(
    part: StoredTensor,  # [..., words]
    bits: int,
    num_columns: int,
    rows: slice | None,
    columns: slice | None,
) -> Tensor:  # [..., columns] uint8
    """Codes packed along their row, from the words that contain them."""
    if columns is None:
        return unpack(part.load(rows), bits, num_columns)
    words, num_before, count = words_of(columns, bits, num_columns, part.dtype.itemsize)
    packed = part.load_part((rows or slice(None), words))
    return unpack(packed, bits, num_before + count)[..., num_before:].contiguous()


def words_of(
    columns: slice, bits: int, num_columns: int, word_bytes: int
) -> tuple[slice, int, int]:
    """The words that contain these codes, how many codes come before them, and how many they
    are.
    """
    first, end = bounds(columns, num_columns)
    word_bits = 8 * word_bytes
    step = bits // math.gcd(bits, word_bits)  # words after which a code is aligned to a word
    first_word = first * bits // word_bits // step * step
    num_before = first - first_word * word_bits // bits
    return slice(first_word, math.ceil(end * bits / word_bits)), num_before, end - first


def check_width(part: StoredTensor, bits: int, num_columns: int) -> None:
    """Checks that the last dimension holds this many codes, in 32-bit words."""
    words = math.ceil(num_columns * bits / 32)
    if part.shape[-1] != words:
        raise wrong_shape(part, (*part.shape[:-1], words))


def describe(kind: str, shape: tuple[int, ...], block: tuple[int, int]) -> str:
    """Such as "fp8 128x128" or "int4 g64"."""
    rows, columns = block
    if columns >= shape[-1] and rows in (1, shape[-2]):
        return f"{kind} per {'channel' if rows == 1 else 'tensor'}"
    return f"{kind} g{columns}" if rows == 1 else f"{kind} {rows}x{columns}"


def group_order(group_of: Tensor, group: int, name: str) -> Tensor | None:  # [K] -> [K]
    """The columns sorted by group, or None if groups are contiguous."""
    num_columns = group_of.numel()
    in_order = torch.arange(num_columns) // group
    groups = group_of.long()
    if torch.equal(groups, in_order):
        return None
    columns = torch.argsort(groups, stable=True)
    if not torch.equal(groups[columns], in_order):
        raise CheckpointError(
            f"{name} does not put {group} columns into each group",
            f"A group of {num_columns} columns is a number from 0 to {int(in_order[-1])}.",
            "Download or copy these files again.",
        )
    return columns


def read_group(config: Mapping[str, Any], key: str = "group_size") -> int | None:
    """Columns that share a scale; None: a whole row (-1 in most configs)."""
    if config.get(key) in (None, -1):
        return None
    return read_size(config, key)


def read_bits(config: Mapping[str, Any], allowed: Collection[int], key: str = "bits") -> int:
    bits = read_size(config, key)
    if bits not in allowed:
        raise unusable(key, bits, f"one of {', '.join(map(str, allowed))}")
    return bits


def check_fields(method: str, config: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuses, by name, a field that may change the meaning of the stored numbers."""
    unknown = sorted(key for key, value in config.items() if value and key not in known)
    if unknown:
        raise CheckpointError(
            f"quantization_config of {method} has {', '.join(unknown[:20])}, which is not known "
            "here",
            "An unknown field may change the meaning of the stored numbers.",
            "Remove it from config.json if it does not affect how the weights are stored.",
        )


def check_values(
    method: str, config: Mapping[str, Any], expected: Mapping[str, Collection[Any]]
) -> None:
    """Fields with only one supported value, which is also their default."""
    for key, values in expected.items():
        value = config.get(key)
        if value is not None and value not in values:
            raise unusable(f"{key} of {method}", value, " or ".join(map(repr, values)))


def spellings(module: str) -> tuple[str, ...]:
    """Removes the prefixes that tools put before the text model of a larger model."""
    bare = module.removeprefix("model.language_model.").removeprefix("model.")
    return (module, f"model.{bare}", f"model.language_model.{bare}", f"language_model.model.{bare}")


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of config.json matches the start of a name of the module."""
    compiled = _compile(pattern)
    return any(compiled.match(name) for name in spellings(module))


@functools.cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Refuses patterns that could take forever: Python tries every way to split a name among
    repeats.
    """
    try:
        compiled = re.compile(pattern)
        parsed = re_parser.parse(re.sub(r"(?<!\\)\.\*\$?$", "", pattern))  # which always matches
    except (re.error, OverflowError, RecursionError) as error:
        raise unusable(
            "a pattern of modules", pattern, f"a regular expression ({error})"
        ) from error
    if _num_repeats(parsed) > MAX_REPEATS:
        raise unusable(
            "a pattern of modules",
            pattern,
            f"a regular expression with at most {MAX_REPEATS} repeats, and no choice or repeat "
            "inside one",
        )
    return compiled


def _num_repeats(parsed: Any, *, is_repeated: bool = False) -> int:
    """Counts repeats without a fixed number. Nested repeats are too many, and so are alternatives
    inside one that their first letters do not distinguish.
    """
    found = 0
    for kind, given in parsed:
        if str(kind) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inner = given
            varies = least != most
            found += MAX_REPEATS + 1 if varies and is_repeated else int(varies)
            found += _num_repeats(inner, is_repeated=is_repeated or most > 1)
            continue
        if str(kind) == "BRANCH" and is_repeated and not _start_differently(given[1]):
            found += MAX_REPEATS + 1
        for part in given if isinstance(given, tuple | list) else ():
            branches = part if isinstance(part, list) else [part]
            found += sum(
                _num_repeats(branch, is_repeated=is_repeated)
                for branch in branches
                if isinstance(branch, re_parser.SubPattern)
            )
    return found


def _start_differently(branches: list[Any]) -> bool:
    """Whether the first letters distinguish the branches."""
    first = [branch[0] for branch in branches if len(branch)]
    letters = {given for kind, given in first if str(kind) == "LITERAL"}
    return len(letters) == len(branches)
