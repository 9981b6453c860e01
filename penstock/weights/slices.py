"""Cuts placements to the part of each parameter that a rank keeps. Reads nothing.

A model's table describes whole parameters. For a parameter with a `Share`, a placement becomes one
for each kept range, with the part of the stored tensor to read; or none at all, and the tensor is
not read. Parts that are adjacent here may be scattered in the file: then the rows between the first
and the last are read, and `convert` selects ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.models.placement import Placement
from penstock.ops import Weight
from penstock.parallel.share import Kept, Share


def shares_of(model: nn.Module) -> dict[str, Share]:
    """By the names that placements use. Empty for a single rank."""
    shares: dict[str, Share] = {}
    for path, module in model.named_modules():
        if isinstance(module, Weight):
            if module.share is not None:
                shares[path] = module.share
        else:
            own: Mapping[str, Share] = getattr(module, "shares", {})
            shares |= {f"{path}.{name}": share for name, share in own.items()}
    return shares


def cut(placement: Placement, share: Share | None) -> list[Placement]:
    """What a rank reads of a tensor, and where it goes."""
    if share is None:
        return [placement]
    places = [*placement.index, *[slice(None)] * (len(share.shape) - len(placement.index))]
    rows = None if placement.convert is None else _rows_after_conversion(placement)
    found = [placement]
    dimension = 0  # of the converted tensor
    for target, (place, kept, size) in enumerate(zip(places, share.kept, share.shape)):
        if isinstance(place, int):
            found = [one for piece in found for one in _at(piece, target, place, kept)]
            continue
        if kept is not None:
            first, end, _ = place.indices(size)
            found = [
                _between(one, target, dimension, inside, own, rows)
                for one in found
                for inside, own in _overlaps(range(first, end), kept)
            ]
        dimension += 1
    return found


def cut_values(values: Tensor, share: Share) -> Tensor:
    """A rank's part of a whole tensor."""
    for dimension, kept in enumerate(share.kept):
        if kept is not None:
            parts = [values.narrow(dimension, one.start, len(one)) for one in kept]
            values = torch.cat(parts, dimension)
    return values


def _overlaps(covered: range, kept: Kept) -> list[tuple[range, range]]:
    """For each kept and covered range: its position among the covered ones, and in ours."""
    found = []
    starts = accumulate(map(len, kept), initial=0)
    for one, own_start in zip(kept, starts):
        first, end = max(one.start, covered.start), min(one.stop, covered.stop)
        if first < end:
            own = own_start + first - one.start
            inside = range(first - covered.start, end - covered.start)
            found.append((inside, range(own, own + end - first)))
    return found


def _at(piece: Placement, target: int, number: int, kept: Kept | None) -> list[Placement]:
    """One matrix of a stack."""
    if kept is None:
        return [piece]
    return [
        replace(piece, index=_with_place(piece.index, target, own.start))
        for _, own in _overlaps(range(number, number + 1), kept)
    ]


def _between(
    piece: Placement,
    target: int,
    dimension: int,
    inside: range,
    own: range,
    rows: _ConvertedRows | None,
) -> Placement:
    index = _with_place(piece.index, target, slice(own.start, own.stop))
    source, convert = slice(inside.start, inside.stop), piece.convert
    if rows is not None and dimension == rows.dimension:
        dimension = 0
        wanted = rows.stored[inside.start : inside.stop]
        first, end = int(wanted.min()), int(wanted.max()) + 1
        source = slice(first, end)
        is_in_order = torch.equal(wanted, torch.arange(first, end))
        assert is_in_order or rows.is_only_order
        if rows.is_only_order:  # other conversions transpose, which works on fewer rows too
            convert = None if is_in_order else partial(_take_rows, wanted - first)
    elif rows is not None:
        assert rows.is_only_order, f"{piece.parameter} is cut where its conversion mixes values"
    return replace(
        piece, index=index, source=_with_place(piece.source, dimension, source), convert=convert
    )


def _with_place(places: tuple[Any, ...], dimension: int, place: slice | int) -> tuple[Any, ...]:
    filled = [*places, *[slice(None)] * (dimension + 1 - len(places))]
    filled[dimension] = place
    return tuple(filled)


class _ConvertedRows(NamedTuple):
    dimension: int  # of the converted tensor, in which the stored rows are
    stored: Tensor  # the stored row at each of its indices
    is_only_order: bool  # the conversion does nothing else


def _rows_after_conversion(placement: Placement) -> _ConvertedRows:
    assert placement.convert is not None
    num_rows = placement.shape[0]
    numbers = torch.arange(num_rows).view(-1, *[1] * (len(placement.shape) - 1))
    converted = placement.convert(numbers)
    assert converted.numel() == num_rows
    assert not converted.is_floating_point(), f"{placement.parameter} is cut and changed"
    dimension = max(range(converted.dim()), key=lambda place: converted.shape[place])
    return _ConvertedRows(dimension, converted.flatten(), converted.shape == numbers.shape)


def _take_rows(rows: Tensor, values: Tensor) -> Tensor:
    return values[rows.to(values.device)]
