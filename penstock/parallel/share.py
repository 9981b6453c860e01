"""Which part of a whole parameter a rank keeps. Integers only: no tensors, no files.

A layer declares the share of each of its parameters when it is built; the loader reads only that
part of a checkpoint (`weights/slices.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError

Kept = tuple[range, ...]  # disjoint ranges, in the order that the rank stores them


class SplitError(ConfigError):
    """The model cannot be split over this number of ranks."""


@dataclass(frozen=True, slots=True)
class Share:
    shape: tuple[int, ...]  # of the whole parameter
    kept: tuple[Kept | None, ...]  # per dimension; None: all of it

    @property
    def own_shape(self) -> tuple[int, ...]:
        return tuple(
            size if kept is None else sum(map(len, kept))
            for size, kept in zip(self.shape, self.kept)
        )

    @property
    def fraction(self) -> float:
        """The fraction that is kept."""
        fraction = 1.0
        for own, size in zip(self.own_shape, self.shape):
            fraction *= own / size
        return fraction


def scaled(units: range, width: int, first: int = 0) -> range:
    """The elements of these units of `width` elements, in a dimension where units start at
    `first`.
    """
    return range(first + units.start * width, first + units.stop * width)


def equal_part(count: int, rank: int, num_ranks: int, name: str) -> range:
    """Contiguous parts of equal size."""
    if count % num_ranks:
        raise SplitError(
            f"tp is {num_ranks}, but the model has {count} {name}",
            f"Every rank gets an equal part, and {count} is not a multiple of {num_ranks}.",
        )
    own = count // num_ranks
    return range(rank * own, (rank + 1) * own)


def shared_part(count: int, rank: int, num_ranks: int, name: str) -> range:
    """The same for heads that others read: if there are fewer than ranks, several ranks keep the
    same one.
    """
    if count >= num_ranks or num_ranks % count:
        return equal_part(count, rank, num_ranks, name)
    own = rank * count // num_ranks
    return range(own, own + 1)


def uneven_part(count: int, rank: int, num_ranks: int) -> range:
    """Equal parts except for the last ones, which may be shorter: for a vocabulary."""
    own = -(-count // num_ranks)
    return range(min(rank * own, count), min((rank + 1) * own, count))
