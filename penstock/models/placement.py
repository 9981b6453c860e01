"""Where one checkpoint tensor goes. Models declare these in a table; the loader only follows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    parameter: str  # name of a parameter or a Weight in the module
    shape: tuple[int, ...]  # of the tensor in the checkpoint
    index: tuple[slice | int, ...] = ()  # the part of the parameter it fills; (): all of it
    convert: Callable[[Tensor], Tensor] | None = None  # applied before copying
    # The part of the stored tensor to read, before `convert`, by dimension; (): all of it.
    source: tuple[slice, ...] = ()

    def converted(self, values: Tensor) -> Tensor:
        """The part that was read, converted for copying."""
        return values if self.convert is None else self.convert(values)
